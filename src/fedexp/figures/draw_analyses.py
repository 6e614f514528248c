"""The pictures of the group `analysis`: one function each, from a table of a run to a matplotlib
Figure."""

from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedexp.figures.load import RunData
from fedexp.figures.style import (
    BLUE,
    GREEN,
    GREY,
    NAMED_CLASSES,
    ORANGE,
    colour_bar,
    entitle,
    integers,
    map_cells,
    map_height,
    round_panel,
    small,
    stroke,
    width,
)
from fedexp.metrics.forgetting import forgetting_degree
from fedexp.metrics.history import History

if TYPE_CHECKING:
    import pandas as pd

TOTAL = "total"
EPOCH_PANELS = {
    "in_local_accuracy": "in-local accuracy",
    "out_local_accuracy": "out-local accuracy",
    "train_accuracy": "accuracy on the client's\ntraining examples",
}
BARS: dict[str, Any] = {"marker": "o", "markersize": 3.5, "capsize": 2.5}


def weight_divergence(run: RunData, table: "pd.DataFrame") -> Figure:
    """Distances of local models against the round, mean and standard deviation over clients (FedNTD
    Fig. 8c), above the part that each layer has in the squared distance from the global model."""
    layers = layers_of(table)
    figure, (above, below) = _panels(run, "Weight divergence after local training", layers)
    total = table[table["layer"] == TOTAL]
    for column, colour, label in (
        ("l1", BLUE, "from the global model"),
        ("others_l1", ORANGE, "from other local models"),
    ):
        spread(above, total, "round", column, {"color": colour, "label": label})
    above.set_ylabel(r"distance, $\ell_1$ norm")
    above.set_ylim(bottom=0)
    round_panel(above, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2)
    squared = table.assign(l2=table["l2"] ** 2).pivot_table(
        index="round", columns="layer", values="l2"
    )
    _layer_map(
        figure,
        below,
        squared[layers].div(squared[TOTAL], axis=0),
        "share of the squared\ndistance",
        1.0,
    )
    above.set_xlim(below.get_xlim())
    return figure


def gradient_diversity(run: RunData, table: "pd.DataFrame") -> Figure:
    """Gradient diversity (FedNTD Eq. 8) against the round, of all layers together and of each."""
    layers = layers_of(table)
    figure, (above, below) = _panels(run, "Gradient diversity of the clients of a round", layers)
    total = table[table["layer"] == TOTAL]
    for column, colour, label in (
        ("gradient_diversity", BLUE, "equal weights"),
        ("weighted_gradient_diversity", GREEN, "weights of the aggregation"),
    ):
        above.plot(
            total["round"], total[column], color=colour, label=label, marker="o", markersize=3.5
        )
    above.set_ylabel("gradient diversity")
    round_panel(above, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2)
    values = table.pivot_table(index="round", columns="layer", values="gradient_diversity")[layers]
    finite = np.append(values.to_numpy()[np.isfinite(values.to_numpy())], 1.0)
    _layer_map(
        figure, below, values, "gradient diversity\nof the layer", float(np.quantile(finite, 0.98))
    )
    above.set_xlim(below.get_xlim())
    return figure


