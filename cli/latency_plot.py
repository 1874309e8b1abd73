"""Latency over message size as an SVG or PNG file, a line a backend, both axes logarithmic."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..shardplan.errors import UsageError
from .console import human_bytes

if TYPE_CHECKING:
    from ..runtime.messages import CollectiveFigure

ENDINGS = (".svg", ".png")

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 440, 76, 110, 40, 56
COLOURS = {"nccl": "#2b6cb0", "host": "#718096", "oneshot": "#c05621"}
GRID, INK, FONT_SIZE = "#e2e8f0", "#1a202c", 12
PNG_SCALE = 2
"""Pixels of a PNG per unit of the plot."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Text:
    """A text whose baseline is at `at`; `anchor`: which end of it, start, middle or end."""

    at: Point
    text: str
    anchor: str = "start"
    colour: str = INK


@dataclass(frozen=True)
class Line:
    """A line through `points`."""

    points: list[Point]
    colour: str = GRID
    width: int = 1


def check_ending(ending: str) -> None:
    """Raise UsageError for a file that could not be drawn, judging by its ending."""
    if ending.lower() not in ENDINGS:
        raise UsageError(f"{ending or 'no ending'} is not {' or '.join(ENDINGS)}", "name a file such as latency.svg")
    if ending.lower() == ".png" and find_spec("PIL") is None:
        raise UsageError("PNG files need Pillow, which is not installed", "pip install pillow, or name a .svg file")


def latency_plot(figures: Sequence[CollectiveFigure], ending: str) -> bytes:
    """The whole file. `figures` must not be empty."""
    return _svg(_plot(figures)) if ending.lower() == ".svg" else _png(_plot(figures))


def _plot(figures: Sequence[CollectiveFigure]) -> list[Line | Text]:
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

    parts: list[Line | Text] = [Text((LEFT, 24), f"All-reduce over {figures[0].world} ranks: time of the slowest one")]
    for decade in decades:
        at = y(10.0**decade)
        parts.append(Line([(LEFT, at), (WIDTH - RIGHT, at)]))
        parts.append(Text((LEFT - 8, at + 4), _seconds(decade), "end"))
    for size in sizes[:: max(1, len(sizes) // 8)]:
        parts.append(Text((x(size), HEIGHT - BOTTOM + 20), human_bytes(size), "middle"))
    for backend in dict.fromkeys(f.backend for f in figures):
        line = [f for f in figures if f.backend == backend]
        colour = COLOURS.get(backend, "#000")
        parts.append(Line([(x(f.size), y(f.latency)) for f in line], colour, 2))
        parts.append(Text((x(line[-1].size) + 8, y(line[-1].latency) + 4), backend, colour=colour))
    return parts


def _svg(parts: Sequence[Line | Text]) -> bytes:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="{FONT_SIZE}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for part in parts:
        if isinstance(part, Line):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in part.points)
            lines.append(
                f'<polyline points="{points}" fill="none" stroke="{part.colour}" stroke-width="{part.width}"/>'
            )
        else:
            x, y = part.at
            place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{part.anchor}"'
            lines.append(f'<text {place} fill="{part.colour}">{part.text}</text>')
    return "\n".join([*lines, "</svg>\n"]).encode()


def _png(parts: Sequence[Line | Text]) -> bytes:
    from PIL import Image, ImageDraw, ImageFont  # type: ignore[import-not-found]

    def scaled(point: Point) -> Point:
        return point[0] * PNG_SCALE, point[1] * PNG_SCALE

    image = Image.new("RGB", (WIDTH * PNG_SCALE, HEIGHT * PNG_SCALE), "#fff")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_SIZE * PNG_SCALE)
    for part in parts:
        if isinstance(part, Line):
            draw.line([scaled(p) for p in part.points], part.colour, part.width * PNG_SCALE)
        else:
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[part.anchor]
            draw.text(scaled(part.at), part.text, part.colour, font, anchor)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def _seconds(decade: int) -> str:
    """10 to the `decade` seconds with a unit."""
    unit, factor = next((u, f) for u, f in (("s", 0), ("ms", 3), ("us", 6), ("ns", 9)) if decade + f >= 0 or u == "ns")
    return f"{10 ** (decade + factor):g} {unit}"
