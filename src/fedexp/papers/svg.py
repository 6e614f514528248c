"""Charts of lines as SVG, written by hand: equal data have equal bytes, whatever version of a
library is there.

Coordinates are integers, two of them a pixel. Values lie between 0 and 1.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's palette, in the order of the style of figures
# (src/fedexp/figures/fedexp.mplstyle).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#A6761D")
DASHES = ("", "12 6", "3 5", "12 4 3 4")  # of the first eight lines, the next eight, ...
WIDE, HIGH = 760, 420  # of a panel
LEFT, TOP, GAP, LINE = 90, 80, 110, 34  # margins; room between panels; of a line of text


@dataclass(frozen=True)
class Curve:
    """A line of a panel, or single points."""

    number: int  # decides colour and dash
    points: Sequence[tuple[int, float]]  # (round, mean), by round
    spread: Sequence[float] = ()  # standard deviation at each point; () where there is none
    marks: bool = False  # circles in place of a line


@dataclass(frozen=True)
class Panel:
    label: str  # of the vertical axis
    curves: Sequence[Curve]


def chart(
    title: str, panels: Sequence[Panel], names: Sequence[tuple[int, str, bool]], per_row: int
) -> str:
    """Return an SVG: panels in rows with one legend below. names: (number, text, whether circles)
    of the legend."""
    last = max(
        (point[0] for panel in panels for curve in panel.curves for point in curve.points),
        default=1,
    )
    rows = -(-len(panels) // per_row)
    width = LEFT + per_row * (WIDE + GAP)
    below = TOP + rows * (HIGH + GAP)
    height = below + LINE * -(-len(names) // 3) + LINE // 2
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width // 2}" height="{height // 2}" font-family="sans-serif" font-size="22">'
        ),
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(LEFT, 40, title, size=26),
    ]
    for i, panel in enumerate(panels):
        parts += drawn(
            panel, LEFT + (i % per_row) * (WIDE + GAP), TOP + (i // per_row) * (HIGH + GAP), last
        )
    column = (width - LEFT) // 3
    for i, (number, name, marks) in enumerate(names):
        x, y = LEFT + (i % 3) * column, below + LINE * (i // 3)
        line = f'<circle cx="{x + 30}" cy="{y - 8}" r="6" {stroke(number, False)}/>'
        parts.append(line if marks else f'<path d="M{x} {y - 8}h60" {stroke(number)}/>')
        parts.append(text(x + 72, y, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def drawn(panel: Panel, x: int, y: int, last: int) -> list[str]:
    """Return the parts of a panel with its upper left corner at (x, y); last: the round at its
    right side."""

    def place(round: int, value: float) -> tuple[int, int]:
        return x + int(WIDE * round / last + 0.5), y + HIGH - int(
            HIGH * min(max(value, 0.0), 1.0) + 0.5
        )

    parts = [text(x, y - 10, panel.label)]
    for tenth in range(0, 11, 2):
        level = place(0, tenth / 10)[1]
        parts.append(
            f'<path d="M{x} {level}h{WIDE}" stroke="#ddd"/>'
            + text(x - 8, level + 7, f"{tenth / 10:g}", "end")
        )
    for round in ticks(last):
        parts.append(text(place(round, 0)[0], y + HIGH + 28, str(round), "middle"))
    for curve in panel.curves:
        corners = [place(*point) for point in curve.points]
        if curve.spread:
            both = list(zip(curve.points, curve.spread, strict=True))
            edge = [place(r, v + s) for (r, v), s in both] + [
                place(r, v - s) for (r, v), s in reversed(both)
            ]
            parts.append(
                f'<path d="{path(edge)}z" fill="{colour(curve.number)}" fill-opacity=".18"/>'
            )
        if curve.marks:
            parts += [
                f'<circle cx="{a}" cy="{b}" r="6" {stroke(curve.number, False)}/>'
                for a, b in corners
            ]
        elif corners:
            parts.append(f'<path d="{path(corners)}" {stroke(curve.number)}/>')
    return parts


def path(corners: Sequence[tuple[int, int]]) -> str:
    """Return the corners as path data: the first absolute, then steps."""
    (x, y), steps = corners[0], []
    for before, after in itertools.pairwise(corners):
        steps.append(f"{after[0] - before[0]} {after[1] - before[1]}")
    return f"M{x} {y}" + (f"l{' '.join(steps)}" if steps else "")


def ticks(last: int) -> list[int]:
    """Return four to ten round numbers from 0 to the last one, at steps of 1, 2 or 5 times a power
    of ten."""
    step = next(
        s
        for power in range(12)
        for s in (10**power, 2 * 10**power, 5 * 10**power)
        if last <= 10 * s
    )
    return list(range(0, last + 1, step))


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def stroke(number: int, dashed: bool = True) -> str:
    dash = DASHES[number // len(PALETTE) % len(DASHES)] if dashed else ""
    return f'fill="none" stroke="{colour(number)}" stroke-width="3"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def text(x: int, y: int, words: str, anchor: str = "", size: int = 0) -> str:
    more = (f' text-anchor="{anchor}"' if anchor else "") + (f' font-size="{size}"' if size else "")
    return f'<text x="{x}" y="{y}"{more}>{escape(words, quote=False)}</text>'
