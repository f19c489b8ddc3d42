"""How papers evaluated, by name: "refusion-2025:gsm8k" is the prompt, examples, extractors, lengths and decoder of one
row of its tables, as far as the paper or its released script says, and what is ours where neither does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """One benchmark as one paper evaluated it.

    Attributes:
      kind: of `benchmarks.KINDS`.
      prompt: of `prompts.PROMPTS`.
      shots: examples before every question.
      shot_names: the examples that it must be, by their names in the benchmark; empty for the first of --shots-data.
      preset: decoder settings, of `configs`.
      max_new_tokens: room for an answer; None takes the preset's.
      chat: arguments of the chat template.
      source: where the paper says so, and what of it is ours.
    """

    kind: str
    prompt: str
    shots: int = 0
    shot_names: tuple[str, ...] = ()
    preset: str
    max_new_tokens: int | None = None
    chat: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source: str


_CHAT = {  # kind and prompt of a benchmark where a paper names none
    "mmlu": ("choice", "letter"), "mmlu_pro": ("choice", "letter"), "arc_c": ("choice", "letter"),
    "gpqa": ("choice", "letter"), "gsm8k": ("gsm8k", "boxed"), "math": ("math", "math_boxed"),
    "humaneval": ("humaneval", "program"), "mbpp": ("mbpp", "program_tests")}


def _plain(names: str, source: str, preset: str, **fields) -> dict[str, Protocol]:
    return {name: Protocol(kind=_CHAT[name][0], prompt=_CHAT[name][1], preset=preset.replace("*", name),
                           source=f"{source}; the prompt is ours", **fields) for name in names.split()}


_REFUSION = "mmlu_pro arc_c gsm8k math gpqa humaneval mbpp"
_FLARE = "arc_c mmlu mmlu_pro gpqa gsm8k math humaneval mbpp"
_FLASH = {  # prompt, and where the paper has the numbers
    "arc_c": ("arc", "Table 3"), "arc_e": ("arc", "Table 3"), "gpqa": ("gpqa", "Table 3"),
    "mmlu_pro": ("mmlu_pro", "Table 3"), "hellaswag": ("hellaswag", "Table 8: 5 examples"),
    "piqa": ("piqa", "Table 3; how it gives the choices, it does not say")}
_LANE = {  # prompt, examples; the prompts are lm-evaluation-harness's, whose names of tasks the paper uses
    "gsm8k_cot": ("gsm8k", "chain_of_thought", 0), "gsm8k": ("gsm8k", "question_answer", 5),
    "math": ("math", "problem_solution", 4), "mbpp": ("mbpp", "begin_done", 3),
    "humaneval": ("humaneval", "continue", 0)}


def _lane(length: int) -> dict[str, Protocol]:
    named = {"mbpp": ("2", "3", "4")}  # lm-evaluation-harness's three
    return {name: Protocol(kind=kind, prompt=prompt, shots=shots, shot_names=named.get(name, ()),
                           preset=f"asynclane:{name}", max_new_tokens=length,
                           source="AsyncLane, Sec. 4.1 and Table 1; the prompt is lm-evaluation-harness's")
            for name, (kind, prompt, shots) in _LANE.items()}


_PAPERS: dict[str, dict[str, Protocol]] = {
    "refusion-2025": _plain(_REFUSION, "ReFusion, Tables 1 and 7: no examples", "refusion:*"),
    "refusion-2025-released": _plain(_REFUSION, "ReFusion's released eval.sh: no examples", "refusion:released_*"),
    "flashdlm-2025": {
        **{name: Protocol(kind="choice", prompt=f"flashdlm_{prompt}", preset="flashdlm:guided",
                          shots=5 * (name == "hellaswag"), source=f"FlashDLM, Table 11, C.5 and {where}")
           for name, (prompt, where) in _FLASH.items()},
        "gsm8k": Protocol(kind="gsm8k", prompt="flashdlm_gsm8k", shots=8, preset="flashdlm:guided",
                          source="FlashDLM, Sec. 4.2, Table 11 and C.5: 8 examples, those of Wei et al. 2022")},
    "orthrus-2026": _plain("gsm8k math humaneval mbpp", "Orthrus, Sec. 4.1: greedy, no examples", "orthrus:greedy",
                           chat={"enable_thinking": "false"}),
    **{f"asynclane-2026-{length}": _lane(length) for length in (256, 512, 1024)},
    "flare-2026-ar-trust": _plain(_FLARE, "FLARE, Tables 1 and 2 and D.1", "flare:ar_trust"),
    "flare-2026-diffusion-trust": _plain(_FLARE, "FLARE, Tables 1 and 2 and D.1", "flare:diffusion_trust"),
}
PROTOCOLS: dict[str, Protocol] = {
    f"{paper}:{name}": entry for paper, entries in _PAPERS.items() for name, entry in entries.items()}


def find(name: str) -> Protocol:
    """Returns a protocol.

    Args:
      name: key of `PROTOCOLS`, "paper:benchmark".

    Raises:
      ValueError: an unknown one, with what is accepted.
    """
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    paper = name.partition(":")[0]
    if paper in _PAPERS:
        raise ValueError(f"protocol {name!r} is not known; accepted of {paper}: "
                         f"{', '.join(f'{paper}:{each}' for each in _PAPERS[paper])}")
    raise ValueError(f"protocol {name!r} is not known; accepted: PAPER:BENCHMARK, of "
                     + "; ".join(f"{each}: {', '.join(entries)}" for each, entries in _PAPERS.items()))
