"""Instructions that a program can check: IFEval's, by their public names.

Sentences, and words in capitals, are found by regular expressions here, by NLTK's models in the authors' code.

Source: Zhou et al., "Instruction-Following Evaluation for Large Language Models", Table 1, and its released checkers.
"""

from __future__ import annotations

import collections
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Rule = tuple[str, Mapping[str, Any]]  # an instruction's name and its arguments
RELATIONS = ("less than", "at least")
_ABBREVIATED = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|vs|e\.g|i\.e)\.$")


def _compare(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def _split_by(text: str, mark: str) -> list[str] | None:
    """Parts between marks; an empty one may stand at either end, None where one stands between."""
    parts = [part.strip() for part in re.split(mark, text)]
    inner = parts[1:-1]
    return None if not all(inner) else [part for part in parts if part]


def _existence(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in keywords)


def _frequency(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return _compare(len(re.findall(keyword, text, re.IGNORECASE)), relation, frequency)


def _forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letters(text: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return _compare(collections.Counter(text.lower())[letter.lower()], let_relation, let_frequency)


def _language(text: str, language: str) -> bool:
    import langdetect

    langdetect.DetectorFactory.seed = 0  # else it draws
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:  # no letters in it
        return True


def _sentences(text: str, num_sentences: int, relation: str = "at least") -> bool:
    ends = re.split(r"(?<=[.!?])[\"')\]]*\s+", text.strip())
    going_on = [bool(_ABBREVIATED.search(end)) for end in ends[:-1]] + [False]
    return _compare(sum(bool(re.search(r"\w", end)) and not more for end, more in zip(ends, going_on)), relation,
                    num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = _split_by(text, r"\s?\*\*\*\s?")
    return parts is not None and len(parts) == num_paragraphs


def _words(text: str, num_words: int, relation: str = "at least") -> bool:
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = re.split(r"\n\n", text)
    count = sum(bool(part.strip()) for part in parts)
    if not 1 <= nth_paragraph <= count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'\"")
    return count == num_paragraphs and re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    marks = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    mark = marks.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(mark, text.lower()) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*[^*]|-).*$", text, re.MULTILINE)) == num_bullets


def _constrained(text: str) -> bool:
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


def _highlights(text: str, num_highlights: int) -> bool:
    found = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in found) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{section_spliter}\s?\d+\s?", text)) - 1 >= num_sections


def _json(text: str) -> bool:
    bare = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(bare)
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    return any(title.strip("<>").strip() for title in re.findall(r"<<[^\n]+>>", text))


def _two(text: str) -> bool:
    parts = _split_by(text, r"\*\*\*\*\*\*")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _repeat(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(text: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    return _compare(sum(word.isupper() for word in re.findall(r"\w[\w'-]*", text)), capital_relation, capital_frequency)


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKERS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _existence, "keywords:frequency": _frequency, "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters, "language:response_language": _language,
    "length_constraints:number_sentences": _sentences, "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words, "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders, "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets, "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights, "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json, "detectable_format:title": _title, "combination:two_responses": _two,
    "combination:repeat_prompt": _repeat, "startend:end_checker": _end, "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words, "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(), "punctuation:no_comma": lambda text: "," not in text}


def check(rules: Sequence[Rule]) -> None:
    """Raises ValueError for instructions that are not known, lack arguments or cannot be checked here.

    Args:
      rules: names and arguments.
    """
    for name, given in rules:
        if name not in CHECKERS:
            raise ValueError(f"instruction {name!r} is not known; accepted: {', '.join(CHECKERS)}")
        if name == "language:response_language" and importlib.util.find_spec("langdetect") is None:
            raise ValueError(f"instruction {name!r} needs langdetect, which is not installed: pip install langdetect")
        known = list(inspect.signature(CHECKERS[name]).parameters.values())[1:]
        missing = [each.name for each in known if each.default is each.empty and each.name not in given]
        other = [key for key in given if key not in [each.name for each in known]]
        if missing or other:
            raise ValueError(f"instruction {name!r} {'lacks ' + ', '.join(missing) if missing else ''}"
                             f"{' and ' if missing and other else ''}{'takes no ' + ', '.join(other) if other else ''}")
        relation = next((value for key, value in given.items() if key.endswith("relation")), RELATIONS[0])
        if relation not in RELATIONS:
            raise ValueError(f"instruction {name!r}: relation {relation!r}, accepted: {', '.join(RELATIONS)}")


def broken(text: str, rules: Sequence[Rule]) -> str | None:
    """Returns the name of the first instruction that an answer does not follow, None where it follows all.

    Args:
      text: the answer; an empty one follows nothing.
      rules: names and arguments, as `check` accepts them.
    """
    return next((name for name, given in rules if not text.strip() or not CHECKERS[name](text, **given)), None)
