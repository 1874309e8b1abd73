"""Latency over message size as an SVG file, a line a backend, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .console import human_bytes

if TYPE_CHECKING:
    from ..runtime.messages import CollectiveFigure

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 440, 76, 110, 40, 56
COLOURS = {"nccl": "#2b6cb0", "host": "#718096", "oneshot": "#c05621"}


def latency_svg(figures: Sequence[CollectiveFigure]) -> str:
    """The whole document. `figures` must not be empty."""
    sizes = sorted({f.size for f in figures})
    decades = range(
        math.floor(math.log10(min(f.latency for f in figures))),
        math.ceil(math.log10(max(f.latency for f in figures))) + 1,
    )

    def x(size: int) -> float:
        span = math.log2(sizes[-1] / sizes[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(size / sizes[0]) / span

    def y(seconds: float) -> float:
        span = (decades[-1] - decades[0]) or 1
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(seconds) - decades[0]) / span

    parts = [_text(LEFT, 24, f"All-reduce over {figures[0].world} ranks: time of the slowest one", weight="bold")]
    for decade in decades:
        at = y(10.0**decade)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e2e8f0"/>')
        parts.append(_text(LEFT - 8, at + 4, _seconds(decade), anchor="end"))
    for size in sizes[:: max(1, len(sizes) // 8)]:
        parts.append(_text(x(size), HEIGHT - BOTTOM + 20, human_bytes(size), anchor="middle"))
    for backend in dict.fromkeys(f.backend for f in figures):
        line = [f for f in figures if f.backend == backend]
        colour = COLOURS.get(backend, "#000")
        points = " ".join(f"{x(f.size):.1f},{y(f.latency):.1f}" for f in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(x(line[-1].size) + 8, y(line[-1].latency) + 4, backend, colour=colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#1a202c", weight: str = "normal"
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">{text}</text>'


def _seconds(decade: int) -> str:
    """10 to the `decade` seconds with a unit."""
    unit, factor = next((u, f) for u, f in (("s", 0), ("ms", 3), ("us", 6), ("ns", 9)) if decade + f >= 0 or u == "ns")
    return f"{10 ** (decade + factor):g} {unit}"
