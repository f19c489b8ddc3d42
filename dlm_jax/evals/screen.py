"""An answer on a terminal or in a notebook while it is being decoded."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text


class Screen:
    """An answer while it is being decoded: drafts are grey, drafted tokens orange once committed.

    Attributes:
      STYLE: colours by what a token is.
    """

    STYLE = {"drafted": "dark_orange", "autoregressive": "default", "draft": "bright_black"}

    def __init__(self, tokenizer: Any, console: Console, *, eos_id: int | None, limit: int):
        self._tokenizer, self._console, self._eos_id, self._limit = tokenizer, console, eos_id, limit
        self._shown: dict[int, tuple[int, str]] = {}
        self._finished = False

    def apply(self, event: Any) -> None:
        """Takes one event in; an answer ends with its first committed end of sequence, or with the limit."""
        if event.committed:
            self._forget_drafts()
        for place, token, origin in zip(event.numbers, event.tokens, event.origin):
            self._shown[place] = (token, origin if event.committed else "draft")
        ends = [p for p, (token, style) in self._shown.items() if style != "draft" and token == self._eos_id]
        end = min([self._limit - 1, *ends])
        self._shown = {p: shown for p, shown in self._shown.items() if p <= end}

    def finish(self) -> None:
        """Leaves the answer alone on the canvas."""
        self._forget_drafts()
        self._finished = True

    def _forget_drafts(self) -> None:
        self._shown = {p: shown for p, shown in self._shown.items() if shown[1] != "draft"}

    def spans(self) -> list[tuple[str, str]]:
        """Returns the texts on the canvas now and their styles."""
        from dlm_jax.data import tokenizer as tokenizers  # takes seconds, and a launcher's help needs none

        out, last = [], -1
        # tokens that follow each other are decoded together; only drafts show their special tokens
        run = lambda item: (item[1][1][1] == "draft", 0 if self._finished else item[1][0] - item[0])
        for (draft, _), items in itertools.groupby(enumerate(sorted(self._shown.items())), run):
            places, cells = zip(*(item for _, item in items))
            if places[0] > last + 1 and not self._finished:
                out.append((" … ", self.STYLE["draft"]))
            pieces = tokenizers.pieces(self._tokenizer, [token for token, _ in cells], skip_special_tokens=not draft)
            out += [(piece, self.STYLE[style]) for piece, (_, style) in zip(pieces, cells)]
            last = places[-1]
        return out

    def show(self, events: Any) -> int:
        """Plays events to their end and returns the forwards they took; a file gets the answer alone."""
        forwards, live = 0, self._console.is_terminal
        with Live(console=self._console, refresh_per_second=20) if live else contextlib.nullcontext() as view:
            for event in events:
                forwards = event.forward
                self.apply(event)
                if live:
                    view.update(Text.assemble(*self.spans()))
            self.finish()
            if live:
                view.update(Text.assemble(*self.spans()))
        if not live:
            self._console.file.write("".join(text for text, _ in self.spans()) + "\n")
        return forwards


def film(events: Iterable[Any], tokenizer: Any, *, eos_id: int | None, limit: int) -> Iterator[str]:
    """Yields a line for every event: its forward and kind, and the answer as it stands, in a terminal's colours.

    Args:
      events: of one row, see `decode.stream`.
      tokenizer: of the model.
      eos_id: id that ends the answer.
      limit: tokens of the answer.
    """
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", soft_wrap=True)
    screen = Screen(tokenizer, console, eos_id=eos_id, limit=limit)
    for event in events:
        screen.apply(event)
        with console.capture() as line:
            console.print(Text.assemble(*screen.spans()), end="")
        yield f"{event.forward:3d} {event.kind:8s}{line.get()}"
