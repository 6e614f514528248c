"""Draw the figures of the analyses from their tables."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedexp_papers.analyses.layers import TOTAL
from fedexp_papers.draw import Style, draw_lines

SHARE = (0, 1.03)  # limits of an axis of shares
# table -> title of the figure, column -> label of its panel, limits of the axis
PANELS = {
    "weight_divergence": (
        "Weight divergence after local training",
        {
            "l1": "distance from the\nglobal model, $\\ell_1$ norm",
            "others_l1": "distance from other\nlocal models, $\\ell_1$ norm",
        },
        None,
    ),
    "gradient_diversity": (
        "Gradient diversity of a round's clients",
        {
            "gradient_diversity": "gradient diversity,\nequal weights",
            "weighted_gradient_diversity": "gradient diversity,\nweights of the aggregation",
        },
        None,
    ),
    "cka": (
        "Similarity of the global model's features before and after the round",
        {"cka": "linear CKA"},
        SHARE,
    ),
    "local_epochs": (
        "Local models during local training",
        {
            "in_local_accuracy": "in-local accuracy",
            "out_local_accuracy": "out-local accuracy",
            "train_accuracy": "accuracy on the client's\ntraining examples",
        },
        SHARE,
    ),
}


def draw_analysis(name: str, title: str, table: pd.DataFrame) -> Figure:
    """Draw an analysis against the round or, with a line for each round, the local epoch.

    Lines show the mean over clients of values of the whole model, and bars show the standard
    deviation. Of local epochs, at most eight rounds are drawn (FedNTD Fig. 6); epoch 0 is the state
    before local training. name: a key of PANELS. title: of the run.
    """
    about, columns, limits = PANELS[name]
    rows = table[table["layer"] == TOTAL] if "layer" in table else table
    lines: list[tuple[pd.DataFrame, Style]] = [(rows.set_index("round"), {"color": "C0"})]
    if "epoch" in rows:
        rounds = np.unique(rows["round"])
        rounds = rounds[np.linspace(0, len(rounds) - 1, min(len(rounds), 8)).round().astype(int)]
        shades = np.linspace(0.85, 0, len(rounds))
        colours = matplotlib.colormaps[matplotlib.rcParams["image.cmap"]](shades)
        lines = [
            (
                rows[rows["round"] == number].set_index("epoch"),
                {"color": colour, "label": f"round {number:.0f}"},
            )
            for number, colour in zip(rounds, colours, strict=True)
        ]
    shown = [(part[[*columns]].rename(columns=columns), style) for part, style in lines]
    x = "local epoch" if "epoch" in rows else "round"
    about += ":\nmean and standard deviation over the clients" * ("client" in rows)
    return draw_lines(f"{about}\n{title}", shown, x, ddof=0, most_bars=len(shown), ylim=limits)
