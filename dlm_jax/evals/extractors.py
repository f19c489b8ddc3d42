r"""Where an answer's final result stands, by name: every form that the models' papers and benchmarks ask for.

| name | the result | asked for by |
|---|---|---|
| `hash` | what follows the last `####`, in its line | GSM8K (Cobbe et al. 2021), and models trained on it |
| `boxed` | the last `\boxed{...}` | MATH (Hendrycks et al. 2021); Qwen's and ReFusion's mathematics prompts |
| `final_answer` | what follows the last "final answer is" or ":" | FlashDLM's prompts (ARC, GPQA, GSM8K, PIQA) |
| `answer_is` | the same for "answer is" and "answer:" | chain of thought (Wei et al. 2022), MMLU-Pro |
| `letter` | the letter A to J that the answer begins with | MMLU-style prompts that end in "Answer:" |
| `last_number` | the last number | lm-evaluation-harness's `flexible-extract` |
| `last_choice` | the last letter A to J, or `Answer3`, `Ending2`, ..., that stands alone | MMLU-Pro's last resort |
| `code` | the program: the fenced block that defines something, else the first, else all | HumanEval, MBPP |
| `expression` | the last box, else what follows "(final) answer is", as it stands | MATH by its own rule |

Of a phrase's sentence counts the number or choice that it begins with (behind the last "=", where there is one), else
all of it. `letter`, `last_number` and `last_choice` are guesses: each is asked only where the reference is a number or
a choice. `code` and `expression` are asked for by name only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from dlm_jax.data.sources import final_answer

_LETTER, _LABEL = "[A-J]", r"(?:[Aa]nswer|[Ee]nding|[Oo]ption|[Cc]hoice|[Ss]olution) ?\d+"
_NUMBER = r"(?:(?<![\w)])[-−])?\$?-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_AMOUNT = re.compile(rf"{_NUMBER}(?:/\d+)?(?![\w^])(?!\s*[-−+*/^(\\])")
_ANY_NUMBER = re.compile(_NUMBER)
_CLOSED = r"(?=[ \t*_]*(?:[.:,;)\]\n]|$))"  # what follows a letter that is no word
_CHOICE = re.compile(rf"[(\[]({_LETTER}|{_LABEL})[)\]]|({_LABEL})|({_LETTER}){_CLOSED}")
_ANY_CHOICE = re.compile(rf"\b(?:{_LABEL}|[B-HJ]\b|[AI]{_CLOSED})")
_BRACKETED = re.compile(r"^\[([^\[\],]+)\]")
_PLAIN = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,2})?(/0*[1-9]\d*)?", re.IGNORECASE)
_SENTENCE = re.compile(r"\n|[.!?](?:\s|$)")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\{|\}")
_LONGEST = 400  # characters of a number
_MARK = re.compile(r"^[ \t]*(?:```|~~~)[ \t]*(\w*)[^\n`]*$", re.MULTILINE)
_PROGRAM = re.compile(r"\n*(?:[ \t]+\S|@\w|#|def \w+\(|class \w+[:(]|import \w|from [\w.]+ import )")
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n`]*\n(.*?)(?:^[ \t]*(?:```|~~~)|\Z)", re.DOTALL | re.MULTILINE)
_BEGIN = re.compile(r"\[BEGIN\]|<code>", re.IGNORECASE)
_DONE = re.compile(r"\[DONE\]|</code>", re.IGNORECASE)
_MARKS = "*_`\"'“” "


def plain(text: str) -> str:
    r"""Returns a result without LaTeX's dress: `\text{}`, `\$`, `{,}`, `\frac`, `$...$`, and Markdown's asterisks.

    Args:
      text: a final result.
    """
    text = re.sub(r"\\(?:text|mathrm|mathbf|boxed)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}", r"\1/\2", text)
    text = re.sub(r"\\([$%#&])", r"\1", text.replace("{,}", ","))
    text = re.sub(r"\\[(\[)\]!,;]|\\left|\\right", "", text).strip(_MARKS)
    return text[1:-1].strip() if len(text) > 2 and text[0] == text[-1] == "$" else text


def number(text: str) -> Fraction | None:
    """Returns the value of a text that is a number ("18", "18.", "$18.00", "1,800", "-3/4", "7%"), else None.

    Args:
      text: a final result.
    """
    bare = plain(text).replace("−", "-").replace(",", "").replace(" ", "").replace("$", "").rstrip("%.")
    return Fraction(bare) if len(bare) <= _LONGEST and _PLAIN.fullmatch(bare) else None


def choice(text: str) -> str | None:
    """Returns the letter or label of a text that is one of several choices ("B", "(b).", "Answer 3"), else None.

    Args:
      text: a final result.
    """
    bare = re.sub(r"[\s().:]", "", plain(text))
    known = re.fullmatch(rf"{_LETTER}|(?:answer|ending|option|choice|solution)\d+", bare, re.IGNORECASE)
    return bare.casefold() if known else None


def box(text: str) -> str | None:
    r"""Returns what the last whole `\boxed{...}` of a text holds, as it stands there; None where there is none.

    Args:
      text: a model's whole answer.
    """
    opened, whole = [], []  # places behind the braces that are open; the same of closed boxes, and where they end
    for found in _BRACE.finditer(text):
        if found[0] != "}":
            opened.append((found.end(), len(found[0]) > 1))
        elif opened:
            start, is_box = opened.pop()
            whole += [(start, found.start())] if is_box else []
    return text[slice(*max(whole))] if whole else None


def boxed(text: str) -> str | None:
    r"""Returns the result in the last whole `\boxed{...}` of a text; None where there is none.

    Args:
      text: a model's whole answer.
    """
    found = box(text)
    return None if found is None else _first(found, whole=True)


def expression(text: str) -> str | None:
    """Returns the expression that a text boxes last, else the one that it says is its (final) answer, as it stands.

    Args:
      text: a model's whole answer.
    """
    found = box(text)
    if found is None:
        for words in (r"final\s+answer", "answer"):
            ends = [said.end() for said in _said(words).finditer(text)]
            if ends:
                rest = text[ends[-1]:]
                formula = re.match(r"\$([^$\n]+)\$", rest)
                return formula[1] if formula else _SENTENCE.split(rest, maxsplit=1)[0].strip(_MARKS) or None
    return found


def _said(words: str) -> re.Pattern[str]:
    return re.compile(rf"{words}\**\s*(?:is|:)[\s:*]*(?=\S)", re.IGNORECASE)


def phrase(words: str) -> Callable[[str], str | None]:
    """Returns the extractor of what follows the last time a text says words and "is" or ":".

    Args:
      words: a regular expression, whatever the case.
    """
    pattern = _said(words)

    def extract(text: str) -> str | None:
        ends = [found.end() for found in pattern.finditer(text)]
        return _first(_SENTENCE.split(text[ends[-1]:], maxsplit=1)[0]) if ends else None

    return extract


def letter(text: str) -> str | None:
    """Returns the letter or label that an answer begins with, where it is no word; None where there is none.

    Args:
      text: a model's whole answer.
    """
    option = _CHOICE.match(text.lstrip(_MARKS + "\n\t$"))
    return next(filter(None, option.groups())) if option else None


def code(text: str) -> str | None:
    """Returns the program of an answer; None where it is empty.

    Args:
      text: a model's whole answer: a program in a fence (```), which may begin before the answer or never end,
        between [BEGIN] and [DONE], or alone.
    """
    text = text.replace("\r\n", "\n")
    marks, blocks = _MARK.findall(text), _FENCE.findall(text)
    if len(marks) % 2 and not marks[0] and _PROGRAM.match(text):  # it begins inside a fence that the prompt opened
        text, blocks = _MARK.split(text, maxsplit=1)[0], []
    if blocks:
        text = next((block for block in blocks if re.search(r"(?m)^\s*(?:def|class) ", block)), blocks[0])
    text = _DONE.split(_BEGIN.split(text)[-1], maxsplit=1)[0].strip("\n").rstrip()
    return text or None


def _first(text: str, whole: bool = False) -> str | None:
    """The number or choice that a text begins with, else the text; of a whole expression no part before "="."""
    text = plain(text)
    result = text if whole else text.rpartition("=")[2].strip(_MARKS)
    result = _BRACKETED.sub(r"\1", result)
    amount, option = _AMOUNT.match(result), _CHOICE.match(result)
    if amount:
        return amount[0]
    return next(filter(None, option.groups())) if option else text or None


def _last(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    return lambda text: next((found[0] for found in reversed(list(pattern.finditer(text)))), None)


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "hash": final_answer, "boxed": boxed, "final_answer": phrase(r"final\s+answer"), "answer_is": phrase("answer"),
    "letter": letter, "last_number": _last(_ANY_NUMBER), "last_choice": _last(_ANY_CHOICE), "code": code,
    "expression": expression}
DEFAULT = tuple(EXTRACTORS)[:7]  # those for any answer, in this order; the first that finds something decides
GUESSES: dict[str, Callable[[str], object]] = {  # name: kind of reference
    "letter": choice, "last_number": number, "last_choice": choice}


def check(names: Sequence[str]) -> None:
    """Raises ValueError for names that are no extractors."""
    unknown = [name for name in names if name not in EXTRACTORS]
    if unknown or not names:
        raise ValueError(f"extractors {list(names)}: expected some of {list(EXTRACTORS)}, in the order to try them")


def extract(text: str, names: Sequence[str] = DEFAULT, expected: str | None = None) -> tuple[str | None, str | None]:
    """Finds the final result of an answer.

    Args:
      text: a model's whole answer.
      names: of the extractors to try, in order.
      expected: the reference, whose kind says which guesses make sense; None for none of them.

    Returns:
      The result and the name of the extractor that found it; None and None where none did.
    """
    for name in names:
        if name in GUESSES and (expected is None or GUESSES[name](expected) is None):
            continue
        found = EXTRACTORS[name](text)
        if found is not None:
            return found, name
    return None, None


def reference(text: str, names: Sequence[str] = DEFAULT) -> str | None:
    """Returns the final result of a row's own answer: where an extractor sees it, or all of a bare number or choice.

    Args:
      text: the row's answer.
      names: of the extractors to try; guesses are left out.
    """
    found, _ = extract(text, names)
    bare = text if len(names) > 1 and (number(text) is not None or choice(text)) else None
    return bare if found is None else found
