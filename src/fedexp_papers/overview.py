"""Draw the picture of REPRODUCTION.md: our values against the published ones, by paper."""

from io import BytesIO
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes

from fedexp.figures import style
from fedexp_papers.judge import ABSOLUTE, RELATIVE
from fedexp_papers.summary import POINTS

TIMES = (1 - RELATIVE, 1 + RELATIVE)  # the strict tolerance of rounds


def draw_overview(judged: pd.DataFrame) -> bytes:
    """Return an svg file with a panel for each paper with judged accuracies or rounds.

    judged: from `agreement.judged_values`. Targets that were not reached are left out.
    """
    first = judged[judged["reading"] == ""]
    other = judged[judged["reading"] == "no augmentation, E=2"]
    with rc_context({"svg.hashsalt": "fedexp"}), style.styled():
        figure, axes = plt.subplots(1, 3, figsize=(11.0, 3.9), layout="constrained")
        for panel, paper in zip(axes, ("FedNTD", "FedKA"), strict=False):
            mine = first[(first["paper"] == paper) & (first["metric"] == "accuracy")]
            draw_accuracies(panel, paper, mine, shows_plain=paper == "FedNTD")
        draw_rounds(axes[2], {"FedNTD's settings": first, "no augmentation, E=2": other})
        content = BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
        plt.close(figure)
    return content.getvalue()


def draw_accuracies(axes: Axes, paper: str, rows: pd.DataFrame, shows_plain: bool) -> None:
    """Plot accuracies in points. shows_plain: whether to add the last plain test in grey."""
    axes.set(title=f"{paper}: accuracy", xlabel="published (points)", ylabel="ours (points)")
    if rows.empty:
        return
    scale = rows["unit"].map(POINTS)
    published, ours = rows["printed"] * scale, rows["mean"] * scale
    ends = np.array([published.min() - 4, published.max() + 4])
    band = ABSOLUTE["percent"]
    axes.plot(ends, ends, color=style.GREY)
    axes.fill_between(ends, ends - band, ends + band, color=style.GREY, alpha=0.2)
    if shows_plain:
        plain = rows["plain_last"] * scale
        axes.scatter(published, plain, s=10, color=style.GREY, label="plain test images")
    groups = [("held-out columns", rows["held_out"], "C0"), ("others", ~rows["held_out"], "none")]
    for name, part, face in groups:
        look: dict[str, Any] = {
            "s": 22,
            "facecolor": face,
            "edgecolor": "C0",
            "zorder": 3,
            "label": name,
        }
        axes.scatter(published[part], ours[part], **look)
    axes.legend()


def draw_rounds(axes: Axes, groups: dict[str, pd.DataFrame]) -> None:
    """Plot Flashback's rounds to a target on logarithmic axes, one colour for each group."""
    ends = np.array([2.0, 600.0])
    axes.plot(ends, ends, color=style.GREY)
    axes.fill_between(ends, TIMES[0] * ends, TIMES[1] * ends, color=style.GREY, alpha=0.2)
    for name, rows in groups.items():
        mine = rows[rows["paper"] == "Flashback"]
        axes.scatter(mine["printed"], mine["mean"], s=22, label=name, zorder=3)
    axes.set(xscale="log", yscale="log", title="Flashback: rounds to a target")
    axes.set(xlabel="published (rounds)", ylabel="ours (rounds)")
    axes.legend()
