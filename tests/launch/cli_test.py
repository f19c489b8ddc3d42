"""How launchers start, what they say, and how they end."""

import argparse
import subprocess
import sys

import pytest
from absl import flags, logging

from launch import cli
from tests.conftest import ROOT

QUICK = ("decode", "evaluate", "train", "convert_weights")
PROGRAMS = (*QUICK, "quickstart", "benchmark")


def fail(problem):
    raise problem


def test_bad_input_is_told_and_ends_with_2(capsys):
    assert cli.exit_code(lambda: fail(ValueError("--seed -1: must be 0 or more"))) == 2
    assert tuple(capsys.readouterr()) == ("", "error: --seed -1: must be 0 or more\n")


def test_a_loss_that_is_none_ends_with_1(capsys):
    assert cli.exit_code(lambda: fail(FloatingPointError("loss = nan at step 3"))) == 1
    assert tuple(capsys.readouterr()) == ("", "error: loss = nan at step 3\n")


@pytest.mark.parametrize("returned, code", [(None, 0), (0, 0), (75, 75)])
def test_work_that_ends_well_decides(returned, code, capsys):
    assert cli.exit_code(lambda: returned) == code
    assert capsys.readouterr().err == ""


def test_a_defect_is_not_bad_input():
    with pytest.raises(KeyError):
        cli.exit_code(lambda: fail(KeyError("x")))


def test_counts_are_refused_by_the_options_name():
    options = argparse.Namespace(batch_size=0, limit=None, timed=1)
    cli.check_counts(options, "limit", "timed")
    with pytest.raises(ValueError, match="--batch-size 0: at least 1"):
        cli.check_counts(options, "limit", "batch_size")


def _parser():
    p = cli.parser("python -m launch.x", "Does x.\n\n    python -m launch.x --n 3")
    p.add_argument("--n", type=int, default=2, help="how many (default: %(default)s)")
    return p


def test_progress_is_ours_and_of_libraries_only_warnings(caplog):
    def work(options):
        cli.log.info("ours %d", options.n)
        logging.info("theirs")
        logging.warning("their warning")

    assert cli.main(_parser().parse_args, work, ["--n", "3"]) == 0
    assert [record.getMessage() for record in caplog.records] == ["ours 3", "their warning"]


def test_help_is_argparses_and_absls_flags_are_taken(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(_parser().parse_args, fail, ["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "\n    python -m launch.x --n 3\n" in said and "how many (default: 2)" in said
    assert "--verbosity" not in said
    before = flags.FLAGS.verbosity
    try:
        assert isinstance(_parser().parse_args(["--verbosity=1"]), argparse.Namespace)
        assert flags.FLAGS.verbosity == 1
    finally:
        flags.FLAGS.verbosity = before


def _run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_a_process_ends_with_the_code_of_its_work_under_absl():
    code = ("from absl import app; from launch import cli; p = cli.parser('x', 'x'); p.add_argument('--n', type=int)\n"
            "def work(o):\n  cli.log.info('so %d', o.n)\n  app.call_after_init(lambda: print('initialised'))\n"
            "  if o.n < 0: raise ValueError('--n: negative')\n  return o.n\n"
            "cli.main(p.parse_args, work, None)")
    done = _run("-c", code, "--n", "75")
    assert (done.returncode, done.stdout) == (75, "initialised\n") and done.stderr.endswith("] so 75\n")
    done = _run("-c", code, "--n=-3", "--verbosity=-1")
    assert (done.returncode, done.stderr) == (2, "error: --n: negative\n")
    assert _run("-c", code, "--m", "3").returncode == 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_teaches_by_example_before_jax_is_loaded(program):
    if program in QUICK:
        assert _run("-c", f"import sys, launch.{program}; print('jax' in sys.modules)").stdout == "False\n"
    done = _run("-m", f"launch.{program}", "--help")
    assert done.returncode == 0 and done.stdout.count(f"python -m launch.{program} ") >= 3 and "absl" not in done.stdout


@pytest.mark.parametrize("arguments", [("decode", "--set", "top_k=many", "--prompt", "x"), ("train", "--config", "x")])
def test_a_process_ends_with_2_for_bad_input(arguments):
    done = _run("-m", f"launch.{arguments[0]}", *arguments[1:])
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ")
