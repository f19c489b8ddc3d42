"""How a benchmark's questions are put, by name and version: one registry, from which protocols choose.

A prompt's text stands in its paper or in the released script that its source names; a change of any word is a new
version. Examples go before the question as earlier turns of the conversation, or, where a prompt is plain text, before
it in the same text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from dlm_jax.evals import extractors
from dlm_jax.evals.benchmarks import Item

_LETTERS = tuple("ABCDEFGHIJ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One way to put a benchmark's questions.

    Attributes:
      kinds: of `benchmarks.KINDS` that it suits.
      question: template of a question, with {question}, and {choices} and {tests} where its kind has such.
      answer: template of an example's answer, with {solution} and {result}.
      label: template of what names a choice, with {letter}, {number} from 1, or its {text}.
      chat: whether it is a message for a chat template; else plain text, to be continued.
      between: what separates examples in plain text.
      stop: texts before which an answer ends.
      extract: names of `extractors` to try on an answer, in order.
      version: counted up with every change.
      source: where it stands.
    """

    kinds: tuple[str, ...]
    question: str
    answer: str
    label: str = "{letter}"
    chat: bool = True
    between: str = "\n\n"
    stop: tuple[str, ...] = ()
    extract: tuple[str, ...] = extractors.DEFAULT
    version: int = 1
    source: str

    def put(self, item: Item) -> str:
        """Returns an item's question in words."""
        mark = "." if self.label == "{letter}" else ":"
        choices = "\n".join(f"{self._name(item, number)}{mark} {text}" for number, text in enumerate(item.choices))
        tests = item.exam.tests.strip() if item.exam else ""
        return _filled(self.question, question=item.question, choices=choices, tests=tests)

    def _name(self, item: Item, number: int) -> str:
        return _filled(self.label, letter=_LETTERS[number], number=str(number + 1), text=item.choices[number])

    def result(self, item: Item) -> str:
        """Returns the right final result as an answer to this prompt names it."""
        return self._name(item, int(item.result)) if item.choices else item.result

    def show(self, item: Item) -> str:
        """Returns an item's answer as an example gives it."""
        return _filled(self.answer, solution=item.solution, result=self.result(item))

    def messages(self, item: Item, shots: Sequence[Item] = ()) -> list[dict[str, str]]:
        """Returns what the model is asked.

        Args:
          item: the question.
          shots: examples to go before it.

        Returns:
          {"role", "content"} each; of plain text one, whose content goes to the model as it is.
        """
        if not self.chat:
            texts = [self.put(shot) + self.show(shot) for shot in shots] + [self.put(item)]
            return [{"role": "user", "content": self.between.join(texts)}]
        turns = [turn for shot in shots for turn in (("user", self.put(shot)), ("assistant", self.show(shot)))]
        return [{"role": role, "content": text} for role, text in [*turns, ("user", self.put(item))]]

    def cut(self, text: str) -> str:
        """Returns an answer up to the first of the prompt's stop texts."""
        ends = [text.index(stop) for stop in self.stop if stop in text]
        return text[:min(ends)] if ends else text


def _filled(template: str, **values: str) -> str:
    # not str.format: programs and formulas are full of braces; what is filled in is no template
    return re.sub("{(" + "|".join(values) + ")}", lambda found: values[found[1]], template)


_FLASH = "FlashDLM, Appendix C.5"
_FINAL = ("final_answer", "answer_is", "boxed", "hash", "last_number", "last_choice")
_CAREFUL = "You are a careful reasoning assistant. "
_BLANK = (
    _CAREFUL + "A commonsense sentence is shown with a blank and **four** KINDs that could fill the blank. Think step "
    "by step about which option makes the sentence most sensible, then decide.\n\nSentence: {question}\n{choices}\n\n")
_REASON = (
    "In your response:\n\n1. First reason and explain your reasoning briefly before WHAT.\n2. Then at the end of your "
    "explanation, on")
_WRITE = (
    " a **new line**, write exactly: \"The final answer is [answer]\" where **[answer]** is OF **KIND1**, **KIND2**, "
    "**KIND3**, or **KIND4**. Do **not** output anything after that line.")


def _flash(question: str, what: str = "", of: str = "either", kind: str = "Answer") -> Prompt:
    for word, meant in (("WHAT", what), ("OF ", of + " "), ("KIND", kind)):
        question = question.replace(word, meant)
    return Prompt(kinds=("choice",), question=question, answer="The final answer is {result}", label=kind + "{number}",
                  extract=_FINAL, source=_FLASH)


