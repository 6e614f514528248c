"""Draw a figure from tables: lines with the mean and spread of repeated points, or heat maps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgba_array
from matplotlib.figure import Figure

from fedexp.analysis.draw_sweep import MARKERS, shortened
from fedexp.figures.style import (
    NAMED_CLASSES,
    colour_bar,
    colour_map,
    fitting,
    fixed_height,
    integers,
    label_size,
    legend,
    legend_columns,
    one_line,
    panels,
    set_panel_title,
    stroke,
    wrapped,
)

LINES = ("-", "--", ":")  # for classes if the style's colours repeat
POINTS: dict[str, Any] = {"markersize": 2.5, "linestyle": "", "alpha": 0.7, "markeredgewidth": 0}
WHOLE = ("round", "local epoch", "number")  # axes with ticks at integers only
FEW = 40  # maximum number of points that are marked
MOST_BARS = 4  # maximum number of lines with bars; those of more methods cover each other
Style = Mapping[str, Any]  # matplotlib's options of a line


def draw_lines(
    title: str,
    lines: Sequence[tuple[pd.DataFrame, Style]],
    x: str = "round",
    ddof: int = 1,
    most_bars: int = MOST_BARS,
    **options: Any,
) -> Figure:
    """Draw a panel for each column of the tables, with one line per table.

    lines: tables and their styles. The index is the position on the axis x. Values at the same
    position are shown by their mean and standard deviation. ddof: 1 for a sample such as seeds, 0
    for all members of a group. most_bars: if there are more lines than this, few points have no
    bars. options: of `Axes.set`.
    """
    names = list(dict.fromkeys(str(name) for table, _ in lines for name in table))
    columns = fitting(len(names), 2.4, between=0.5)
    rows = -(-len(names) // columns)
    figure, places = panels(shortened(title), 0.6 + 2.8 * rows, rows, columns)
    for axes in places.flat[len(names) :]:
        axes.set_axis_off()
    grid = list(places.flat[: len(names)])
    high = (figure.get_figheight() - 1.2) / rows
    for axes, name in zip(grid, names, strict=True):
        shown = [(table[name].dropna(), style) for table, style in lines if name in table]
        for values, style in shown:
            draw_line(axes, values, style, ddof, has_bars=len(shown) <= most_bars)
        words = name if fixed_height() is None else " ".join(name.split())
        axes.set(xlabel=x, ylabel=wrapped(words, high, "axes.labelsize"), **options)
        if x in WHOLE:
            axes.xaxis.set_major_locator(integers(8))
        if name == "cross-entropy" and is_wide(np.concatenate([values for values, _ in shown])):
            axes.set_yscale("log")
    legend(figure, grid)
    return figure


def draw_line(
    axes: Axes, values: pd.Series, style: Style, ddof: int = 1, has_bars: bool = True
) -> None:
    """Draw the mean of the values at each position, with bars or, for many points, a band.

    If the style's line style is empty, all values are drawn as points, and `alpha` may contain the
    opacity of each.
    """
    groups = values.groupby(level=0)
    mean, spread = groups.mean(), groups.std(ddof=ddof)
    if mean.empty:
        return
    is_few, is_cloud = len(mean) <= FEW, style.get("linestyle") == ""
    marker = "o" if is_few or is_cloud else ""
    style = {"marker": marker, "markersize": 3, "linewidth": stroke(0.8), **style}
    if is_cloud:
        (named,) = axes.plot([], [], **style | {"alpha": None})
        colours = to_rgba_array([named.get_color()] * len(values), style.get("alpha"))
        axes.scatter(values.index, values, 9, colours, linewidths=0)
        return
    if is_few and has_bars and groups.size().max() > 1:
        axes.errorbar(mean.index, mean, spread, capsize=2.5, **style)
        return
    (line,) = axes.plot(mean.index, mean, **style)
    ends = (mean - spread, mean + spread)
    if groups.size().max() > 1 and not is_few:
        axes.fill_between(mean.index, *ends, color=line.get_color(), alpha=0.18, linewidth=0)


def draw_maps(
    title: str,
    maps: Mapping[str, np.ndarray],
    label: str,
    height: float,
    columns: int,
    norm: Normalize | None = None,
    colours: Any = None,
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """Draw heat maps with one colour bar, the first row on top.

    maps: title -> values [rows, columns]. label: of the colour bar. height: of a map, in inches.
    norm: by default, values are from 0 to 1. options: of `Axes.set`.
    """
    rows = -(-len(maps) // columns)
    wide = 2.5 * columns + 1.0
    figure, grid = panels(shortened(title), 1.0 + rows * height, rows, columns, wide)
    norm = norm or Normalize(0, 1)
    shown = list(grid.flat[: len(maps)])
    for number, (axes, (name, values)) in enumerate(zip(shown, maps.items(), strict=True)):
        look: dict[str, Any] = {"norm": norm, "cmap": colours or colour_map()}
        axes.imshow(values, aspect="auto", interpolation="nearest", **look)
        axes.grid(False)
        axes.xaxis.set_major_locator(integers(8))
        axes.set(**options)
        if number + columns < len(maps):
            axes.set_xlabel("")  # it is below the last panel of each column
        set_panel_title(axes, name)
    for axes in grid.flat[len(maps) :]:
        axes.set_axis_off()
    every = np.concatenate([values.ravel() for values in maps.values()])
    colour_bar(figure, shown, shown[0].images[0], label, every)
    return figure, shown


def is_wide(values: np.ndarray) -> bool:
    """Return whether values need a logarithmic scale: the largest is over 20 times the smallest."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and 0 < finite.min() < finite.max() / 20


def class_styles(classes: Sequence[str], points: bool = False) -> list[dict[str, Any]]:
    """Return the colour, the line style and the label of each class.

    Colours are taken from the style's cycle or, if there are many classes, from its colour map, and
    then are not in legends. points: whether to return markers instead of line styles.
    """
    many = len(classes) > NAMED_CLASSES
    shades = colormaps[rcParams["image.cmap"]](np.linspace(0, 1, len(classes)))
    found = []
    for index, name in enumerate(one_line(classes)):
        turn, number = divmod(index, len(rcParams["axes.prop_cycle"]))
        turn = 0 if many else turn
        style = POINTS | {"marker": MARKERS[turn]} if points else {"linestyle": LINES[turn]}
        look = {"color": shades[index] if many else f"C{number}", "label": "_" if many else name}
        found.append(style | look)
    return found


def draw_class_legend(figure: Figure, axes: Sequence[Axes], classes: Sequence[str]) -> None:
    """Draw the legend of the classes in the first panel below the panels.

    If there are many classes, draw a colour bar of their indices instead.
    """
    if len(classes) > NAMED_CLASSES:
        scale = ScalarMappable(Normalize(0, len(classes) - 1), rcParams["image.cmap"])
        figure.colorbar(scale, ax=list(axes), pad=0.02, label="class (index)")
        return
    handles, labels = axes[0].get_legend_handles_labels()
    look: dict[str, Any] = {"loc": "outside lower center", "fontsize": label_size()}
    figure.legend(handles, labels, ncols=legend_columns(labels, 10), markerscale=2, **look)
