"""The critical-difference diagram of a benchmark (Demsar, JMLR 2006, Figure 1)."""

import textwrap

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedexp.analysis.benchmark import Ranking
from fedexp.figures.style import entitle, stroke, width

ROW = 0.17  # inches from one name to the next


def diagram(ranking: Ranking) -> Figure:
    """Draw the methods on an axis of mean ranks, the best on the left; a bar joins those that do
    not differ."""
    found = ranking.comparison
    rows, bars = -(-len(found.methods) // 2), len(found.cliques)
    figure = Figure(figsize=(width(), 1.3 + ROW * (rows + 0.6 * bars)), layout="constrained")
    axes = figure.subplots()
    low, high = 1, len(found.methods)
    margin = 0.45 * (high - low)
    axes.set_xlim(low - margin, high + margin)
    axes.set_ylim(rows + 0.6 * bars + 1.5, -2)
    axes.set_axis_off()
    scale(axes, low, high)
    axes.plot(
        [low, low + found.critical_difference], [-1.4, -1.4], color="black", linewidth=stroke(1.2)
    )
    axes.text(
        low,
        -1.6,
        f"CD = {found.critical_difference:.2f}",
        fontsize=rcParams["xtick.labelsize"],
        va="bottom",
    )
    for number, (first, last) in enumerate(found.cliques):
        y = 0.5 + 0.6 * number
        axes.plot(
            [found.ranks[first], found.ranks[last]], [y, y], color="black", linewidth=stroke(2.4)
        )
    names(axes, ranking, 0.6 * bars + 1.2, margin)
    entitle(figure, "\n".join(["Critical difference", *textwrap.wrap(ranking.title, 90)]))
    return figure


def scale(axes: Axes, low: int, high: int) -> None:
    """Draw the axis of ranks, with about ten numbers."""
    axes.plot([low, high], [0, 0], color="black", linewidth=stroke(0.8))
    step = max(1, round((high - low) / 10))
    for rank in range(low, high + 1, step):
        axes.plot([rank, rank], [-0.25, 0], color="black", linewidth=stroke(0.8))
        axes.text(
            rank, -0.4, str(rank), ha="center", va="bottom", fontsize=rcParams["xtick.labelsize"]
        )


def names(axes: Axes, ranking: Ranking, top: float, margin: float) -> None:
    """Write the better half of the methods on the left, the others on the right, each with a line
    to its rank."""
    found = ranking.comparison
    half = -(-len(found.methods) // 2)
    for place, (method, rank) in enumerate(zip(found.methods, found.ranks, strict=True)):
        left = place < half
        y = top + (place if left else len(found.methods) - 1 - place)
        end = 1 - 0.05 * margin if left else len(found.methods) + 0.05 * margin
        axes.plot([rank, rank, end], [0, y, y], color="0.6", linewidth=stroke(0.5))
        text = f"{method}  {rank:.1f}" if left else f"{rank:.1f}  {method}"
        axes.text(
            end,
            y,
            text,
            ha="right" if left else "left",
            va="center",
            fontsize=rcParams["xtick.labelsize"],
        )
