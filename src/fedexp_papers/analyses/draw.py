"""Draw the figures of the analyses. Each function takes a run and one of its tables."""

from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedexp.figures.load import RunData
from fedexp.figures.style import BLUE, GREEN, ORANGE
from fedexp_papers.analyses.layers import TOTAL
from fedexp_papers.draw import Style, draw_lines


def weight_divergence(run: RunData, table: pd.DataFrame) -> Figure:
    """Draw the distances of local models against the round (FedNTD Fig. 8c).

    The distances are from the global model and from other local models. Bars show the mean and the
    standard deviation over clients.
    """
    lines = [
        ("l1", BLUE, "from the global model"),
        ("others_l1", ORANGE, "from other local models"),
    ]
    title = f"Weight divergence after local training\n{run.title}"
    return draw_lines(title, totals(table, r"distance, $\ell_1$ norm", lines), ddof=0)


def gradient_diversity(run: RunData, table: pd.DataFrame) -> Figure:
    """Draw gradient diversity (FedNTD Eq. 8) against the round."""
    name = "gradient_diversity"
    lines = [
        (name, BLUE, "equal weights"),
        (f"weighted_{name}", GREEN, "weights of the\naggregation"),
    ]
    title = f"Gradient diversity of a round's clients\n{run.title}"
    return draw_lines(title, totals(table, name, lines))


def totals(
    table: pd.DataFrame, name: str, lines: Sequence[tuple[str, str, str]]
) -> list[tuple[pd.DataFrame, Style]]:
    """Return columns of the whole model by round, to be drawn in one panel.

    name: of the panel. lines: the column, the colour and the label of each line.
    """
    rows = table[table["layer"] == TOTAL].set_index("round")
    return [
        (rows[column].to_frame(name), {"color": colour, "label": label})
        for column, colour, label in lines
    ]


def cka(run: RunData, table: pd.DataFrame) -> Figure:
    """Draw the linear CKA of the global model's features before and after each measured round."""
    title = f"CKA of the global model's features before and after the round\n{run.title}"
    return draw_lines(title, [(table.set_index("round"), {"color": BLUE})], ylim=(0, 1.03))


def local_epochs(run: RunData, table: pd.DataFrame) -> Figure:
    """Draw the accuracy of local models against the local epoch (FedNTD Fig. 6).

    Epoch 0 is the state before local training. Each measured round has a line, for at most eight
    rounds. Lines show the mean over clients, and bars show the standard deviation.
    """
    rounds = np.unique(table["round"])
    rounds = rounds[np.linspace(0, len(rounds) - 1, min(len(rounds), 8)).round().astype(int)]
    shades = np.linspace(0.85, 0, len(rounds))
    colours = matplotlib.colormaps[matplotlib.rcParams["image.cmap"]](shades)
    columns = [f"{name}_accuracy" for name in ("in_local", "out_local", "train")]
    lines = []
    for number, colour in zip(rounds, colours, strict=True):
        rows = table[table["round"] == number].set_index("epoch")[columns]
        lines.append((rows, {"color": colour, "label": f"round {number:.0f}"}))
    title = f"Local models during local training\n{run.title}"
    return draw_lines(title, lines, "local epoch", ddof=0, ylim=(0, 1.03))
