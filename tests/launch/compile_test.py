"""The compiler's figures: the readers of its text, floors, and bad input; the compiler itself where it is installed."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import configs
from configs.tiny import MODEL
from dlm_jax import objectives
from dlm_jax.nn import visibility as vis
from launch import compile as launcher
from launch.compile import chips, environment, hlo, kernels, programs, report, schedules, walks, work
from pallas_kernels import block_mask_attention
from tests.conftest import ROOT

COMPILER = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install '.[aot]'")

# as libtpu prints it, cut down: a loop of 3, loops of at most one trip, one whose length is data, a branch, a kernel
TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[]}

FileNames
1 "/env/site-packages/flax/core/axes_scan.py"
2 "/home/me/dlm_jax/models/layers.py"

FunctionNames
1 "scan"
2 "MLP.__call__"

FileLocations
1 {file_name_id=2 function_name_id=2 line=108 end_line=108 column=15 end_column=94}
2 {file_name_id=1 function_name_id=1 line=157 end_line=157 column=29 end_column=53}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%three (p: (s32[])) -> pred[] {
  %c = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}
%once (p: (pred[])) -> pred[] {
  ROOT %go = pred[]{:T(512)} get-tuple-element(%p), index=0
}
%data (p: (s32[], s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%fused (p: f32[8]) -> f32[8] {
  ROOT %add.9 = f32[8]{0} add(%p, %p), metadata={op_name="jit(f)/transpose(jvp(mlp))/add" stack_frame_id=2}
}
%body (p: (s32[])) -> (s32[]) {
  %dot = bf16[8]{0} fusion(%p), calls=%gone, metadata={op_name="jit(f)/mlp/dot_general" stack_frame_id=2}, CYCLES"100"}}
  %gather = bf16[4,1024]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
}
%narrow (p: (pred[])) -> (pred[]) {
  %n = bf16[8]{0} fusion(%p), calls=%fused, CYCLES"7"}}
}
%wide (p: (pred[])) -> (pred[]) {
  %w = bf16[8]{0} fusion(%p), calls=%fused, CYCLES"50"}}
}
%round (p: (s32[], s32[])) -> (s32[], s32[]) {
  %layers = (s32[]) while(%t), condition=%three, body=%body
  %first = (pred[]) while(%t), condition=%once, body=%narrow
  %second = (pred[]) while(%t), condition=%once, body=%wide
  %branch = f32[] conditional(%i, %a, %b), branch_computations={%narrow, %wide}
  %my_kernel.2 = (bf16[1,16]{1,0:T(8,128)S(1)}, f32[]{:T(128)}) custom-call(%a), custom_call_target="tpu_custom_call"
}
ENTRY %main (a: f32[8]) -> f32[] {
  %all = (s32[], s32[]) while(%t), condition=%data, body=%round
  %sum = f32[1024]{0} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%fused
  %start = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%x)
}
""".replace("CYCLES", 'backend_config={"window_config":{"estimated_cycles":')


def test_cycles_are_added_over_loops_and_the_dearest_branches():
    program = hlo.Program(TEXT, kernels={"my_kernel.2": 1000.0})
    assert program.cost().cycles == 3 * 100 + 50 + 50 + 1000
    assert hlo.Program(TEXT, taken=min).cost().cycles == 3 * 100 + 7 + 7
    assert program.cost().loops == ["all"]
    assert program.body_of_unknown_length() == "round"
    assert program.cost().kernels == {"my_kernel.2": 1}
    assert program.cost().lines["dlm_jax/models/layers.py:108 dot_general"] == 300
    assert program.cost().lines["dlm_jax/models/layers.py:108 add (backward)"] == 100  # by what the fusion ends with
    assert program.cost().silent["copy-start"] == 68