def cka(run: RunData, table: "pd.DataFrame") -> Figure:
    """Linear CKA of the global model's features before and after each measured round."""
    figure = Figure(figsize=(width(), 2.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(table["round"], table["cka"], color=BLUE, marker="o", markersize=3.5)
    axes.set_ylabel("CKA before and\nafter the round")
    axes.set_xlabel("round")
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(integers(12))
    axes.grid(True)
    entitle(figure, f"Similarity of the global model's features\n{run.title}")
    return figure


def accuracy_panel(axes: Axes, title: str, label: str, ticks: int) -> None:
    """Label a panel of accuracies against epochs or rounds."""
    axes.set_title(title)
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(integers(ticks))
    axes.grid(True)


def local_epochs(run: RunData, table: "pd.DataFrame") -> Figure:
    """Accuracy of local models against the local epoch, 0 before training (FedNTD Fig. 6): a line
    for each measured round, at most eight of them, mean and standard deviation over clients."""
    figure = Figure(figsize=(width(), 3.4), layout="constrained")
    panels = figure.subplots(1, len(EPOCH_PANELS))
    rounds = few(sorted(table["round"].unique()), 8)
    colours = matplotlib.colormaps[matplotlib.rcParams["image.cmap"]](
        np.linspace(0.85, 0, len(rounds))
    )
    for axes, (column, label) in zip(panels, EPOCH_PANELS.items(), strict=True):
        for number, colour in zip(rounds, colours, strict=True):
            look = {"color": colour, "label": f"round {number:.0f}"}
            spread(axes, table[table["round"] == number], "epoch", column, look)
        accuracy_panel(axes, label, "local epoch", 8)
    panels[0].set_ylabel("accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    entitle(figure, f"Local models during local training\n{run.title}")
    return figure


def class_reduction(run: RunData, history: History) -> Figure:
    """Forgetting degree of the classes whose examples are reduced within the run (FedKA Eq. 1, Fig.
    3), clipped at -1, above the number of their examples that the client holds. At most six pairs
    of client and class are drawn."""
    figure = Figure(figsize=(width(), 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    every = np.arange(1, max(history.local_rounds) + 1)
    for number, (client, label) in enumerate(run.reduced[:6]):
        colour = f"C{number}"
        name = run.classes[label] if label < len(run.classes) else label
        above.plot(
            *degrees(history, client, label),
            color=colour,
            linewidth=stroke(0.8),
            label=f"class {name}, client {client}",
        )
        held = [history.counts_in(int(n))[client, label] for n in every]
        below.step(every, held, where="mid", color=colour, linewidth=stroke(0.8))
    for axes in (above, below):
        for start in history.starts[1:]:
            axes.axvline(start - 0.5, color=GREY, linewidth=0.8, linestyle=":")
        axes.grid(True)
    above.set_ylabel("forgetting degree\n(clipped at -1)")
    above.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=3, borderaxespad=0)
    below.set_ylabel("training examples")
    below.set_ylim(bottom=0)
    below.set_xlabel("round")
    below.xaxis.set_major_locator(integers(12))
    entitle(figure, f"Forgetting degree of a class whose examples are reduced\n{run.title}")
    return figure


def degrees(history: History, client: int, label: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds in which a client took part, and the forgetting degree of a class in each,
    clipped at -1."""
    rounds, values = [], []
    for index, number in enumerate(history.local_rounds):
        place = np.flatnonzero(history.sampled[index] == client)
        if len(place):
            before, after = (
                history.distributed(number),
                history.local_class_accuracy[index][place[0]],
            )
            rounds.append(number)
            values.append(max(float(forgetting_degree(before, after)[label]), -1.0))
    return np.array(rounds), np.array(values)


PICTURES = {
    "weight_divergence.csv": weight_divergence,
    "gradient_diversity.csv": gradient_diversity,
    "local_epochs.csv": local_epochs,
    "cka.csv": cka,
}


def spread(axes: Axes, table: "pd.DataFrame", key: str, column: str, look: dict[str, Any]) -> None:
    """Draw the mean of a column against a key, with bars of one (population) standard deviation
    over the rows."""
    groups = table.dropna(subset=column).groupby(key)[column]
    if len(mean := groups.mean()):
        axes.errorbar(mean.index, mean, groups.std(ddof=0), linewidth=stroke(0.8), **BARS, **look)


def layers_of(table: "pd.DataFrame") -> list[str]:
    """Return the layers of a table in the order of the model, without the total."""
    return [layer for layer in dict.fromkeys(table["layer"]) if layer != TOTAL]


def few(values: list[float], most: int) -> list[float]:
    """Return at most so many of the values, spread evenly, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _panels(run: RunData, subject: str, layers: list[str]) -> tuple[Figure, tuple[Axes, Axes]]:
    height = map_height(len(layers))
    figure = Figure(figsize=(width(), 3.9 + height), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2.2, height))
    entitle(figure, f"{subject}\n{run.title}")
    return figure, (above, below)


def _layer_map(figure: Figure, axes: Axes, values: "pd.DataFrame", label: str, top: float) -> None:
    """Draw a map layers x rounds; a layer is named where there are few."""
    cells = values.to_numpy()
    image = map_cells(axes, values.index.to_numpy(dtype=float), cells, top)
    colour_bar(figure, axes, image, label, cells)
    axes.set_xlabel("round")
    axes.set_ylabel("layer" if len(values.columns) <= NAMED_CLASSES else "layer (from the input)")
    if len(values.columns) <= NAMED_CLASSES:
        axes.set_yticks(range(len(values.columns)), list(values.columns), fontsize=small())
