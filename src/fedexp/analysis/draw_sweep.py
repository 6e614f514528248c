"""Draw the pictures of a sweep. Each function takes the runs of a setting and returns a matplotlib
Figure."""

import math
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedexp.analysis.measures import is_pruned, less_is_better, main_measures
from fedexp.figures.draw import class_maps, task_lines
from fedexp.figures.draw_analyses import BARS
from fedexp.figures.style import GREY, legend, panels, round_axis, say, stroke
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from fedexp.analysis.sweep_figures import Method, ParameterSweep, Setting

STYLES = ("-", "--", ":", "-.")  # the next one is used when all colours are used up
SPREAD = "mean ± standard\ndeviation"


def look(number: int) -> dict[str, Any]:
    """Return the colour and line style of the method with this number."""
    colours = len(rcParams["axes.prop_cycle"])
    return {"color": f"C{number % colours}", "linestyle": STYLES[number // colours % len(STYLES)]}


def curves(setting: "Setting") -> Figure:
    """Draw learning curves of the main measures.

    A curve is a method's mean over seeds, in a band of one standard deviation.
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
            say(axes, "no round has it")
        axes.set_ylabel(measure.label)
    grid[0].set_ylim(bottom=0)
    round_axis(grid[-1])
    legend(figure, grid[0], spread_of(sizes))
    return figure


def spread_of(sizes: Collection[int]) -> str:
    """Return the legend's text about bands and bars. sizes: the different numbers of seeds."""
    if max(sizes) == 1:
        return ""
    return f"{SPREAD}, n={max(sizes)}" if len(sizes) == 1 else SPREAD


def curves_of(
    title: str, label: str, series: "Iterable[tuple[Method, np.ndarray, np.ndarray]]"
) -> Figure:
    """Draw the curves (method, rounds [R], values [runs, R]) in one panel."""
    figure, (axes,) = panels_of(title)
    for method, rounds, values in series:
        curve(axes, rounds, values, method.number, method.name)
    axes.set_ylabel(label)
    round_axis(axes, 8)
    legend(figure, axes)
    return figure


def curve(axes: Axes, rounds: np.ndarray, values: np.ndarray, number: int, label: str) -> None:
    """Draw one method's curve. values: [runs, R]."""
    if not rounds.size:
        return
    mean, marker = values.mean(0), "o" if rounds.size <= 40 else None
    style = look(number) | {"linewidth": stroke(0.8), "marker": marker, "markersize": 3}
    axes.plot(rounds, mean, **style, label=label)
    if len(values) > 1:
        spread, colour = values.std(0, ddof=1), style["color"]
        axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)


def class_accuracy(setting: "Setting", normalised: bool) -> Figure:
    """Draw the heat maps (classes x rounds) of all methods side by side, each from the run with the
    lowest seed."""
    shown = []
    for method in setting.methods:
        seed = f", seed {method.runs[0].summary.get('seed')}" if len(method.runs) > 1 else ""
        if history := method.files[0].history:
            shown.append((f"{method.name}{seed}", method.files[0], history))
    return class_maps(shown, shortened(setting.title), normalised)


def round_forgetting(settings: "Sequence[Setting]", title: str) -> Figure:
    """Draw cumulative distributions of round forgetting, one column per setting (Flashback Fig. 4).

    The upper row shows the global model's values over rounds. If local models were evaluated, the
    lower row shows their values over rounds and clients. A curve further to the left means less
    forgetting.
    """
    kinds = {"global_drops": "global model:\nshare of rounds"}
    if any(method.local_drops().size for setting in settings for method in setting.methods):
        kinds["local_drops"] = "local models:\nshare of rounds and clients"
    size, wide = 0.6 + 2.6 * len(kinds), 2.2 * len(settings) + 2
    text = f"Round forgetting\n{shortened(title)}"
    figure, grid = panels(text, size, len(kinds), len(settings), wide, sharey=True)
    for row, (kind, label) in zip(grid, kinds.items(), strict=True):
        row[0].set_ylabel(label)
        for axes, setting in zip(row, settings, strict=True):
            for method in setting.methods:
                drops = getattr(method, kind)()
                if np.isfinite(drops).any():
                    style = look(method.number) | {"linewidth": stroke(0.9), "where": "post"}
                    axes.step(*distribution(drops), **style, label=method.label)
            axes.set_xlim(left=0)
            axes.set_ylim(0, 1.02)
            axes.xaxis.set_major_locator(MaxNLocator(4 if len(settings) > 1 else 8))
    for axes, setting in zip(grid[0], settings, strict=True):
        axes.set_title(setting.name if len(settings) > 1 else "")
    for axes in grid[-1]:
        axes.set_xlabel("round forgetting")
    legend(figure, max(grid.flat, key=lambda axes: len(axes.lines)))
    return figure


def distribution(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the empirical distribution of values [n] as the corners [n + 1] of steps.

    The corners are (v_(1), 0), then (v_(i), i/n).
    """
    ordered = np.sort(values[np.isfinite(values)])
    return np.concatenate([ordered[:1], ordered]), np.arange(len(ordered) + 1) / len(ordered)


def parameter(sweep: "ParameterSweep") -> Figure:
    """Draw the main measures against a parameter (FedNTD Fig. 15 and 16).

    Bars show one standard deviation over seeds, and a star marks the best value. Methods without
    the parameter are dotted lines.
    """
    groups = [runs for _, points in sweep.lines for runs in points.values()]
    groups += [method.runs for method in sweep.baselines]
    measures = main_measures(run for runs in groups for run in runs)
    figure, grid = panels_of(f"{sweep.key}, {sweep.setting}", len(measures))
    values = sorted({x for _, points in sweep.lines for x in points})
    for axes, measure in zip(grid, measures, strict=True):
        found: list[tuple[float, float]] = []  # (mean, parameter)
        for method, points in sweep.lines:
            every = {x: mean_and_spread(runs, measure.key) for x, runs in points.items()}
            known = {x: stats for x, stats in every.items() if stats}
            if known:
                mean, spread = np.array(list(known.values())).T
                bars = spread if np.isfinite(spread).any() else None
                style = look(method.number) | {"linewidth": stroke(0.8), "label": method.name}
                axes.errorbar(list(known), mean, bars, **style, **BARS)
                found += zip(mean.tolist(), known, strict=True)
        for method in sweep.baselines:
            if stats := mean_and_spread(method.runs, measure.key):
                style = look(method.number) | {"linestyle": ":", "linewidth": stroke(0.8)}
                axes.axhline(stats[0], **style, label=method.label)
        if found:
            best, x = min(found) if less_is_better(measure.key) else max(found)
            axes.plot(x, best, "*", color="black", markersize=9, zorder=3, label="best")
        axes.set_ylabel(measure.label)
        scale_of(axes, values)
    grid[-1].set_xlabel(sweep.key)
    legend(figure, grid[0], spread_of({len(runs) for runs in groups}))
    return figure


def scale_of(axes: Axes, values: Sequence[float]) -> None:
    """Scale the axis of a parameter, with a tick at each value if there are few."""
    if min(values) > 0 and max(values) >= 10 * min(values):
        axes.set_xscale("log")
    texts = [f"{x:g}" for x in values]
    if len(texts) <= 10 and max(map(len, texts)) <= 6:
        axes.set_xticks(values, texts)
        axes.minorticks_off()


def mean_and_spread(runs: Sequence[RunDirectory], key: str) -> tuple[float, float] | None:
    """Return mean and standard deviation over the seeds that neither diverged nor were pruned.

    The standard deviation is nan for a single seed. Return None if no seed has a value.
    """
    every = [run.summary.get(key) for run in runs if not (run.diverged or is_pruned(run))]
    values = [value for value in every if value is not None]
    if not values:
        return None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def panels_of(title: str, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure with one column of panels, and its title in short lines."""
    height = 0.6 + 2.5 * rows if rows > 1 else 3.7
    figure, grid = panels(shortened(title), height, rows, sharex=True)
    return figure, list(grid[:, 0])


def shortened(title: str) -> str:
    """Shorten each line of a title to at most 90 characters."""
    return "\n".join(textwrap.shorten(line, 90, placeholder=" …") for line in title.split("\n"))
