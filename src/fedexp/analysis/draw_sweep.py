"""The pictures of a sweep: one function each, from the runs of a setting to a matplotlib Figure."""

import math
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedexp.analysis.measures import is_pruned, less_is_better, main_measures
from fedexp.figures.draw import task_lines
from fedexp.figures.draw_analyses import BARS
from fedexp.figures.style import (
    GREY,
    NAMED_CLASSES,
    class_axis,
    colour_bar,
    integers,
    map_cells,
    map_height,
    say,
    stroke,
    width,
)
from fedexp.figures.style import entitle as write_title
from fedexp.metrics.forgetting import normalised_heat_map
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from fedexp.analysis.sweep_figures import ParameterSweep, Setting

STYLES = ("-", "--", ":", "-.")  # of the second, third, ... eight methods
PER_ROW = 4  # heat maps beside each other
SPREAD = "mean ± standard\ndeviation"


def look(number: int) -> dict[str, Any]:
    """Return colour and line style of the method of this number."""
    colours = len(rcParams["axes.prop_cycle"])
    return {"color": f"C{number % colours}", "linestyle": STYLES[number // colours % len(STYLES)]}


def curves(setting: "Setting") -> Figure:
    """Draw learning curves of the main measures: mean over the seeds of each method, in a band of
    one standard deviation."""
    measures = main_measures(setting.runs)
    figure, panels = panels_of(len(measures), setting.title)
    sizes = {len(method.runs) for method in setting.methods}
    for axes, measure in zip(panels, measures, strict=True):
        for method in setting.methods:
            size = f", n={len(method.runs)}" if len(sizes) > 1 else ""
            curve(axes, *method.curve(measure.column), method.number, f"{method.label}{size}")
        if not axes.lines:
            say(axes, "no round has it")
        else:
            task_lines(setting.methods[0].files[0], axes, GREY)
        axes.set_ylabel(measure.label)
    finish_panels(figure, panels, spread_of(sizes))
    panels[0].set_ylim(bottom=0)
    panels[-1].set_xlabel("round")
    return figure


def spread_of(sizes: Collection[int]) -> str:
    """Return what a legend says of bands and bars; sizes: the different numbers of seeds."""
    if max(sizes) == 1:
        return ""
    return f"{SPREAD}, n={max(sizes)}" if len(sizes) == 1 else SPREAD


def curve(axes: Axes, rounds: np.ndarray, values: np.ndarray, number: int, label: str) -> None:
    """Draw the curve of one method, values [runs, R]."""
    if not rounds.size:
        return
    mean = values.mean(0)
    marker = "o" if rounds.size <= 40 else None
    axes.plot(
        rounds,
        mean,
        **look(number),
        linewidth=stroke(0.8),
        marker=marker,
        markersize=3,
        label=label,
    )
    if len(values) > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(
            rounds,
            mean - spread,
            mean + spread,
            color=look(number)["color"],
            alpha=0.18,
            linewidth=0,
        )


def class_accuracy(setting: "Setting", normalised: bool) -> Figure:
    """Draw heat maps classes x rounds of all methods beside each other, the lowest seed of each;
    one scale for all.

    normalised: every round divided by its sum, up to three times the share of a class in a balanced
    model.
    """
    shown = [
        (method, file, file.history)
        for method in setting.methods
        if (file := method.files[0]).history
    ]
    classes = shown[0][1].classes
    columns = min(len(shown), PER_ROW)
    rows = -(-len(shown) // columns)
    size = (
        max(width(), 2.6 * columns + 1.6),
        0.9 + rows * (0.55 + 0.75 * map_height(len(classes))),
    )
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    top = min(1.0, 3 / len(classes)) if normalised else 1.0
    maps = []
    for axes, (method, file, history) in zip(grid.flat, shown, strict=False):
        assert history is not None
        maps.append(normalised_heat_map(history.matrix) if normalised else history.matrix)
        image = map_cells(axes, np.array(history.rounds), maps[-1], top, ticks=6)
        task_lines(file, axes, "white", cells=True)
        axes.tick_params(labelbottom=True)
        seed = method.runs[0].summary.get("seed")
        axes.set_title(f"{method.name}" + (f", seed {seed}" if len(method.runs) > 1 else ""))
    grid.flat[0].set_ylim(len(classes) - 0.5, -0.5)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        class_axis(
            axes,
            classes if len(classes) <= NAMED_CLASSES else [str(c) for c in range(len(classes))],
        )
    figure.supxlabel("round", fontsize=rcParams["axes.labelsize"])
    end = ", normalised in every round" if normalised else ""
    label = "share of the round's summed accuracy" if normalised else "test accuracy of the class"
    colour_bar(
        figure, list(grid.flat), image, label, np.concatenate([each.ravel() for each in maps])
    )
    entitle(figure, f"Class-wise test accuracy{end}", setting.title)
    return figure


def round_forgetting(settings: "Sequence[Setting]", title: str) -> Figure:
    """Draw cumulative distributions of round forgetting, a column a setting (Flashback Fig. 4): of
    the global model over rounds above and, where local models were evaluated, of these over rounds
    and clients below. Further left is less forgetting."""
    drops = {
        "global model:\nshare of rounds": [
            [method.global_drops() for method in each.methods] for each in settings
        ],
        "local models:\nshare of rounds and clients": [
            [method.local_drops() for method in each.methods] for each in settings
        ],
    }
    kinds = [kind for kind, found in drops.items() if any(v.size for each in found for v in each)]
    size = (max(width(), 2.2 * len(settings) + 2), 0.6 + 2.6 * len(kinds))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(kinds), len(settings), squeeze=False, sharey=True)
    for row, kind in zip(grid, kinds, strict=True):
        row[0].set_ylabel(kind)
        for axes, setting, values in zip(row, settings, drops[kind], strict=True):
            for method, each in zip(setting.methods, values, strict=True):
                if np.isfinite(each).any():
                    style = look(method.number) | {"linewidth": stroke(0.9), "where": "post"}
                    axes.step(*distribution(each), **style, label=method.label)
            axes.set_xlim(left=0)
            axes.set_ylim(0, 1.02)
            axes.grid(True)
            axes.xaxis.set_major_locator(MaxNLocator(4 if len(settings) > 1 else 8))
    for axes, setting in zip(grid[0], settings, strict=True):
        axes.set_title(setting.name if len(settings) > 1 else "")
    for axes in grid[-1]:
        axes.set_xlabel("round forgetting")
    legend(figure, max(grid.flat, key=lambda axes: len(axes.lines)))
    entitle(figure, "Round forgetting", title)
    return figure


def distribution(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the empirical distribution of values [n] as corners [n + 1] of steps: (v_(i), i/n),
    from (v_(1), 0)."""
    ordered = np.sort(values[np.isfinite(values)])
    return np.concatenate([ordered[:1], ordered]), np.arange(len(ordered) + 1) / len(ordered)


def parameter(sweep: "ParameterSweep") -> Figure:
    """Draw the main measures against a parameter (FedNTD Fig. 15 and 16), bars of one standard
    deviation over seeds, a star at the best value; methods that do not have it dotted."""
    groups = [runs for each in sweep.lines for runs in each.points.values()]
    groups += [method.runs for method in sweep.baselines]
    measures = main_measures(run for runs in groups for run in runs)
    figure, panels = panels_of(len(measures), f"{sweep.key}, {sweep.setting}")
    values = sorted({x for each in sweep.lines for x in each.points})
    for axes, measure in zip(panels, measures, strict=True):
        found: list[tuple[float, float]] = []  # (mean, parameter)
        for each in sweep.lines:
            known = {x: mean_and_spread(runs, measure.key) for x, runs in each.points.items()}
            points = {x: stats for x, stats in known.items() if stats}
            if points:
                mean, spread = np.array(list(points.values())).T
                bars = spread if np.isfinite(spread).any() else None
                style = look(each.number) | {"linewidth": stroke(0.8), "label": each.name}
                axes.errorbar(list(points), mean, bars, **style, **BARS)
                found += zip(mean.tolist(), points, strict=True)
        for method in sweep.baselines:
            if stats := mean_and_spread(method.runs, measure.key):
                style = look(method.number) | {"linestyle": ":", "linewidth": stroke(0.8)}
                axes.axhline(stats[0], **style, label=method.label)
        if found:
            best, x = min(found) if less_is_better(measure.key) else max(found)
            axes.plot(x, best, "*", color="black", markersize=9, zorder=3, label="best")
        axes.set_ylabel(measure.label)
        scale_of(axes, values)
    finish_panels(figure, panels, spread_of({len(runs) for runs in groups}), rounds=False)
    panels[-1].set_xlabel(sweep.key)
    return figure


def scale_of(axes: Axes, values: Sequence[float]) -> None:
    """Scale the axis of a parameter, with a tick at each value where they are few."""
    if min(values) > 0 and max(values) >= 10 * min(values):
        axes.set_xscale("log")
    texts = [f"{x:g}" for x in values]
    if len(texts) <= 10 and max(map(len, texts)) <= 6:
        axes.set_xticks(values, texts)
        axes.minorticks_off()


def mean_and_spread(runs: Sequence[RunDirectory], key: str) -> tuple[float, float] | None:
    """Return mean and spread over the seeds that came to their end (nan for a single one); None
    where there is none."""
    every = [run.summary.get(key) for run in runs if not (run.diverged or is_pruned(run))]
    values = [value for value in every if value is not None]
    if not values:
        return None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def panels_of(rows: int, title: str, subject: str = "") -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width(), 0.6 + 2.5 * rows), layout="constrained")
    entitle(figure, subject, title)
    return figure, list(figure.subplots(rows, 1, squeeze=False, sharex=True)[:, 0])


def entitle(figure: Figure, subject: str, title: str) -> None:
    """Write the title, a line each: what is shown, and of which runs."""
    lines = [subject, textwrap.shorten(title, 90, placeholder=" …")]
    write_title(figure, "\n".join(filter(None, lines)))


def legend(figure: Figure, axes: Axes, title: str = "") -> None:
    """Draw the legend of these axes beside all of them: it may be taller than one."""
    if axes.get_legend_handles_labels()[0]:
        handles = axes.get_legend_handles_labels()
        figure.legend(*handles, loc="outside right center", title=title or None)


def finish_panels(
    figure: Figure, panels: Sequence[Axes], title: str = "", rounds: bool = True
) -> None:
    """Draw grids, and one legend beside the panels, since all have the same lines."""
    for axes in panels:
        if rounds:
            axes.xaxis.set_major_locator(integers(12))
        axes.grid(True)
    legend(figure, panels[0], title)
