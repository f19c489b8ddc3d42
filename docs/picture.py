"""Draws `decoders.svg`: which forward committed which token, for every decoder of a quickstart's replay.

    python docs/picture.py runs/quickstart/results.json 1 > docs/decoders.svg   # the number of the replayed question
"""

from __future__ import annotations

import json
import sys
from html import escape
from typing import Any

SIDE, GAP, LINE, LEFT, RIGHT = 13, 2, 30, 330, 140  # pixels
DARK, BRIGHT = (38, 43, 110), (255, 184, 77)  # of the first forward and of the last
_TEXT = 'font-family="sans-serif" font-size="13" fill="#888"'


def colour(share: float) -> str:
    """Returns the colour of a forward, from the first, 0, to the last, 1."""
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(DARK, BRIGHT))


def row(track: dict[str, Any], expected: str, y: int) -> str:
    """Returns a decoder's squares, with the forwards that it took and whether its answer is right."""
    commits = {place: (frame["forward"], text) for frame in track["frames"] for place, text, _ in frame["commits"]}
    last = max(forward for forward, _ in commits.values())
    result = lambda text: text.rpartition("####")[2].strip()
    right = result("".join(text for _, (_, text) in sorted(commits.items()))) == result(expected)
    squares = [f'<rect x="{LEFT + (SIDE + GAP) * place}" y="{y}" width="{SIDE}" height="{SIDE}" rx="2" '
               f'fill="{colour((forward - 1) / max(1, last - 1) if forward else 0)}">'
               f"<title>forward {forward}: {escape(text)}</title></rect>"
               for place, (forward, text) in sorted(commits.items())]
    end = LEFT + (SIDE + GAP) * (max(commits) + 1) + 8
    return (f'<text x="{LEFT - 12}" y="{y + 11}" text-anchor="end" {_TEXT}>{escape(track["name"])}</text>'
            + "".join(squares)
            + f'<text x="{end}" y="{y + 11}" {_TEXT}>{last} forwards{"" if right else ", wrong"}</text>')


def picture(replay: dict[str, Any]) -> str:
    """Returns the SVG of a replayed question, the decoders with the most forwards first."""
    tracks = sorted(replay["tracks"], key=lambda track: -track["frames"][-1]["forward"])
    most = max(place for track in tracks for frame in track["frames"] for place, *_ in frame["commits"]) + 1
    width, height = LEFT + (SIDE + GAP) * most + RIGHT, LINE * len(tracks) + 8
    rows = [row(track, replay["expected"], 8 + LINE * i) for i, track in enumerate(tracks)]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
            + "\n".join(rows) + "</svg>\n")


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write(picture(json.load(file)["replays"][int(sys.argv[2])]))
