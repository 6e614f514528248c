"""Draw the picture of REPRODUCTION.md: our values against the published ones, by paper."""

from io import BytesIO
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes

from fedexp.figures import style
from fedexp_papers.judge import ABSOLUTE, FORGETTING, RELATIVE
from fedexp_papers.summary import POINTS

CLIENTS, OTHER = "released clients", "no augmentation, E=2"  # readings that are shown, too
TIMES = (1 - RELATIVE, 1 + RELATIVE)  # the strict tolerance of rounds


def draw_overview(judged: pd.DataFrame) -> bytes:
    """Return an svg file with the judged accuracies, forgetting and rounds of three papers.

    judged: from `agreement.judged_values`. Targets that were not reached are left out.
    """
    papers = dict(iter(judged.groupby("paper")))
    nothing = judged.iloc[:0]
    with rc_context({"svg.hashsalt": "fedexp"}), style.styled():
        figure, axes = plt.subplots(2, 2, figsize=(8.6, 8.0), layout="constrained")
        for column, metric in enumerate(("accuracy", "forgetting")):
            draw_values(axes[0, column], papers.get("FedNTD", nothing), metric, shows_plain=True)
        draw_values(axes[1, 0], papers.get("FedKA", nothing), "accuracy", shows_plain=False)
        draw_rounds(axes[1, 1], papers.get("Flashback", nothing))
        content = BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
        plt.close(figure)
    return content.getvalue()


def draw_values(axes: Axes, rows: pd.DataFrame, metric: str, shows_plain: bool) -> None:
    """Plot a paper's accuracies in points, or its forgetting, main settings and released clients.

    shows_plain: whether to add the last plain test in grey.
    """
    rows = rows[(rows["metric"] == metric) & rows["reading"].isin(["", CLIENTS])]
    if rows.empty:
        return
    is_accuracy = metric == "accuracy"
    unit = " (points)" if is_accuracy else ""
    axes.set(title=f"{rows['paper'].iloc[0]}: {metric}")
    axes.set(xlabel=f"published{unit}", ylabel=f"ours{unit}")
    scale = rows["unit"].map(POINTS) if is_accuracy else 1.0
    margin, band = (4, ABSOLUTE["percent"]) if is_accuracy else (0.04, FORGETTING)
    published, ours = rows["printed"] * scale, rows["mean"] * scale
    ends = np.array([published.min() - margin, published.max() + margin])
    axes.plot(ends, ends, color=style.GREY)
    axes.fill_between(ends, ends - band, ends + band, color=style.GREY, alpha=0.2)
    is_main = rows["reading"] == ""
    if shows_plain:
        plain = (rows["plain_last"] * scale)[is_main]
        axes.scatter(published[is_main], plain, s=10, color=style.GREY, label="plain test images")
    groups = [
        ("held-out columns", is_main & rows["held_out"], "C0", "C0"),
        ("others", is_main & ~rows["held_out"], "none", "C0"),
        (CLIENTS, ~is_main, "none", "C1"),
    ]
    for name, part, face, edge in groups:
        if not part.any():
            continue
        look: dict[str, Any] = {"facecolor": face, "edgecolor": edge, "label": name}
        axes.scatter(published[part], ours[part], s=22, zorder=3, **look)
    axes.legend()


def draw_rounds(axes: Axes, rows: pd.DataFrame) -> None:
    """Plot Flashback's rounds to a target on logarithmic axes, one colour for each reading."""
    ends = np.array([2.0, 600.0])
    axes.plot(ends, ends, color=style.GREY)
    axes.fill_between(ends, TIMES[0] * ends, TIMES[1] * ends, color=style.GREY, alpha=0.2)
    for reading, name in {"": "FedNTD's settings", OTHER: OTHER}.items():
        mine = rows[rows["reading"] == reading]
        axes.scatter(mine["printed"], mine["mean"], s=22, label=name, zorder=3)
    axes.set(xscale="log", yscale="log", title="Flashback: rounds to a target")
    axes.set(xlabel="published (rounds)", ylabel="ours (rounds)")
    axes.legend()
