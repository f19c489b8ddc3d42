"""The benchmark launcher: its default shape builds, a tiny run gives every column, bad input exits with 2."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.models import build
from launch import benchmark
from launch.benchmark import decode, kernel_peers
from pallas_kernels import Stream, two_stream_gated_delta


@pytest.mark.parametrize("width", [64, 320, 512, 576])
def test_every_width_builds(width, monkeypatch):
    monkeypatch.setattr(build, "init_params", lambda model, key: build.abstract_params(model))
    monkeypatch.setattr(jax, "jit", lambda f, **_: f)
    model, params = decode.model_of(decode.parser().parse_args(["--width", str(width)]))
    size = sum(x.size for x in jax.tree.leaves(params))
    assert width != 512 or 55e6 < size < 65e6


def test_a_tiny_run_measures_every_system(tmp_path, capsys):
    file = tmp_path / "results.json"
    assert benchmark.main(["decode", "--width", "64", "--layers", "1", "--vocab", "64", "--batch", "2", "--prompt", "8",
                           "--new-tokens", "16", "--repeats", "1", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m launch.benchmark decode --width 64")
    assert result["environment"]["jax"] == jax.__version__ and result["environment"]["date"] >= "2026"
    rows = result["rows"]
    assert [row["system"] for row in rows] == ["AR", "ReFusion all accepted", "ReFusion none accepted"]
    assert all(row["tokens_per_second"] > 0 and row["ms_per_forward"] > 0 for row in rows)
    assert all(row["bare_ms"] > 0 and row["floor_ms"] > 0 for row in rows[:2])
    assert "ReFusion all accepted" in capsys.readouterr().out


def test_bad_input_exits_with_2(capsys):
    assert benchmark.main(["decode", "--width", "100"]) == 2
    assert "--width 100: a positive multiple of 64" in capsys.readouterr().err


def test_kernels_are_measured_under_the_launchers_name(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    assert benchmark.main(["kernels", "--shape", "tiny", "--blocks", "--attention", "--forms", "folded",
                           "--rounds", "1", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m launch.benchmark kernels --shape tiny")
    assert [row["form"] for row in result["rows"]] == ["single folded"]
    assert result["environment"]["jax"] == jax.__version__
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["kernels", "--blocks", "5"])
    assert stop.value.code == 2 and "block_size=5" in capsys.readouterr().err


def test_flash_linear_attention_gets_our_arrays(monkeypatch):
    """A stand-in with its signature, run token by token, gives our outputs and gradients: layout, scale, gates."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: no peer to compare with")

    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        state, outs = torch.zeros(*v.shape[:1], *v.shape[2:3], q.shape[-1], v.shape[-1]), []
        for t in range(v.shape[1]):
            state = state * g[:, t, :, None, None].exp()
            error = (v[:, t].float() - torch.einsum("bhe,bhef->bhf", k[:, t].float(), state)) * beta[:, t, :, None]
            state = state + torch.einsum("bhe,bhf->bhef", k[:, t].float(), error)
            outs.append(scale * torch.einsum("bhe,bhef->bhf", q[:, t].float(), state))
        return torch.stack(outs, 1).to(v.dtype), None
    module = types.SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        kernel_peers.flash_linear_attention(None)
    waited, tensor = [], torch.tensor
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    monkeypatch.setattr(torch, "tensor", lambda a, device: tensor(a))

    draw = np.random.default_rng(0)
    unit = lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)
    make = lambda a, dtype: jnp.asarray(a, dtype)
    q, k = (make(unit(draw.normal(size=(1, 9, 2, 8))), jnp.bfloat16) for _ in range(2))
    clean = Stream(q, k, make(draw.normal(size=(1, 9, 2, 4)), jnp.bfloat16),
                   make(-draw.random((1, 9, 2)), jnp.float32), make(draw.random((1, 9, 2)), jnp.float32))
    run, wait = kernel_peers.flash_linear_attention(clean)
    out, grads = run()
    wait(out)
    want, pullback = jax.vjp(lambda c: two_stream_gated_delta(c, form="sequential").out, clean)
    assert waited and out.dtype == torch.bfloat16
    for got, expected in zip((out, *grads), (want, *pullback(jnp.ones_like(want))[0]), strict=True):
        np.testing.assert_allclose(got.detach().float().numpy(), np.asarray(expected, np.float32), atol=0.05)
