"""Draw the figures of a sweep. Each function takes the runs of a setting and returns a Figure."""

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedexp.analysis.measures import main_measures
from fedexp.analysis.sweep_figures import Setting, settings, slug
from fedexp.figures.draw import class_maps, task_lines
from fedexp.figures.style import (
    GREY,
    legend,
    marker_distance,
    panels,
    round_axis,
    stacked,
    stroke,
    write_note,
)
from fedexp.rundir.reader import RunDirectory

STYLES = (  # the next style is used once all colours have been used
    *("-", "--", ":", "-.", (0, (8, 2)), (0, (3, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 1, 2))),
    *((0, (3, 3, 1, 3, 1, 3)), (0, (12, 4))),
)
MARKERS = "osD^vPX*"  # the next one is used with the next style, whose gaps markers can hide
SPREAD = "mean ± standard\ndeviation"


def sweep_pictures(runs: Sequence[RunDirectory]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield (name, drawing function) for each figure whose data the finished runs contain."""
    used = Counter[str]()
    for setting in settings(runs):
        for name, draw in pictures(setting):
            file = slug(f"{setting.name}_{name}")
            used[file] += 1  # settings may differ only in other characters
            yield f"{file}_{used[file]}" if used[file] > 1 else file, partial(draw, setting)


def pictures(setting: Setting) -> Iterator[tuple[str, Callable[[Setting], Figure]]]:
    """Yield (name, function that draws the figure) for each figure whose data the runs contain."""
    yield "curves", curves
    if any(method.files[0].record for method in setting.methods):
        yield "class_accuracy", partial(class_accuracy, normalised=False)
        yield "class_accuracy_normalised", partial(class_accuracy, normalised=True)


def look(number: int) -> dict[str, Any]:
    """Return the colour and line style for a method's number."""
    colours = len(rcParams["axes.prop_cycle"])
    return {"color": f"C{number % colours}", "linestyle": STYLES[number // colours % len(STYLES)]}


def curves(setting: Setting) -> Figure:
    """Draw learning curves of the main measures.

    Each curve is a method's mean over seeds, in a band of one standard deviation.
    """
    measures = main_measures(setting.runs)
    height, rows = 0.6 + 2.5 * len(measures), stacked(len(measures))
    shape = (rows, len(measures) // rows)
    figure, panes = panels(shortened(setting.title), height, *shape, sharex=True)
    grid = panes.ravel()
    sizes = {len(method.runs) for method in setting.methods}
    for axes, measure in zip(grid, measures, strict=True):
        for method in setting.methods:
            size = f", n={len(method.runs)}" if len(sizes) > 1 else ""
            curve(axes, *method.curve(measure.name), method.number, f"{method.label}{size}")
        if axes.lines:
            task_lines(setting.methods[0].files[0], axes, GREY)
        else:
            write_note(axes, "no values")
        axes.set_ylabel(measure.label)
    grid[0].set_ylim(bottom=0)
    for axes in panes[-1]:
        round_axis(axes)
    legend(figure, grid, spread_of(sizes))
    return figure


def spread_of(sizes: Collection[int]) -> str:
    """Return the legend text for bands and bars. sizes: the numbers of seeds that occur."""
    if max(sizes) == 1:
        return ""
    return f"{SPREAD}, n={max(sizes)}" if len(sizes) == 1 else SPREAD


def curve(axes: Axes, rounds: np.ndarray, values: np.ndarray, number: int, label: str) -> None:
    """Draw the curve of one method. values: float [runs, R]."""
    if not rounds.size:
        return
    turn = number // len(rcParams["axes.prop_cycle"])
    mean, marker = values.mean(0), MARKERS[turn % len(MARKERS)] if rounds.size <= 40 else None
    style = look(number) | {"linewidth": stroke(0.8), "marker": marker, "markersize": 3}
    style["markevery"] = marker_distance(axes, rounds.size)
    axes.plot(rounds, mean, **style, label=label)
    if len(values) > 1:
        spread, colour = values.std(0, ddof=1), style["color"]
        axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)


def class_accuracy(setting: Setting, normalised: bool) -> Figure:
    """Draw the heat maps (classes x rounds) of all methods side by side.

    Each method is shown by its run with the lowest seed.
    """
    shown = []
    for method in setting.methods:
        seed = f", seed {method.runs[0].summary.get('seed')}" if len(method.runs) > 1 else ""
        if record := method.files[0].record:
            shown.append((f"{method.name}{seed}", method.files[0], record))
    return class_maps(shown, shortened(setting.title), normalised)


def shortened(title: str) -> str:
    """Shorten each line of a title to at most 90 characters."""
    return "\n".join(textwrap.shorten(line, 90, placeholder=" …") for line in title.split("\n"))
