"""Draw the figures of a sweep. Each function takes the runs of a setting and returns a Figure."""

import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedexp.analysis.measures import less_is_better, main_measures
from fedexp.analysis.naming import DATA
from fedexp.figures.draw import class_maps, task_lines
from fedexp.figures.draw_analyses import BARS
from fedexp.figures.style import GREY, legend, panels, round_axis, stroke, write_note
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from fedexp.analysis.sweep_figures import Method, ParameterSweep, Setting

STYLES = ("-", "--", ":", "-.")  # the next style is used once all colours have been used
SPREAD = "mean ± standard\ndeviation"


def pictures(setting: "Setting") -> "Iterator[tuple[str, Callable[[Setting], Figure]]]":
    """Yield (name, function that draws the figure) for each figure whose data the runs contain."""
    yield "curves", curves
    if any(method.files[0].record for method in setting.methods):
        yield "class_accuracy", partial(class_accuracy, normalised=False)
        yield "class_accuracy_normalised", partial(class_accuracy, normalised=True)
    if any(method.global_drops().size for method in setting.methods):
        yield "round_forgetting", lambda setting: round_forgetting([setting], setting.title)


def style_of(method: "Method", width: float = 0.8) -> dict[str, Any]:
    """Return a method's colour, line style and label. width: a fraction of the usual line width."""
    return look(method.number) | {"linewidth": stroke(width), "label": method.label}


