"""Draw the figures of the analyses. Each function takes a run and one of its tables."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedexp.figures.load import RunData
from fedexp.figures.style import (
    BLUE,
    GREEN,
    NAMED_CLASSES,
    ORANGE,
    colour_bar,
    integers,
    legend,
    legend_above,
    map_cells,
    map_height,
    panels,
    round_axis,
    set_panel_title,
    stroke,
    tiles,
)

if TYPE_CHECKING:
    import pandas as pd

TOTAL = "total"
EPOCH_PANELS = {
    "in_local_accuracy": "in-local accuracy",
    "out_local_accuracy": "out-local accuracy",
    "train_accuracy": "accuracy on the client's training examples",
}
BARS: dict[str, Any] = {"marker": "o", "markersize": 3.5, "capsize": 2.5}
Epochs = Sequence[tuple["pd.DataFrame", Mapping[str, Any]]]


def weight_divergence(run: RunData, table: "pd.DataFrame") -> Figure:
    """Draw the distances of local models against the round (FedNTD Fig. 8c).

    The distances are from the global model and from other local models. Bars show the mean and the
    standard deviation over clients. The lower panel shows the share of each layer in the squared
    distance from the global model.
    """
    total = table[table["layer"] == TOTAL]
    squared = table.assign(l2=table["l2"] ** 2).pivot_table(
        index="round", columns="layer", values="l2"
    )
    shares = squared[layers_of(table)].div(squared[TOTAL], axis=0)
    label = "share of the squared\ndistance"
    subject = "Weight divergence after local training"
    figure, above = layered(run, subject, shares, label, 1.0)
    spread(above, total, "round", "l1", {"color": BLUE, "label": "from the global model"})
    others = {"color": ORANGE, "label": "from other local models"}
    spread(above, total, "round", "others_l1", others)
    above.set_ylabel(r"distance, $\ell_1$ norm")
    above.set_ylim(bottom=0)
    legend_above(above, 2)
    return figure


def gradient_diversity(run: RunData, table: "pd.DataFrame") -> Figure:
    """Draw gradient diversity (FedNTD Eq. 8) against the round, for the model and each layer."""
    total, name = table[table["layer"] == TOTAL], "gradient_diversity"
    values = table.pivot_table(index="round", columns="layer", values=name)[layers_of(table)]
    finite = values.to_numpy()[np.isfinite(values.to_numpy())]
    top = float(np.quantile(finite, 0.98)) if finite.size else 1.0
    subject, label = "Gradient diversity of a round's clients", "gradient diversity\nof the layer"
    figure, above = layered(run, subject, values, label, top)
    look: dict[str, Any] = {"marker": "o", "markersize": 3.5}
    above.plot(total["round"], total[name], color=BLUE, label="equal weights", **look)
    weighted = total[f"weighted_{name}"]
    above.plot(total["round"], weighted, color=GREEN, label="weights of the aggregation", **look)
    above.set_ylabel("gradient diversity")
    legend_above(above, 2)
    return figure


def cka(run: RunData, table: "pd.DataFrame") -> Figure:
    """Draw the linear CKA of the global model's features before and after each measured round."""
    title = f"Similarity of the global model's features\n{run.title}"
    figure, ((axes,),) = panels(title, 2.6)
    axes.plot(table["round"], table["cka"], color=BLUE, marker="o", markersize=3.5)
    axes.set_ylabel("CKA before and\nafter the round")
    axes.set_ylim(0, 1.03)
    round_axis(axes)
    return figure


def accuracy_panel(axes: Axes, title: str, label: str, ticks: int) -> None:
    """Label a panel of accuracies against epochs or rounds."""
    set_panel_title(axes, title)
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(integers(ticks))


def local_epochs(run: RunData, table: "pd.DataFrame") -> Figure:
    """Draw the accuracy of local models against the local epoch (FedNTD Fig. 6).

    Epoch 0 is the state before local training. Each measured round has a line, for at most eight
    rounds. Lines show the mean over clients, and bars show the standard deviation.
    """
    rounds = np.unique(table["round"])
    rounds = rounds[np.linspace(0, len(rounds) - 1, min(len(rounds), 8)).round().astype(int)]
    colours = matplotlib.colormaps[matplotlib.rcParams["image.cmap"]](
        np.linspace(0.85, 0, len(rounds))
    )
    series = [
        (table[table["round"] == number], {"color": colour, "label": f"round {number:.0f}"})
        for number, colour in zip(rounds, colours, strict=True)
    ]
    return epochs(series, f"Local models during local training\n{run.title}")


def epochs(series: Epochs, title: str) -> Figure:
    """Draw accuracies against the local epoch, with one line for each item of `series`.

    series: pairs of the table `local_epochs` and the line's matplotlib options.
    """
    figure, every = tiles(title, 3.4, len(EPOCH_PANELS), 2.0)
    for axes, (column, label) in zip(every, EPOCH_PANELS.items(), strict=True):
        for table, look in series:
            spread(axes, table, "epoch", column, look)
        accuracy_panel(axes, label, "local epoch", 8)
        axes.set_ylabel("accuracy")
        axes.label_outer(remove_inner_ticks=False)
    legend(figure, every[0])
    return figure


PICTURES = {
    "weight_divergence.csv": weight_divergence,
    "gradient_diversity.csv": gradient_diversity,
    "local_epochs.csv": local_epochs,
    "cka.csv": cka,
}


def spread(
    axes: Axes, table: "pd.DataFrame", key: str, column: str, look: Mapping[str, Any]
) -> None:
    """Draw the mean of the column `column` against the column `key`.

    Each mean is over the rows with the same key. Bars show their population standard deviation.
    """
    groups = table.dropna(subset=column).groupby(key)[column]
    if len(mean := groups.mean()):
        axes.errorbar(mean.index, mean, groups.std(ddof=0), linewidth=stroke(0.8), **BARS, **look)


def layers_of(table: "pd.DataFrame") -> list[str]:
    """Return the layers in a table in the order of the model, without the row for the total."""
    return [layer for layer in dict.fromkeys(table["layer"]) if layer != TOTAL]


def layered(
    run: RunData, subject: str, values: "pd.DataFrame", label: str, top: float
) -> tuple[Figure, Axes]:
    """Return a figure whose lower panel is a heat map (layers x rounds), and its empty upper panel.

    Layers are labelled by name if there are few of them.
    """
    height, layers = map_height(len(values.columns)), list(values.columns)
    title, ratios = f"{subject}\n{run.title}", (2.2, height)
    figure, ((above,), (below,)) = panels(title, 3.9 + height, rows=2, height_ratios=ratios)
    cells = values.to_numpy()
    image = map_cells(below, values.index.to_numpy(dtype=float), cells, top)
    colour_bar(figure, below, image, label, cells)
    below.set_ylabel("layer" if len(layers) <= NAMED_CLASSES else "layer (from the input)")
    if len(layers) <= NAMED_CLASSES:
        below.set_yticks(range(len(layers)), layers, fontsize="small")
    round_axis(below)
    above.set_xlim(below.get_xlim())
    return figure, above
