"""Draw figures of papers from measurements of local models and of parameters, one per setting."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedexp.analysis.draw_sweep import look, panels_of, shortened, spread_of, style_of
from fedexp.analysis.measures import less_is_better, main_measures
from fedexp.analysis.sweep_figures import Method, Setting
from fedexp.core.errors import ConfigError
from fedexp.figures.style import (
    fitting,
    legend,
    panels,
    round_axis,
    set_panel_title,
    set_title,
    stroke,
    tiles,
    width,
)
from fedexp.metrics.forgetting import in_out_joint, in_out_local
from fedexp.metrics.record import Record
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.analyses.draw import BARS, TOTAL, accuracy_panel, epochs
from fedexp_papers.analyses.local_epochs import LocalEpochs
from fedexp_papers.analyses.weight_divergence import WeightDivergence

MOST = 4  # maximum number of methods that get a panel
DISTANCE = r"weight divergence, $\ell_1$ norm"
MISFIT = "distance of distributions"
SIDES = ("in", "out")


def measured(setting: Setting, name: str) -> list[tuple[Method, pd.DataFrame]]:
    """Return (method, analysis table of all its runs) for each method that has the table.

    Raises ConfigError if no method has it.
    """
    found = []
    for method in setting.methods:
        tables = [table for run in method.runs if (table := run.read_table(name)) is not None]
        if any(map(len, tables)):
            found.append((method, pd.concat(tables)))
    if not found:
        raise ConfigError(f"{setting.name}: no run has the table {name}")
    return found


def local_epochs(setting: Setting) -> Figure:
    """Draw accuracy against the local epoch in the last measured round (FedNTD Fig. 6).

    Epoch 0 is the state before local training. Bars show the mean and the standard deviation over
    clients and seeds.
    """
    series, last = [], 0
    for method, table in measured(setting, LocalEpochs.file):
        last = int(table["round"].max())
        style = look(method.number) | {"label": method.label}
        series.append((table[table["round"] == last], style))
    return epochs(series, f"Local training in round {last}\n{shortened(setting.title)}")


def local_training(setting: Setting) -> Figure:
    """Draw the accuracies of local and global models against the round (FedNTD Fig. 11, 12).

    Local models are evaluated after local training, both on their clients' training examples and on
    their clients' own class distributions.
    """
    title = f"Local models after training, and the global model\n{shortened(setting.title)}"
    figure, every = tiles(title, 3.4, 3, 2.0, sharey=True)
    titles = {
        "train_accuracy": "local training examples",
        "in_local_accuracy": "own distribution (in-local)",
    }
    for method, table in measured(setting, LocalEpochs.file):
        last = table.groupby(["round", "client"])["epoch"].transform("max")
        means = table[table["epoch"] == last].groupby("round").mean(numeric_only=True)
        for axes, column in zip(every, titles, strict=False):
            axes.plot(means.index, means[column], marker="o", markersize=3, **style_of(method))
    for method in setting.methods:
        rounds, values = method.curve("test_accuracy")
        every[2].plot(rounds, values.mean(0), **style_of(method))
    for axes, name in zip(every, [*titles.values(), "global model, test set"], strict=True):
        accuracy_panel(axes, name, "round", 6)
        axes.set_ylabel("accuracy")
        axes.label_outer(remove_inner_ticks=False)
    legend(figure, every[2])
    return figure


def weight_divergence(setting: Setting) -> Figure:
    """Draw weight divergence against the distance between distributions (FedNTD Fig. 8).

    Weight divergence is the distance between a local model and the global model. The distance
    between distributions compares the global model's class accuracies with the client's labels.
    Points from later rounds are darker. The lower panels show both distances against the round.
    """
    tables = measured(setting, WeightDivergence.file)
    found = [(method, table[table["layer"] == TOTAL]) for method, table in tables]
    shown = found[:MOST]
    columns = fitting(len(shown), 1.6)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(width(), 2.8 + 2.6 * rows), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.1 * rows, 1)).flat
    clouds = above.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    curves = below.subplots(1, 2)
    for axes, (method, total) in zip(clouds.flat, shown, strict=False):
        cloud(axes, total, look(method.number)["color"], method.label)
    for axes in clouds.flat[len(shown) :]:
        axes.set_axis_off()
    for axes in clouds[:, 0]:
        axes.set_ylabel(DISTANCE)
    names = {"l1": DISTANCE, "distribution_distance": MISFIT}
    for axes, (column, label) in zip(curves, names.items(), strict=True):
        for method, total in found:
            mean = total.groupby("round")[column].mean().dropna()
            axes.plot(mean.index, mean, marker="o", markersize=3, **style_of(method))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        round_axis(axes, 8)
    legend(below, curves[0])
    set_title(
        figure, f"Weight divergence and distance of distributions\n{shortened(setting.title)}"
    )
    return figure


def cloud(axes: Axes, total: pd.DataFrame, colour: str, label: str) -> None:
    """Draw one point per client and round, with Pearson's correlation in the title."""
    known = total[np.isfinite(total["l1"]) & np.isfinite(total["distribution_distance"])]
    late = known["round"] / max(known["round"].max(), 1)
    look: dict[str, Any] = {"c": colour, "alpha": 0.1 + 0.8 * late, "s": 9, "linewidth": 0}
    axes.scatter(known["distribution_distance"], known["l1"], **look)
    correlation = known["distribution_distance"].corr(known["l1"])
    known_too = "" if np.isnan(correlation) else f": correlation {correlation:.2f}"
    set_panel_title(axes, f"{label}{known_too}")
    axes.set_xlabel(MISFIT)


