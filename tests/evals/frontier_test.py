"""Lines go through points of one knob, in its order, and the picture is a picture."""

import pytest

from dlm_jax.evals import frontier


def row(family, accuracy, forward, field=None, value=None, **changes):
    return {"name": f"{family} {accuracy}", "family": family, "accuracy": accuracy,
            "accuracy_interval": [accuracy - 0.1, accuracy + 0.1],
            "tokens_per_forward": forward, "tokens_per_second": 20.0,
            "knob": None if field is None else {"field": field, "value": value}, **changes}


SWEPT = [row("masked", 0.5, 3.0, "commit.threshold", 0.5), row("masked", 0.8, 1.0, "commit.threshold", 0.9),
         row("masked", 0.7, 2.0, "commit.threshold", 0.7)]
OTHERS = [row("ar", 0.9, 1.0), row("dual", 0.4, 2.0), row("dual", 0.5, 1.5)]


def test_a_line_joins_points_of_one_knob_in_its_order_and_no_others():
    found = frontier.lines([*OTHERS, *SWEPT])
    assert [each["knob"]["value"] for each in found["masked"]] == [0.5, 0.7, 0.9] and found["dual"] == OTHERS[1:]
    assert [frontier.joined(found[family]) for family in ("ar", "dual", "masked")] == [False, False, True]
    assert not frontier.joined([*SWEPT, row("masked", 0.1, 1.0, "slot_size", 4)]) and not frontier.joined(SWEPT[:1])


def test_the_picture_has_a_line_for_each_knob_and_nothing_half_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
    frontier.draw(tmp_path / "plot.png", [*OTHERS, *SWEPT, row("slow", 0.3, None, accuracy_interval=None)])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 1
    panel = drawn[0].axes[0]
    solid = [line for line in panel.lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 1]
    assert [list(line.get_xdata()) for line in solid] == [[3.0, 2.0, 1.0]]
    assert {text.get_text() for text in panel.texts} == {"0.5", "0.7", "0.9"}
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("tokens / forward", "accuracy, %")
    with pytest.raises(ValueError, match="no rows to draw"):
        frontier.draw(tmp_path / "none.png", [])


def test_the_extra_is_named_where_matplotlib_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(frontier.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'dlm_jax\[eval\]'"):
        frontier.draw(tmp_path / "plot.png", SWEPT)
