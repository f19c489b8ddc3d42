"""Token losses: float32 values, and the chunked head against the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.objectives import losses


@dataclasses.dataclass(frozen=True)
class Head:
    """A scorer that is only a head."""

    table: jax.Array
    largest: list = dataclasses.field(default_factory=list, compare=False)

    def head(self, hidden):
        self.largest.append(hidden.shape[:-1])
        return jnp.einsum("...d,vd->...v", hidden, self.table)


def _example(T):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (2, T, 8))
    labels = jax.random.randint(keys[1], (2, T), 0, 11).at[:, ::3].set(losses.IGNORE)
    return hidden, labels, jax.random.normal(keys[2], (11, 8))


def test_token_nll_is_minus_log_softmax_and_zero_where_ignored():
    hidden, labels, table = _example(7)
    logits = np.asarray(Head(table).head(hidden), np.float64)
    want = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
        logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    got = losses.token_nll(jnp.asarray(logits, jnp.float32), labels)
    np.testing.assert_allclose(got, np.where(labels == losses.IGNORE, 0.0, want), rtol=1e-5)


def test_token_nll_of_bfloat16_logits_is_reduced_in_float32():
    logits = jnp.asarray([[2.0, 1.0, 0.0]], jnp.bfloat16)
    got = losses.token_nll(logits, jnp.asarray([0]))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [np.log(1 + np.exp(-1) + np.exp(-2))], rtol=1e-6)


@pytest.mark.parametrize("T, chunk", [(8, 4), (7, 3), (5, 1), (6, 6)])
def test_chunked_head_equals_the_plain_one_in_value_and_gradient(T, chunk):
    hidden, labels, table = _example(T)
    weight = jnp.arange(2 * T, dtype=jnp.float32).reshape(2, T)

    def total(chunk):
        f = lambda hidden, table: jnp.sum(weight * losses.head_nll(Head(table), hidden, labels, chunk))
        return jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, table)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), total(chunk), total(T))


def test_chunked_head_never_sees_more_than_a_chunk():
    hidden, labels, table = _example(8)
    head = Head(table)
    jax.grad(lambda h: jnp.sum(losses.head_nll(head, h, labels, 2)))(hidden)
    assert set(head.largest) == {(2, 2)}


def test_the_logits_of_all_tokens_are_never_held():
    T, V = 512, 4096
    hidden, table = jnp.zeros((2, T, 8)), jnp.zeros((V, 8))
    labels = jnp.zeros((2, T), jnp.int32)

    def temporaries(chunk):
        f = lambda hidden, table: jnp.sum(losses.head_nll(Head(table), hidden, labels, chunk))
        compiled = jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(hidden, table).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = 4 * 2 * T * V
    assert temporaries(T) >= whole > 3 * temporaries(16)


def test_chunk_below_one_is_refused():
    hidden, labels, table = _example(4)
    with pytest.raises(ValueError, match="chunk = 0.*at least 1"):
        losses.head_nll(Head(table), hidden, labels, 0)


def _pair(T=7, V=11):
    keys = jax.random.split(jax.random.key(3), 4)
    states = [2 * jax.random.normal(key, (2, T, 8)) for key in keys[:2]]
    labels = jax.random.randint(keys[2], (2, T), 0, V).at[:, 0].set(losses.IGNORE)
    return *states, labels, jax.random.normal(keys[3], (V, 8))


def test_distances_are_what_they_say():
    student, teacher, labels, table = _pair()
    q, p = (np.asarray(jax.nn.softmax(Head(table).head(x)), np.float64) for x in (student, teacher))
    heads = Head(table).head(student), Head(table).head(teacher)
    of = lambda kind, **more: losses.distance(*heads, labels, kind, **more)
    got = of("kl")
    kl = np.sum(p * np.log(p / q), -1)
    np.testing.assert_allclose(got.loss, kl, rtol=1e-4)
    np.testing.assert_allclose(got.overlap, 1 - np.abs(p - q).sum(-1) / 2, atol=1e-6)
    np.testing.assert_array_equal(got.agreement, p.argmax(-1) == q.argmax(-1))
    assert 0 < np.mean(got.agreement) < 1
    for kind in losses.DISTANCES:  # the measures are those of the whole distributions, whatever is trained
        np.testing.assert_array_equal(of(kind, top_k=2).kl, got.kl)
    chosen = np.take_along_axis(q, p.argmax(-1)[..., None], -1)[..., 0]
    np.testing.assert_allclose(of("top_k_kl", top_k=1).loss, -np.log(chosen), rtol=1e-4)
    np.testing.assert_allclose(of("top_k_kl", top_k=11).loss, kl, rtol=1e-4)
    given = np.take_along_axis(q, np.maximum(labels, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(of("cross_entropy").loss, np.where(labels == losses.IGNORE, 0, -np.log(given)),
                               rtol=1e-4)
    cooler = losses.distance(Head(table).head(student) / 2, Head(table).head(teacher) / 2, labels)
    np.testing.assert_allclose(of("kl", temperature=2.0).loss, cooler.loss, rtol=1e-5)
    with pytest.raises(ValueError, match="'js'.*kl.*top_k_kl.*cross_entropy"):
        of("js")


def test_a_token_the_teacher_rules_out_costs_nothing():
    got = losses.distance(jnp.asarray([[[0.0, 1.0, -1e4]]]), jnp.asarray([[[0.0, 1.0, -1e9]]]), jnp.zeros((1, 1), int))
    assert np.isfinite(got.loss).all() and got.loss < 1e-6


@pytest.mark.parametrize("kind", losses.DISTANCES)
@pytest.mark.parametrize("chunk", [3, 7])
def test_head_distance_equals_the_plain_one_in_value_and_gradient(kind, chunk):
    student, teacher, labels, table = _pair()
    weight = jnp.arange(14, dtype=jnp.float32).reshape(2, 7)

    def chunked(student):
        found = losses.head_distance(Head(table), student, teacher, labels, chunk, kind, 1.5, 4)
        return jnp.sum(weight * found.loss), found

    def plain(student):
        found = losses.distance(Head(table).head(student), Head(table).head(teacher), labels, kind, 1.5, 4)
        return jnp.sum(weight * found.loss), found

    one, other = (jax.jit(jax.value_and_grad(f, has_aux=True))(student) for f in (chunked, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), one, other)


def test_head_distance_holds_the_logits_of_a_chunk_once_and_teaches_the_student_alone():
    student, teacher, labels, table = _pair(8)
    head = Head(table)
    total = lambda student, teacher: jnp.sum(losses.head_distance(head, student, teacher, labels, 2).loss)
    gradient = jax.grad(total, argnums=(0, 1))(student, teacher)
    assert set(head.largest) == {(2, 2)}
    assert np.any(gradient[0]) and not np.any(gradient[1])
    logits = [eqn for eqn in str(jax.make_jaxpr(jax.grad(total))(student, teacher)).split("\n") if "f32[2,2,11]" in eqn
              and "dot_general" in eqn]
    assert len(logits) == 2  # the student's and the teacher's, forward; none in the backward pass


def test_aligned_outputs_stand_where_their_tokens_do():
    x = jnp.arange(10).reshape(1, 5, 2)
    np.testing.assert_array_equal(losses.aligned(x, 0), x)
    np.testing.assert_array_equal(losses.aligned(x, 1)[0], x[0, jnp.asarray([0, 0, 1, 2, 3])])