def test_a_kernel_without_a_schedule_is_counted_and_costs_nothing():
    cost = hlo.Program(TEXT).cost()
    assert cost.cycles == 400 and cost.kernels == {"my_kernel.2": 1}
    assert kernels.of_text(TEXT) == {"my_kernel.2": kernels.key("my_kernel", [(1, 16), ()])}


def test_collectives_are_counted_by_the_bytes_that_leave_a_chip():
    found = hlo.Program(TEXT, chips=4).cost().collectives
    assert vars(found["all-gather"]) == {"sites": 1, "runs": 3, "bytes": 3 * 4 * 1024 * 2 * 3 / 4}
    assert vars(found["all-reduce"]) == {"sites": 1, "runs": 1, "bytes": 2 * 1024 * 4 / 2}


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no scheduled HLO as libtpu 0.0.42"):
        hlo.Program("HloModule jit_f\nENTRY %main () -> f32[] {\n}\n")
    with pytest.raises(ValueError, match="no schedule as libtpu 0.0.42"):
        schedules.parse("nothing here")


def test_a_schedule_counts_bundles_times_the_trips_of_the_loops_around_them():
    text = """= control target key end

     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sphi 0 } /* Start region 5 */
   0x2   : > { %s3 = smov 0 }
   0x3 LB: >> { %s4 = sphi 0 } /* Start region 7 :: Start region 8 */
   0x4   : >> { %p6_p1 = scmp.ge.s32.totalorder %s4, 4 /* loop exit test */ }
   0x5   :  { %9 = sbr.rel (!%p6_p1) target = $region7 }
   0x6 PF: > { %p7_p2 = scmp.ge.s32.totalorder %s2, 10 }
   0x7   : > { %9 = sbr.rel (!%p7_p2) target = $region5 }
   0x8   :  { %s9 = smov 0 }
"""
    assert schedules.parse(text) == schedules.Schedule(bundles=9, cycles=2 + 4 * 10 + 3 * 40, open_loops=0)
    dynamic = schedules.parse(text.replace("%s2, 10", "%s2, %s3"))
    assert (dynamic.cycles, dynamic.open_loops) == (2 + 4 + 3 * 4, 1)


def test_a_schedule_tells_apart_what_may_be_skipped():
    text = """
   0x1 LB: > { %s2 = sphi 0 } /* Start region 5 */
   0x2   : > { %9 = sbr.rel (%p1) target = $region9 }
   0x3   : > { %9 = sbr.rel (%p2) target = $region7 } /* Start region 6 */
   0x4   : > { %s4 = smov 0 }
   0x5 PF: > { %s4 = smov 0 } /* Start/End empty region 7 :: Start region 8 */
   0x6   : > { %9 = sbr.rel (%p3) target = $region8 }
   0x7   : > { %s4 = smov 0 }
   0x8 PF: > { %s4 = smov 0 } /* Start region 8 */
   0x9 PF: > { %9 = sbr.rel (!%p4) target = $region5 } /* Start region 9 */
"""
    found = schedules.parse(text)
    assert (found.body, found.branches, found.open_loops) == (9, (2, 2), 1)


