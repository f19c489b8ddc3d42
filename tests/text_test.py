"""Settings from text: plain values, nested fields, and parts written as calls."""

import dataclasses
from typing import Any, Literal, Protocol

import flax.struct
import pytest

from dlm_jax import text


class Rule(Protocol):
    """What a rule can."""

    def choose(self, drafts: Any) -> Any: ...


class Schedule(Protocol):
    length: int

    def opened(self, clock: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Ahead:
    add: float = 0.1
    sure: float = 0.95


@dataclasses.dataclass(frozen=True)
class Blocks:
    length: int
    ahead: Ahead | None = None

    def opened(self, clock):
        return clock


@flax.struct.dataclass
class Threshold:
    threshold: float = 0.9

    def __post_init__(self):
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold = {self.threshold}: expected a probability in (0, 1]")

    def choose(self, drafts):
        return drafts


@flax.struct.dataclass
class Quota:
    steps: int = 0

    def choose(self, drafts):
        return drafts


@dataclasses.dataclass(frozen=True)
class Noisy:
    rule: Rule
    temperature: float = 1.0

    def choose(self, drafts):
        return drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    schedule: Schedule = Blocks(32)
    commit: Rule = Threshold()
    guidance: Ahead | None = None
    certainty: Literal["first", "mean"] = "first"
    note: str | None = None
    sizes: tuple[int, ...] = (4, 8)
    exact: bool = False
    scale: float = 0.0


PARTS = {kind.__name__: kind for kind in (Ahead, Blocks, Threshold, Quota, Noisy)}


def made(*settings):
    return text.override(Decoder(), settings, PARTS)


@pytest.mark.parametrize("settings, want", [
    (["schedule=Blocks(16)"], dict(schedule=Blocks(16))),
    (["commit=Threshold(1)"], dict(commit=Threshold(1.0))),
    (["commit=Threshold"], dict(commit=Threshold(0.9))),
    (["commit=Quota(steps=64)", "schedule= Blocks( 8, ahead = Ahead(0.2, sure=-1) )"],
     dict(commit=Quota(64), schedule=Blocks(8, Ahead(0.2, -1.0)))),
    (["commit=Noisy(Noisy(Quota(3), 0.5))"], dict(commit=Noisy(Noisy(Quota(3), 0.5)))),
    (["commit.threshold=0.8"], dict(commit=Threshold(0.8))),
    (["commit=Quota(3)", "commit.steps=4"], dict(commit=Quota(4))),
    (["commit.threshold=0.8", "commit=Quota(3)"], dict(commit=Quota(3))),
    (["schedule.ahead=Ahead(0.3)", "schedule.ahead.sure=0.5", "schedule.length=4"],
     dict(schedule=Blocks(4, Ahead(0.3, 0.5)))),
    (["guidance=Ahead()", "guidance=none"], {}),
    (["certainty=mean", "note=a=b, c(d)", "sizes=(1, 2)", "exact=True", "scale=2"],
     dict(certainty="mean", note="a=b, c(d)", sizes=(1, 2), exact=True, scale=2.0)),
    (["note=None", "sizes=", "scale=inf"], dict(sizes=(), scale=float("inf"))),
])
def test_settings_are_what_they_say(settings, want):
    found = made(*settings)
    assert found == Decoder(**want)
    assert type(found.scale) is float and type(getattr(found.commit, "threshold", 0.0)) is float


@pytest.mark.parametrize("decoder", [
    Decoder(), Decoder(schedule=Blocks(8, Ahead(1e-3, 1.0)), commit=Noisy(Quota(2), 0.0), guidance=Ahead(),
                       certainty="mean", sizes=(3,), exact=True)])
def test_every_field_is_read_back_from_its_text(decoder):
    settings = [f"{f.name}={text.show(getattr(decoder, f.name))}" for f in dataclasses.fields(decoder)]
    assert made(*settings) == decoder


def test_what_differs_from_the_defaults_is_enough_to_make_a_value_again():
    decoder = Decoder(schedule=Blocks(8, Ahead(sure=0.5)), note="a, b", scale=0.5)
    said = text.brief(decoder)
    assert said == "Decoder(schedule=Blocks(length=8, ahead=Ahead(sure=0.5)), note='a, b', scale=0.5)"
    assert text.parse(said, Decoder, {**PARTS, "Decoder": Decoder}) == decoder


def test_names_of_fields_follow_the_parts():
    assert text.fields(Decoder(guidance=Ahead()), PARTS) == [
        "schedule", "schedule.length", "schedule.ahead", "commit", "commit.threshold", "guidance", "guidance.add",
        "guidance.sure", "certainty", "note", "sizes", "exact", "scale"]
    assert "commit" not in text.fields(Decoder()) and "commit.threshold" in text.fields(Decoder())


@pytest.mark.parametrize("setting, message", [
    ("commit", r"--set commit: expected FIELD=VALUE with one of schedule, schedule.length, "),
    ("=3", "expected FIELD=VALUE"),
    ("comit=Quota(3)", r"--set comit: no such field \(did you mean 'commit'\?\); accepted: schedule, "),
    ("threshold=3", r"did you mean 'commit.threshold'"),
    ("commit.steps=3", "no such field"),
    ("commit=Treshold(0.9)", r"--set commit=Treshold\(0.9\): no part 'Treshold' \(did you mean 'Threshold'\?\); "
                             r"accepted: Threshold\(threshold\), Quota\(steps\), Noisy\(rule, temperature\)$"),
    ("commit=Blocks(3)", r"no part 'Blocks'; accepted: Threshold"),
    ("commit=3", r"expected Threshold\(threshold\) or .* or Noisy\(rule, temperature\), as in commit=Threshold\("),
    ("commit=none", "no part 'none'"), ("commit=", r"expected Threshold\("),
    ("commit=Threshold(high)", r"Threshold: threshold=high: expected a number, as in threshold=0.9$"),
    ("commit=Quota(2.5)", "Quota: steps=2.5: expected an integer, as in steps=0"),
    ("commit=Threshold(2)", r"--set commit=Threshold\(2\): threshold = 2.0: expected a probability"),
    ("commit=Threshold(0.9, 1)", "Threshold: no field '1'; accepted: threshold"),
    ("commit=Threshold(treshold=1)", "no field 'treshold' .did you mean 'threshold'"),
    ("commit=Threshold(0.9, threshold=1)", "'threshold' is given twice"),
    ("commit=Threshold(*[0.9])", "expected a number"), ("commit=Threshold(**{})", r"no field '\*\*'"),
    ("commit=Noisy(temperature=1)", "Noisy needs rule; accepted: rule, temperature"),
    ("commit=Noisy(Quota('x'))", "Noisy: rule=Quota\\('x'\\): Quota: steps=x: expected an integer"),
    ("commit=__import__('os').system('true')", r"expected Threshold\("),
    ("commit=(lambda: 1)()", r"expected Threshold\("),
    ("commit=Threshold(0.9", r"expected Threshold\(.*is a bracket missing"),
    ("guidance=Quota(3)", r"no part 'Quota'; accepted: Ahead\(add, sure\)$"),
    ("guidance=3", r"expected Ahead\(add, sure\) or none, as in guidance=none"),
    ("certainty=middle", "--set certainty=middle: expected first or mean, as in certainty=first"),
    ("exact=1", "expected true or false, as in exact=false"),
    ("sizes=4;8", "expected integers such as 4,8,16, as in sizes=4,8"),
])
def test_what_is_no_value_is_refused_with_what_is_accepted(setting, message):
    with pytest.raises(ValueError, match=message):
        made(setting)


def test_fields_that_check_each_other_change_together():
    @dataclasses.dataclass(frozen=True)
    class Range:
        low: int = 0
        high: int = 1

        def __post_init__(self):
            if self.low >= self.high:
                raise ValueError(f"low = {self.low}: expected less than high = {self.high}")

    assert text.override(Range(), ["low=5", "high=6"]) == Range(5, 6)
    with pytest.raises(ValueError, match="--set low=5: low = 5"):
        text.override(Range(), ["low=5"])


def test_a_grid_is_the_product_of_its_axes_and_brackets_keep_their_commas():
    assert text.grid(["a.b=1, 2", "c=Blocks(4, ahead=Ahead(0.1, 0.2)),None"]) == [
        ("a.b=1", "c=Blocks(4, ahead=Ahead(0.1, 0.2))"), ("a.b=1", "c=None"),
        ("a.b=2", "c=Blocks(4, ahead=Ahead(0.1, 0.2))"), ("a.b=2", "c=None")]


@pytest.mark.parametrize("axes, message", [
    (["a"], "--grid a: expected FIELD=VALUE,VALUE"), (["=1"], "expected FIELD"), (["a="], "expected FIELD"),
    (["a=1,"], "expected FIELD"), (["a=1,1"], "a value is given twice"), (["a=1", "a=2"], "a is given twice")])
def test_a_grid_that_is_none_is_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        text.grid(axes)