def look(number: int) -> dict[str, Any]:
    """Return the colour and line style for a method's number."""
    colours = len(rcParams["axes.prop_cycle"])
    return {"color": f"C{number % colours}", "linestyle": STYLES[number // colours % len(STYLES)]}


def curves(setting: "Setting") -> Figure:
    """Draw learning curves of the main measures.

    Each curve is a method's mean over seeds, in a band of one standard deviation.
    """
    measures = main_measures(setting.runs)
    figure, grid = panels_of(setting.title, len(measures))
    sizes = {len(method.runs) for method in setting.methods}
    for axes, measure in zip(grid, measures, strict=True):
        for method in setting.methods:
            size = f", n={len(method.runs)}" if len(sizes) > 1 else ""
            curve(axes, *method.curve(measure.column), method.number, f"{method.label}{size}")
        if axes.lines:
            task_lines(setting.methods[0].files[0], axes, GREY)
        else:
            write_note(axes, "no values")
        axes.set_ylabel(measure.label)
    grid[0].set_ylim(bottom=0)
    round_axis(grid[-1])
    legend(figure, grid[0], spread_of(sizes))
    return figure


def spread_of(sizes: Collection[int]) -> str:
    """Return the legend text for bands and bars. sizes: the numbers of seeds that occur."""
    if max(sizes) == 1:
        return ""
    return f"{SPREAD}, n={max(sizes)}" if len(sizes) == 1 else SPREAD


def curves_of(
    title: str, label: str, series: "Iterable[tuple[Method, np.ndarray, np.ndarray]]"
) -> Figure:
    """Draw methods' curves in one panel. series: tuples (method, rounds [R], values [runs, R])."""
    figure, (axes,) = panels_of(title)
    for method, rounds, values in series:
        curve(axes, rounds, values, method.number, method.name)
    axes.set_ylabel(label)
    round_axis(axes, 8)
    legend(figure, axes)
    return figure


def curve(axes: Axes, rounds: np.ndarray, values: np.ndarray, number: int, label: str) -> None:
    """Draw the curve of one method. values: float [runs, R]."""
    if not rounds.size:
        return
    mean, marker = values.mean(0), "o" if rounds.size <= 40 else None
    style = look(number) | {"linewidth": stroke(0.8), "marker": marker, "markersize": 3}
    axes.plot(rounds, mean, **style, label=label)
    if len(values) > 1:
        spread, colour = values.std(0, ddof=1), style["color"]
        axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)


def class_accuracy(setting: "Setting", normalised: bool) -> Figure:
    """Draw the heat maps (classes x rounds) of all methods side by side.

    Each method is shown by its run with the lowest seed.
    """
    shown = []
    for method in setting.methods:
        seed = f", seed {method.runs[0].summary.get('seed')}" if len(method.runs) > 1 else ""
        if record := method.files[0].record:
            shown.append((f"{method.name}{seed}", method.files[0], record))
    return class_maps(shown, shortened(setting.title), normalised)


def round_forgetting(settings: "Sequence[Setting]", title: str) -> Figure:
    """Draw distributions of round forgetting, with one column per setting (Flashback Fig. 4).

    The distributions are cumulative. The upper row shows the global model's values over all rounds.
    If local models were evaluated, the lower row shows their values over all rounds and clients.
    Curves further to the left mean less forgetting.
    """
    kinds = {"global_drops": "global model:\nshare of rounds"}
    if any(method.local_drops().size for setting in settings for method in setting.methods):
        kinds["local_drops"] = "local models:\nshare of rounds and clients"
    size, wide = 0.6 + 2.6 * len(kinds), 2.2 * len(settings) + 2 if len(settings) > 1 else 0
    text = f"Round forgetting\n{shortened(title)}"
    figure, grid = panels(text, size, len(kinds), len(settings), wide, sharey=True)
    for row, (kind, label) in zip(grid, kinds.items(), strict=True):
        row[0].set_ylabel(label)
        for axes, setting in zip(row, settings, strict=True):
            for method in setting.methods:
                drops = getattr(method, kind)()
                if (known := drops[np.isfinite(drops)]).size:
                    axes.ecdf(known, **style_of(method, 0.9))
            axes.set_xlim(left=0)
            axes.set_ylim(0, 1.02)
            axes.xaxis.set_major_locator(MaxNLocator(4 if len(settings) > 1 else 8))
    for axes, setting in zip(grid[0], settings, strict=True):
        axes.set_title(setting.name if len(settings) > 1 else "")
    for axes in grid[-1]:
        axes.set_xlabel("round forgetting")
    legend(figure, max(grid.flat, key=lambda axes: len(axes.lines)))
    return figure


def parameter(sweep: "ParameterSweep") -> Figure:
    """Draw the main measures against a parameter (FedNTD Fig. 15 and 16).

    Bars show one standard deviation over seeds, and a star marks the best value. Methods that do
    not have the parameter are shown as dotted lines.
    """
    lines = [(method, sweep.points(method)) for method in sweep.lines]
    values = sorted({x for _, points in lines for x in points})
    runs = [run for method in (*sweep.lines, *sweep.baselines) for run in method.runs]
    measures = main_measures(runs)
    figure, grid = panels_of(f"{sweep.key}, {sweep.setting}", len(measures))
    for axes, measure in zip(grid, measures, strict=True):
        means = []
        for method, points in lines:
            found = [mean_and_spread(runs, measure.key) for runs in points.values()]
            table = pd.DataFrame(found, list(points), ["mean", "std"]).dropna(how="all")
            bars = table["std"] if table["std"].notna().any() else None
            style = style_of(method) | {"label": method.name} | BARS
            axes.errorbar(table.index, table["mean"], bars, **style)
            means.append(table["mean"])
        for method in sweep.baselines:
            mean, _ = mean_and_spread(method.runs, measure.key)
            axes.axhline(mean, **style_of(method) | {"linestyle": ":"})
        every = pd.concat(means)
        # values of an option of the data are different problems, so none is the best
        if len(every) and sweep.key.partition(".")[0] not in DATA:
            best = int(every.argmin() if less_is_better(measure.key) else every.argmax())
            look: dict[str, Any] = {"color": "black", "markersize": 9, "zorder": 3}
            axes.plot(every.index[best], every.iloc[best], "*", **look, label="best")
        axes.set_ylabel(measure.label)
        scale_parameter(axes, values)
    grid[-1].set_xlabel(sweep.key)
    sizes = {len(runs) for _, points in lines for runs in points.values()}
    sizes |= {len(method.runs) for method in sweep.baselines}
    legend(figure, grid[0], spread_of(sizes))
    return figure


def scale_parameter(axes: Axes, values: Sequence[float]) -> None:
    """Scale the axis of a parameter, with a tick at each value if it has few values."""
    if min(values) > 0 and max(values) >= 10 * min(values):
        axes.set_xscale("log")
    if len(values) <= 10:
        axes.set_xticks(values, [f"{x:g}" for x in values], minor=False)
        axes.minorticks_off()


def mean_and_spread(runs: Sequence[RunDirectory], key: str) -> tuple[float, float]:
    """Return the mean and standard deviation over seeds.

    Runs that diverged are left out. The standard deviation is nan for a single seed,
    and both numbers are nan if no seed has a value.
    """
    sound = [run.summary.get(key) for run in runs if not run.diverged]
    values = pd.Series(sound, dtype=float)
    return float(values.mean()), float(values.std())


def panels_of(title: str, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, one below the other. Long title lines are shortened."""
    height = 0.6 + 2.5 * rows if rows > 1 else 3.7
    figure, grid = panels(shortened(title), height, rows, sharex=True)
    return figure, list(grid[:, 0])


def shortened(title: str) -> str:
    """Shorten each line of a title to at most 90 characters."""
    return "\n".join(textwrap.shorten(line, 90, placeholder=" …") for line in title.split("\n"))