def test_a_walk_takes_the_tiles_that_its_rule_shows():
    """Causal, 1,024 tokens: two tiles on the diagonal and one whole; two heads on each of two cores, three rows."""
    q, k = (jax.ShapeDtypeStruct((3, 1024, heads, 128), jnp.bfloat16) for heads in (4, 2))
    rule = vis.causal(jnp.ones((1, 1024), bool))
    run = lambda q, k: jax.grad(lambda q, k: jnp.sum(block_mask_attention(
        q, k, k, rule, backend="tpu").astype(jnp.float32)), (0, 1))(q, k)
    found = {key.partition(" ")[0]: eqn for key, eqn in kernels.of_jaxpr(jax.make_jaxpr(run)(q, k)).items()}
    schedule = schedules.Schedule(200, 200, 1, body=100, branches=(5, 20, 40, 30, 3))
    fast = dataclasses.replace(chips.CHIPS["v6e"], bandwidth=1e30)
    row = 3 * (100 - 98) + 1 * 20 + 2 * 30 + 2 * 8
    for name, programs in (("forward", 4), ("dq", 4), ("dkv", 2 * 2)):
        name = f"{walks.NAME}_{name}"
        for chip in (fast, dataclasses.replace(fast, cores=2)):
            assert walks.cycles(schedule, name, found[name], [rule], chip) == 3 * programs // chip.cores * row
        every = walks.cycles(schedule, name, found[name], [vis.causal(jnp.ones((1, 512), bool))], fast)
        assert every == 3 * programs * (4 * (100 - 98 + 30) + 2 * 8)
        slow = dataclasses.replace(fast, bandwidth=2 * 512 * 128 * 2.0, clock=1000.0)  # a step's tiles take a second
        assert walks.cycles(schedule, name, found[name], [rule], slow) == 3 * programs * (3 * 1000 + 2 * 8)


def test_products_are_counted_over_scans_and_the_dearest_of_loops_that_exclude_each_other():
    def f(x, w):
        x = jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]
        x = jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)
        for products in (lambda x: x @ w, lambda x: x @ w @ w):
            once = lambda carry, products=products: (jnp.zeros((), bool), products(carry[1]))
            x = jax.lax.while_loop(lambda carry: carry[0], once, (x[0, 0] > 1, x))[1]
        return x

    one = 2 * 2 * 4 * 4
    jaxpr = jax.make_jaxpr(f)(jnp.ones((2, 4)), jnp.ones((4, 4)))
    assert work.products(jaxpr) == one * (3 + 1 + 2)


def test_training_needs_six_flops_a_parameter_and_token_and_what_is_visible():
    batch = programs.sample(2, 64, False, 1)
    got = work.training(MODEL, objectives.Autoregressive(), batch)
    layers = programs.build.abstract_params(programs.build.build(MODEL))["layers"]
    weights = sum(x.size for name in ("attention", "mlp") for key, x in layers[name].items() if key.endswith("proj"))
    head = MODEL.vocab_size * MODEL.hidden_size
    pairs = 2 * 64 * 65 / 2
    attention = 4 * MODEL.num_layers * MODEL.num_heads * MODEL.head_dim * pairs
    assert got == 6 * (weights + head) * 2 * 64 + 3 * attention


def test_packed_rows_see_less_and_three_streams_need_more():
    objective = objectives.Flare(block_size=4, mask_id=3)
    one, packed = (work.training(MODEL, objective, programs.sample(1, 64, pack, 4)) for pack in (False, True))
    plain = work.training(MODEL, objectives.Autoregressive(), programs.sample(1, 64, False, 1))
    assert packed < one and 1.5 * plain < one < 3.2 * plain


def run(*typed):
    with mock.patch.object(environment, "prepare"):  # this process is no compile-only one
        return launcher.main(typed)


@pytest.mark.parametrize("typed, said", [
    (("--config", "tiny:refusion", "--topology", "v6e:3x3"), "no such slice; accepted: v5e:1x1, 2x2"),
    (("--config", "tiny:refusion", "--topology", "v9:2x2"), "no such slice; accepted"),
    (("--config", "tiny:nothing", "--topology", "v6e:2x2"), "accepted: block_diffusion"),
    (("--decode", "nothing", "--model", "qwen3_8b", "--topology", "v6e:2x2"), "decoder 'nothing' is not known"),
    (("--decode", "orthrus", "--model", "llada_8b", "--topology", "v6e:2x2"), "--model llada_8b is not known"),
    (("--decode", "guided", "--model", "qwen3_8b", "--topology", "v6e:2x2"), "a second model judges"),
    (("--decode", "refusion", "--model", "refusion:qwen3_8b", "--topology", "v6e:2x2", "--cache", "100"),
     "more than --answer 512"),
    (("--config", "tiny:refusion", "--topology", "v6e:2x2", "--batch", "0"), "--batch 0: at least 1"),
    (("--config", "refusion:qwen3_8b", "--topology", "v6e:2x2", "--mesh", "fsdp=3"),
     "needs 3 devices but there are 4.*fsdp=4,tensor=1, or fsdp=2,tensor=2"),
])
def test_bad_input_is_named(typed, said, capsys):
    here = lambda topology, slices: (chips.CHIPS["v6e"], jax.devices()[:4])
    with contextlib.nullcontext() if "v6e:2x2" not in typed else mock.patch.object(chips, "devices", here):
        assert run(*typed) == 2
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


