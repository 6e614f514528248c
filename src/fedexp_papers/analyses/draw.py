"""Draw the figures of the analyses. Each function takes a run and one of its tables."""

from collections.abc import Callable

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedexp.figures.load import RunData
from fedexp.figures.style import BLUE, GREEN, ORANGE
from fedexp_papers.analyses.layers import TOTAL
from fedexp_papers.draw import draw_lines


def weight_divergence(run: RunData, table: pd.DataFrame) -> Figure:
    """Draw the distances of local models against the round (FedNTD Fig. 8c).

    The distances are from the global model and from other local models. Bars show the mean and the
    standard deviation over clients.
    """
    total = table[table["layer"] == TOTAL].set_index("round")
    name = r"distance, $\ell_1$ norm"
    series = {
        "from the global model": total[["l1"]].rename(columns={"l1": name}),
        "from other local models": total[["others_l1"]].rename(columns={"others_l1": name}),
    }
    styles = {label: {"color": c} for label, c in zip(series, (BLUE, ORANGE), strict=True)}
    title = f"Weight divergence after local training\n{run.title}"
    return draw_lines(title, series, styles, ddof=0)


def gradient_diversity(run: RunData, table: pd.DataFrame) -> Figure:
    """Draw gradient diversity (FedNTD Eq. 8) against the round."""
    total, name = table[table["layer"] == TOTAL].set_index("round"), "gradient_diversity"
    series = {
        "equal weights": total[[name]],
        "weights of the\naggregation": total[[f"weighted_{name}"]].set_axis([name], axis=1),
    }
    styles = {label: {"color": c} for label, c in zip(series, (BLUE, GREEN), strict=True)}
    return draw_lines(f"Gradient diversity of a round's clients\n{run.title}", series, styles)


def cka(run: RunData, table: pd.DataFrame) -> Figure:
    """Draw the linear CKA of the global model's features before and after each measured round."""
    series = {"_": table.set_index("round")}
    title = f"CKA of the global model's features before and after the round\n{run.title}"
    return draw_lines(title, series, {"_": {"color": BLUE}}, ylim=(0, 1.03))


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
    series = {f"round {n:.0f}": table[table["round"] == n].set_index("epoch") for n in rounds}
    shown = {label: own[columns] for label, own in series.items()}
    styles = {label: {"color": c} for label, c in zip(series, colours, strict=True)}
    title = f"Local models during local training\n{run.title}"
    return draw_lines(title, shown, styles, "local epoch", ddof=0, ylim=(0, 1.03))


PICTURES: dict[str, Callable[[RunData, pd.DataFrame], Figure]] = {
    f"{each.__name__}.csv": each
    for each in (weight_divergence, gradient_diversity, local_epochs, cka)
}
