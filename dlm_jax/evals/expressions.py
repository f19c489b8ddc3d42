"""When two mathematical expressions are the same answer, as MATH counts it: up to how LaTeX may write them.

Source: the benchmark's own rule (Hendrycks et al. 2021, `is_equiv`): strings after normalization; numbers are compared
as such beside it, and what is listed part by part.
"""

from __future__ import annotations

import re

from dlm_jax.evals import extractors

_SPACING = re.compile(r"\\[!,;: ]|\\q?quad\b|\\(?:left|right|[bB]ig+)(?![a-zA-Z])|~|\\displaystyle\b")
_WORDS = r"\\(?:text|mbox|mathrm|textbf|mathbf|textit|operatorname)\s*\{([^{}]*)\}"
_BARE_FRACTION = re.compile(r"\\frac\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\w)")
_SLASH = re.compile(r"(?<![\w}.])(-?)(\d+)/(\d+)(?![\w{.])")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)")


def normal(text: str) -> str:
    """Returns an expression in one of the ways to write it.

    Args:
      text: LaTeX, with or without $ around it.
    """
    text = text.strip().rstrip(".").strip()
    text = re.sub(r"^\$+|\$+$|^\\[(\[]|\\[)\]]$", "", text).strip()
    inner = re.fullmatch(r"\\(?:boxed|fbox)\s*\{(.*)\}", text, re.DOTALL)
    text = re.sub(r",\s*\\!\s*", ",", inner[1] if inner else text)
    text = _SPACING.sub("", text).replace("\n", " ")
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\^\s*\{?\\(?:circ|degree)\}?|\\(?:degree|%|\$)|[%$°]", "", text)
    # a unit behind a value says nothing new; words alone are the value
    text = re.sub(rf"(?<=[\w}})])\s*{_WORDS}(?:\^\{{?\d\}}?)?\s*$", "", text)
    text = re.sub(_WORDS, r"\1", text)
    text = re.sub(r"(?<=\d)\s+[A-Za-z]{2,}(?: [a-z]+)*$", "", text)
    text = _THOUSANDS.sub(lambda found: re.sub(r"[,{}]", "", found[0]), text)
    text = _BARE_FRACTION.sub(lambda found: "\\frac" + "".join(
        part if part.startswith("{") else f"{{{part}}}" for part in found.groups()), text)
    text = _SLASH.sub(r"\1\\frac{\2}{\3}", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    for old, new in (("\\leq", "\\le"), ("\\geq", "\\ge"), ("\\neq", "\\ne"), ("\\{", "{"), ("\\}", "}"), ("−", "-")):
        text = text.replace(old, new)
    text = re.sub(r"(?<![\d])\.(?=\d)", "0.", text)
    text = re.sub(r"^(?:[a-zA-Z]|[a-zA-Z]\([a-z]\))\s*(?:=|\\in\b)(?=[^=]*$)", "", text.strip())
    text = re.sub(r"\s+", "", text).casefold()
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text


def same(left: str | None, right: str | None) -> bool:
    """Whether two expressions are the same answer.

    Args:
      left, right: LaTeX; None is nobody's answer.
    """
    if left is None or right is None:
        return False
    left, right = normal(left), normal(right)
    return left == right != "" or _same_list(left, right)


def _same_list(left: str, right: str) -> bool:
    """Whether two normal expressions are lists (of one) whose parts are the same, in the same brackets."""
    bracket = lambda text: (text[0], text[-1]) if text[:1] in ("(", "[") and text[-1:] in (")", "]") else ("", "")
    if bracket(left) != bracket(right):
        return False
    cut = slice(1, -1) if bracket(left)[0] else slice(None)
    ours, theirs = left[cut].split(","), right[cut].split(",")
    return len(ours) == len(theirs) and all(
        a == b != "" or (_value(a) is not None and _value(a) == _value(b)) for a, b in zip(ours, theirs))


def _value(text: str):
    return extractors.number(text)