def test_what_cannot_fit_is_refused_before_it_is_compiled():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = jax.ShapeDtypeStruct((10 * 2**30,), jnp.bfloat16, sharding=one)
    job = programs.Job("a program", None, (shape,), None, 0.0, 0.0, False, {})
    with pytest.raises(ValueError, match=r"take 20.00 GiB of a chip's 15.75 usable ones, 4.25 too many; .* 2 chips"):
        report.check_arguments(job, chips.CHIPS["v5e"], 1)


def test_without_the_compiler_it_says_what_to_install():
    with mock.patch.object(importlib.util, "find_spec", lambda name: None), pytest.raises(ValueError, match=r"\[aot\]"):
        environment.prepare()


def test_every_experiment_has_a_shape_or_names_one():
    known = programs.models()
    assert programs.shape_of("refusion:qwen3_8b").hidden_size == 4096
    assert programs.shape_of("qwen3_8b", dual=True).dual
    with pytest.raises(ValueError, match="stands in several files"):
        programs.shape_of("tiny")
    assert {name for name in configs.names() if "qwen3" in name and "1_7b_" not in name} <= known.keys()


def compiled(tmp_path, *typed):
    """Runs the launcher in a process of its own, which the compiler configures; returns report and page."""
    file = tmp_path / "report.json"
    done = subprocess.run([sys.executable, "-m", "launch.compile", *typed, "--output", str(file)], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(file.read_text()), done.stdout


@pytest.mark.slow
@COMPILER
def test_a_decoder_is_reported_whole(tmp_path):
    got, page = compiled(tmp_path, "--decode", "refusion", "--model", "qwen3_8b", "--batch", "2", "--layers", "2",
                         "--cache", "1024", "--topology", "v6e:1x1", "--dump", str(tmp_path / "dump"))
    assert got["fits"] and got["chips"] == 1 and not got["collectives"]
    read = 2 * (got["parameters"] - 151936 * 4096) + got["cache_bytes"]  # a table is looked up, not read
    assert got["floors"]["memory"]["amount"] == pytest.approx(read)
    assert 1 < got["floors"]["memory"]["ratio"] < 4
    assert got["memory"]["aliased"] >= got["cache_bytes"]  # updated in place
    assert sum(entry["cycles"] for entry in got["dearest"]) <= got["step_cycles"]
    assert got["blind"] in page and "dlm_jax/" in page
    assert (tmp_path / "dump" / "program.hlo").exists() and [*(tmp_path / "dump").glob("*final_bundles.txt")]


@pytest.mark.slow
@COMPILER
def test_a_training_step_is_reported_with_its_kernels(tmp_path):
    got, page = compiled(tmp_path, "--config", "flare:qwen3_5_2b", "--layers", "4", "--length", "1024", "--batch", "4",
                         "--topology", "v5p:2x2x1", "--mesh", "fsdp=4")
    assert got["fits"] and got["chips"] == 4 and got["collectives"]["all-gather"]["runs"]
    assert {"two_stream_gated_delta_forward", "two_stream_gated_delta_backward"} <= {
        name.partition(".")[0] for name in got["kernels"]}
    assert all(kernel["cycles"] > kernel["bundles"] for kernel in got["kernels"].values())
    assert "(backward)" in page