PROMPTS: dict[str, Prompt] = {
    "question": Prompt(
        kinds=("gsm8k", "math"), question="{question}", answer="{solution}\n#### {result}",
        source="the question alone, as fine-tuned models are asked"),
    "instructions": Prompt(
        kinds=("ifeval",), question="{question}", answer="{solution}",
        source="Zhou et al. 2023: the row's prompt alone"),
    "boxed": Prompt(
        kinds=("gsm8k",), answer="{solution}\nThe answer is \\boxed{{result}}.",
        question="{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
        extract=("boxed", "final_answer", "answer_is", "hash", "last_number"),
        source="Qwen3's model card, Best Practices"),
    "math_boxed": Prompt(
        kinds=("math",), answer="{solution}", extract=("expression",),
        question="{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
        source="Qwen3's model card, Best Practices"),
    "letter": Prompt(
        kinds=("choice",), answer="The answer is ({result}).",
        question="{question}\n\n{choices}\n\nThink step by step, then end with \"The answer is (X)\", where X is the "
                 "letter of the right choice.", source="ours"),
    "letter_alone": Prompt(
        kinds=("choice",), question="{question}\n{choices}\nAnswer:", answer=" {result}", chat=False, stop=("\n",),
        extract=("letter", "answer_is", "last_choice"),
        source="MMLU's (Hendrycks et al. 2021), without its first line"),
    "program": Prompt(
        kinds=("humaneval",), answer="```python\n{solution}\n```", extract=("code",),
        question="Complete the following Python function. Answer with the whole function, imports included, in one "
                 "fenced block.\n\n```python\n{question}\n```", source="ours"),
    "program_tests": Prompt(
        kinds=("mbpp",), answer="```python\n{solution}\n```", extract=("code",),
        question="{question} Your code should pass these tests:\n\n{tests}\n\nAnswer with the program in one fenced "
                 "block.", source="ours, from words of Austin et al. 2021"),
    "continue": Prompt(
        kinds=("humaneval",), question="{question}", answer="{solution}", chat=False, extract=("code",),
        stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"), source="Chen et al. 2021, Sec. 2.1 and 3.1"),
    "begin_done": Prompt(
        kinds=("mbpp",), answer="{solution}\n[DONE]", chat=False, stop=("[DONE]",), extract=("code",),
        question="You are an expert Python programmer, and here is your task: {question} Your code should pass these "
                 "tests:\n\n{tests}\n[BEGIN]\n", source="Austin et al. 2021, Fig. 1; lm-evaluation-harness's mbpp"),
    "question_answer": Prompt(
        kinds=("gsm8k",), question="Question: {question}\nAnswer:", answer=" {solution}\n#### {result}", chat=False,
        stop=("Question:",), extract=("hash",), source="lm-evaluation-harness's gsm8k, strict"),
    "chain_of_thought": Prompt(
        kinds=("gsm8k",), question="Q: {question}\nA:", answer=" {solution} The answer is {result}.", chat=False,
        stop=("Q:",), extract=("answer_is", "last_number"),
        source="Wei et al. 2022; lm-evaluation-harness's gsm8k_cot"),
    "problem_solution": Prompt(
        kinds=("math",), question="Problem:\n{question}\n\nSolution:", chat=False, stop=("Problem:",),
        answer=" {solution}\nFinal Answer: The final answer is ${result}$. I hope it is correct.",
        extract=("expression",), source="Lewkowycz et al. 2022, Appendix D; lm-evaluation-harness's minerva_math"),
    "flashdlm_gsm8k": Prompt(
        kinds=("gsm8k",), answer="{solution}\nThe final answer is {result}", extract=_FINAL, source=_FLASH,
        question="Given the following problem, reason and give a final answer to the problem.\n\n"
                 "Problem: {question}\n\nYour response should end with \"The final answer is [answer]\" where [answer] "
                 "is just the final number to the problem."),
    "flashdlm_arc": _flash(_BLANK + "What you should do:\n\n1. Briefly explain your reasoning.\n2. On" + _WRITE),
    "flashdlm_gpqa": _flash(
        _CAREFUL + "A question is shown with **four** possible answers. Think step by step about which option is "
        "correct, then decide.\n\nQuestion: {question}\n{choices}\n\n" + _REASON + _WRITE,
        what="providing the final answer to the question", of="one of"),
    "flashdlm_hellaswag": _flash(_BLANK + _REASON + _WRITE, what="answering this question", kind="Ending"),
    "flashdlm_piqa": dataclasses.replace(_flash(
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "Instruction: {question}\n\nYour response should end with \"The final answer is [answer]\" where [answer] is "
        "the response to the problem."), label="{text}", extract=("final_answer",)),
    "flashdlm_mmlu_pro": Prompt(
        kinds=("choice",), answer="The answer is ({result}).", extract=("answer_is", "last_choice"), source=_FLASH,
        question="The following are multiple choice questions (with answers) about a subject. Think step by step and "
                 "then finish your answer with \"the answer is (X)\" where X is the correct letter choice.\n\n"
                 "{question}\n{choices}"),
}
DEFAULT: Mapping[str, str] = {
    "gsm8k": "boxed", "math": "math_boxed", "choice": "letter", "humaneval": "program", "mbpp": "program_tests",
    "ifeval": "instructions"}


def find(name: str | None, kind: str) -> tuple[str, Prompt]:
    """Returns a prompt of the registry, with its name and version as results tell it.

    Args:
      name: of it; None for the kind's default.
      kind: of the benchmark.

    Raises:
      ValueError: an unknown prompt, or one for other kinds.
    """
    name = DEFAULT[kind] if name is None else name
    if name not in PROMPTS or kind not in PROMPTS[name].kinds:
        suited = [each for each, prompt in PROMPTS.items() if kind in prompt.kinds]
        why = "is not known" if name not in PROMPTS else f"is for {', '.join(PROMPTS[name].kinds)}"
        raise ValueError(f"prompt {name!r} {why}; accepted for {kind}: {', '.join(suited)}")
    return f"{name}@{PROMPTS[name].version}", PROMPTS[name]

