"""A picture of lanes: which was active when, over which tokens, where it forked and when the cache was refreshed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dlm_jax.decode.asynclane import AsyncLane, Compact, Lane

STEP, TOKEN, LEFT, TOP, FOOT = 22, 9, 46, 22, 34  # pixels: an iteration, a token, and the margins
COLOURS = {"gen": "#3b7dd8", "ref": "#e08a2e"}
NAMES = {"gen": "generates", "ref": "refines"}
_TEXT = 'font-family="sans-serif" font-size="11" fill="#777"'


def refreshes(decoder: AsyncLane, iterations: int) -> list[int]:
    """Returns the iterations that began with a refresh of the cache."""
    interval = decoder.cache.refresh_interval if isinstance(decoder.cache, Compact) else 0
    return list(range(1 + interval, iterations + 1, interval)) if interval else []


def picture(lanes: Sequence[Lane], refreshed: Sequence[int] = ()) -> str:
    """Returns an SVG image: iterations from left to right, the tokens of the answer downwards, a box for each lane.

    Args:
      lanes: of one answer, see `asynclane.history`.
      refreshed: iterations that began with a refresh, drawn as lines.
    """
    last = max(1, *(max(lane.first, lane.last) for lane in lanes))
    most = max(lane.start + lane.length for lane in lanes)
    x, y = (lambda iteration: LEFT + STEP * (iteration - 1)), (lambda token: TOP + TOKEN * token)
    width, height = x(last + 1) + 12, y(most) + FOOT
    parts = [_box(lane, x, y, last) for lane in lanes if lane.first]
    parts += [f'<line x1="{x(t)}" x2="{x(t)}" y1="{TOP - 6}" y2="{y(most)}" stroke="#c0392b" stroke-dasharray="3 3"/>'
              for t in refreshed]
    ticks = range(1, last + 1, max(1, last // 12))
    parts += [f'<text x="{x(t) + STEP / 2}" y="{y(most) + 13}" text-anchor="middle" {_TEXT}>{t}</text>' for t in ticks]
    parts += [f'<text x="{LEFT - 6}" y="{y(n) + 9}" text-anchor="end" {_TEXT}>{n}</text>'
              for n in range(0, most, max(1, -(-most // 8)))]
    names = [*((COLOURS[role], NAMES[role]) for role in COLOURS), *([("#c0392b", "refresh")] if refreshed else [])]
    for i, (colour, name) in enumerate(names):
        parts.append(f'<rect x="{LEFT + 90 * i}" y="4" width="10" height="10" fill="{colour}"/>'
                     f'<text x="{LEFT + 90 * i + 14}" y="13" {_TEXT}>{name}</text>')
    parts.append(f'<text x="{LEFT}" y="{height - 6}" {_TEXT}>iterations; downwards the tokens of the answer</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(width, 330)} {height}" '
            f'width="{max(width, 330)}" height="{height}" role="img">{"".join(parts)}</svg>')


def _box(lane: Lane, x, y, last: int) -> str:
    end = lane.last or last
    said = (f"lane {lane.number} {NAMES[lane.role]} tokens {lane.start} to {lane.start + lane.length - 1}, "
            f"iterations {lane.first} to {end}: {lane.end}")
    box = (f'<rect x="{x(lane.first) + 1}" y="{y(lane.start) + 0.5}" width="{STEP * (end - lane.first + 1) - 2}" '
           f'height="{TOKEN * lane.length - 1}" rx="2" fill="{COLOURS[lane.role]}" fill-opacity="0.75">'
           f"<title>{escape(said)}</title></rect>")
    if lane.end != "fork":
        return box
    return box + f'<circle cx="{x(end + 1)}" cy="{y(lane.start) + 4}" r="3.5" fill="#222"><title>fork</title></circle>'
