"""The pictures of a sweep: one function each, from the runs of a setting to a matplotlib Figure."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedexp.figures.style import (
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
# Columns of rounds.csv, each with its label: of a run, and of one in continual learning (CFeD Fig.
# 3).
CURVES = {"test_accuracy": "test accuracy", "forgetting": "forgetting F (BwT)"}
TASK_CURVES = {
    "average_accuracy": "average accuracy on\nthe learned tasks",
    "new_task_accuracy": "new-task accuracy",
}
RESULTS = {"accuracy": "test accuracy, last round", "forgetting": "forgetting F (BwT)"}


def look(number: int) -> dict[str, Any]:
    """Return colour and line style of the method of this number."""
    colours = len(rcParams["axes.prop_cycle"])
    return {"color": f"C{number % colours}", "linestyle": STYLES[number // colours % len(STYLES)]}


def curves(setting: "Setting") -> Figure:
    """Draw learning curves: mean over the seeds of each method, in a band of one standard
    deviation."""
    columns = TASK_CURVES if setting.with_tasks else CURVES
    figure, panels = two_panels(
        "Learning curves: mean ± standard deviation over seeds", setting.title
    )
    tested = any(file.has("test_accuracy") for method in setting.methods for file in method.files)
    for axes, (column, name) in zip(panels, columns.items(), strict=True):
        label = name if tested else name.replace("test", "validation")
        for number, method in enumerate(setting.methods):
            curve(axes, *method.curve(column), number, f"{method.label}, n={len(method.runs)}")
        if not axes.lines:
            say(axes, "no round has it")
        axes.set_ylabel(label)
    finish_panels(figure, panels)
    panels[0].set_ylim(bottom=0)
    panels[-1].set_xlabel("round")
    panels[0].sharex(panels[-1])
    return figure


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
    for axes, (method, _, history) in zip(grid.flat, shown, strict=False):
        assert history is not None
        maps.append(normalised_heat_map(history.matrix) if normalised else history.matrix)
        image = map_cells(axes, np.array(history.rounds), maps[-1], top, ticks=6)
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
    kind = "normalised in every round" if normalised else "of the global model"
    label = "share of the round's summed accuracy" if normalised else "test accuracy of the class"
    colour_bar(
        figure, list(grid.flat), image, label, np.concatenate([each.ravel() for each in maps])
    )
    entitle(figure, f"Class-wise test accuracy, {kind}", setting.title)
    return figure


def round_forgetting(setting: "Setting") -> Figure:
    """Draw cumulative distributions of round forgetting (Flashback Fig. 4): of the global model
    over rounds and, where local models were evaluated, of these over rounds and clients. Further
    left is less forgetting."""
    drops = {
        "global": [method.global_drops() for method in setting.methods],
        "local": [method.local_drops() for method in setting.methods],
    }
    drops = {kind: values for kind, values in drops.items() if any(each.size for each in values)}
    figure = Figure(figsize=(width(), 3.6 if len(drops) == 1 else 3.9), layout="constrained")
    panels = figure.subplots(1, len(drops), squeeze=False)[0]
    for axes, (kind, values) in zip(panels, drops.items(), strict=True):
        for number, (method, each) in enumerate(zip(setting.methods, values, strict=True)):
            if each.size:
                axes.step(
                    *distribution(each),
                    where="post",
                    **look(number),
                    linewidth=stroke(0.9),
                    label=method.label,
                )
        over = "rounds" if kind == "global" else "rounds and clients"
        axes.set_xlabel(f"{kind} round forgetting")
        axes.set_ylabel(f"share of {over}")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
        axes.grid(True)
    legend(figure, max(panels, key=lambda axes: len(axes.lines)))
    entitle(figure, "Round forgetting, cumulative distribution", setting.title)
    return figure


def distribution(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the empirical distribution of values [n] as corners [n + 1] of steps: (v_(i), i/n),
    from (v_(1), 0)."""
    ordered = np.sort(values[np.isfinite(values)])
    return np.concatenate([ordered[:1], ordered]), np.arange(len(ordered) + 1) / len(ordered)


def parameter(sweep: "ParameterSweep") -> Figure:
    """Draw accuracy and forgetting against a parameter (FedNTD Fig. 15 and 16), bars of one
    standard deviation over seeds; methods that do not have it dotted."""
    name = sweep.key.rpartition(".")[2]
    figure, panels = two_panels(f"{name}: mean ± standard deviation over seeds", sweep.setting)
    values = sorted({x for each in sweep.lines for x in each.points})
    for axes, (key, label) in zip(panels, RESULTS.items(), strict=True):
        for number, each in enumerate(sweep.lines):
            points = {
                x: stats for x, runs in each.points.items() if (stats := mean_and_spread(runs, key))
            }
            if points:
                mean, spread = np.array(list(points.values())).T
                style = look(number) | {
                    "marker": "o",
                    "markersize": 4,
                    "capsize": 3,
                    "linewidth": stroke(0.8),
                }
                axes.errorbar(list(points), mean, spread, label=each.name, **style)
        for number, method in enumerate(sweep.baselines, len(sweep.lines)):
            if stats := mean_and_spread(method.runs, key):
                colour = look(number)["color"]
                axes.axhline(
                    stats[0], color=colour, linestyle=":", linewidth=stroke(0.8), label=method.label
                )
        axes.set_ylabel(label)
        if min(values) > 0 and max(values) >= 10 * min(values):
            axes.set_xscale("log")
        axes.set_xticks(values, [f"{x:g}" for x in values])
        axes.minorticks_off()
    finish_panels(figure, panels, rounds=False)
    panels[-1].set_xlabel(sweep.key)
    return figure


def mean_and_spread(runs: Sequence[RunDirectory], key: str) -> tuple[float, float] | None:
    """Return mean and spread over the seeds that did not diverge; None where there is none."""
    values = [
        run.summary[key] for run in runs if not run.diverged and run.summary.get(key) is not None
    ]
    if not values:
        return None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def two_panels(subject: str, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width(), 5.6), layout="constrained")
    entitle(figure, subject, title)
    return figure, list(figure.subplots(2, 1))


def entitle(figure: Figure, subject: str, title: str) -> None:
    """Write the title: what is shown, and of which runs."""
    write_title(figure, "\n".join([subject, *textwrap.wrap(title, 80)]))


def legend(figure: Figure, axes: Axes) -> None:
    """Draw the legend of these axes beside all of them: it may be taller than one."""
    if axes.get_legend_handles_labels()[0]:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")


def finish_panels(figure: Figure, panels: Sequence[Axes], rounds: bool = True) -> None:
    """Draw grids, and one legend beside the first panel, since both panels have the same lines."""
    for axes in panels:
        if rounds:
            axes.xaxis.set_major_locator(integers(12))
        axes.grid(True)
    legend(figure, panels[0])
