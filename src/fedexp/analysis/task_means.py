"""The accuracy on each task after each task, averaged over the seeds of a sweep."""

import pandas as pd

from fedexp.analysis.frame import KEYS
from fedexp.analysis.layout import Section
from fedexp.analysis.means_table import format_cell, label_rows

TITLE = "Test accuracy after each task (%): "
CELL = ["after_task", "evaluated_task"]


def average_tasks(every: pd.DataFrame) -> pd.DataFrame:
    """Return the mean and standard deviation over seeds of each accuracy on a task after a task.

    Columns: setting, method, after_task, evaluated_task, n (the seeds with this accuracy), accuracy
    and accuracy_std. Runs that diverged are left out. The table is empty if no run has tasks.
    every: the runs, see `frame.tidy`.
    """
    rows = [
        (row["setting"], row["method"], end["task"], task, accuracy)
        for row in every[~every["diverged"]].to_dict("records")
        for end in row["run"].summary.get("tasks") or ()
        for task, accuracy in enumerate(end["accuracies"], 1)
    ]
    table = pd.DataFrame(rows, columns=[*KEYS, *CELL, "accuracy"]).astype({"accuracy": float})
    groups = table.dropna().groupby([*KEYS, *CELL], sort=False)["accuracy"]
    found = groups.agg(n="count", accuracy="mean", accuracy_std="std")
    return found.reset_index()


def task_sections(found: pd.DataFrame) -> list[Section]:
    """Return a table with a row after each task for each method. found: see `average_tasks`."""
    if found.empty:
        return []
    groups = list(found.groupby(KEYS, sort=False))
    names = label_rows(pd.DataFrame([keys for keys, _ in groups], columns=KEYS))
    sections = []
    for name, (_, group) in zip(names, groups, strict=True):
        seeds = int(group["n"].max())
        rows = group.assign(diverged=0).to_dict("records")
        texts = [format_cell(row, "accuracy", seeds) for row in rows]
        wide = group.assign(text=texts).pivot(index=CELL[0], columns=CELL[1], values="text")
        wide = wide.fillna("-").rename(columns="task {}".format)
        about = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
        about += ", or over the number n in a cell." if (group["n"] < seeds).any() else "."
        sections.append(Section(TITLE + name, wide, "after", about))
    return sections
