"""How launchers end."""

import pytest

from launch import cli


def fail(problem):
    raise problem


def test_bad_input_is_told_and_ends_with_2(capsys):
    assert cli.exit_code(lambda: fail(ValueError("--seed -1: must be 0 or more"))) == 2
    assert tuple(capsys.readouterr()) == ("", "error: --seed -1: must be 0 or more\n")


@pytest.mark.parametrize("returned, code", [(None, 0), (0, 0), (75, 75)])
def test_work_that_ends_well_decides(returned, code, capsys):
    assert cli.exit_code(lambda: returned) == code
    assert capsys.readouterr().err == ""


def test_a_defect_is_not_bad_input():
    with pytest.raises(KeyError):
        cli.exit_code(lambda: fail(KeyError("x")))