def in_out_local_accuracy(setting: Setting) -> Figure:
    """Draw in-local and out-local accuracy against the round (FedNTD Fig. 4).

    The global model from before and after each round is evaluated on the joint distribution of the
    round's clients. Local models are shown by their mean and standard deviation.
    """
    every = [(method, method.files[0].record) for method in setting.methods]
    shown = [(method, record) for method, record in every if record and record.local_rounds]
    shown = shown[:MOST]
    if not shown:
        raise ConfigError(f"{setting.name}: no run has accuracies of local models")
    title = f"Accuracy before and after local training\n{shortened(setting.title)}"
    height = 1.0 + 2.6 * len(shown)
    figure, grid = panels(title, height, len(shown), 2, sharex=True, sharey=True)
    for row, (method, record) in zip(grid, shown, strict=True):
        values = before_and_after(record)
        for axes, side in zip(row, SIDES, strict=True):
            draw_side(axes, values, side, look(method.number)["color"])
            set_panel_title(axes, f"{method.label}: {side}-local distribution")
        row[0].set_ylabel("accuracy")
    for axes in grid[-1]:
        round_axis(axes, 8)
    legend(figure, grid[0, 0])
    return figure


def before_and_after(record: Record) -> pd.DataFrame:
    """Return the series of FedNTD Fig. 4, with one row for each round that has local models.

    The columns `<side> before` and `<side> after` are accuracies of the global model on the joint
    distribution of the round's clients. The columns `<side> local` and `<side> spread` are the mean
    and standard deviation of the local models' accuracies. A side is `in` or `out`.
    """
    rows = []
    for index, number in enumerate(record.local_rounds):
        counts, local = record.sampled_counts(index), record.local_class_accuracy[index]
        before = in_out_joint(record.distributed(number), counts)
        after = in_out_joint(record.class_accuracy[record.rounds.index(number)], counts)
        row: dict[str, float] = {}
        for i, (side, own) in enumerate(zip(SIDES, in_out_local(local, counts), strict=True)):
            row |= {f"{side} before": before[i], f"{side} after": after[i]}
            row |= {f"{side} local": own.mean(), f"{side} spread": own.std()}
        rows.append(row)
    return pd.DataFrame(rows, index=record.local_rounds)


def draw_side(axes: Axes, values: pd.DataFrame, side: str, colour: str) -> None:
    """Draw the three series of a side in the colour of the method."""
    style: dict[str, Any] = {"color": colour, "linewidth": stroke(0.7)}
    rounds, mean, spread = values.index, values[f"{side} local"], values[f"{side} spread"]
    for name, dashes in (("before", ":"), ("after", "--")):
        label = f"global model {name}"
        axes.plot(rounds, values[f"{side} {name}"], linestyle=dashes, label=label, **style)
    axes.plot(rounds, mean, label="local models", **style)
    axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    axes.set_ylim(0, 1.03)


def parameter(setting: Setting, key: str) -> Figure:
    """Draw the main measures against a parameter (FedNTD Fig. 15 and 16).

    Bars show one standard deviation over seeds, and a star marks the best value. Methods that do
    not have the parameter are shown as dotted lines.
    """
    points: dict[float, list[RunDirectory]] = {}
    for run in setting.runs:
        for text in run.overrides:
            if text.startswith(f"{key}="):
                points.setdefault(float(text.partition("=")[2]), []).append(run)
    if len(points) < 2:
        raise ConfigError(f"{setting.name}: {key} has fewer than two values")
    values = sorted(points)
    algorithms = {run.summary["algorithm"] for runs in points.values() for run in runs}
    baselines = [m for m in setting.methods if m.runs[0].summary["algorithm"] not in algorithms]
    measures = main_measures(setting.runs)
    figure, grid = panels_of(f"{key}, {setting.title}", len(measures))
    for axes, measure in zip(grid, measures, strict=True):
        found = [mean_and_spread(points[value], measure.key) for value in values]
        mean, spread = np.array(found).T
        bars = None if np.isnan(spread).all() else spread
        axes.errorbar(values, mean, bars, label=" and ".join(sorted(algorithms)), **BARS)
        for method in baselines:
            style = style_of(method) | {"linestyle": ":"}
            axes.axhline(mean_and_spread(method.runs, measure.key)[0], **style)
        best = int(np.nanargmin(mean) if less_is_better(measure.key) else np.nanargmax(mean))
        star: dict[str, Any] = {"color": "black", "markersize": 9, "zorder": 3}
        axes.plot(values[best], mean[best], "*", **star, label="best")
        axes.set_ylabel(measure.label)
        if min(values) > 0 and max(values) >= 10 * min(values):
            axes.set_xscale("log")
        axes.set_xticks(values, [f"{x:g}" for x in values])
        axes.minorticks_off()
    grid[-1].set_xlabel(key)
    legend(figure, grid[0], spread_of({len(runs) for runs in points.values()}))
    return figure


def mean_and_spread(runs: Iterable[RunDirectory], key: str) -> tuple[float, float]:
    """Return the mean and standard deviation over seeds.

    Runs that diverged are left out. The standard deviation is nan for a single seed,
    and both numbers are nan if no seed has a value.
    """
    sound = [run.summary.get(key) for run in runs if not run.diverged]
    values = pd.Series(sound, dtype=float)
    return float(values.mean()), float(values.std())


OF_SETTING: dict[
    str, Callable[..., Figure]
] = {  # kind of a figure -> function that draws it for one setting
    "local_epochs": local_epochs,
    "local_training": local_training,
    "weight_divergence": weight_divergence,
    "in_out_local": in_out_local_accuracy,
    "parameter": parameter,
}
