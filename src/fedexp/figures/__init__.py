"""Pictures of a run, drawn from the files of its directory alone: now, or at any time later.

    python -m fedexp.figures <run directory>...

matplotlib is used through its object interface (no pyplot, no global state), so any thread or job may draw.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp import files
from fedexp.figures.load import RunFiles, load_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130


def make_figures(run_dir: Path, summary: dict[str, Any] | None = None) -> list[Path]:
    """Write `figures/*.png` of a run directory and return their paths. summary: if summary.json is still to be written.

    A picture whose source file is missing or empty is left out, so an interrupted run gives what it has.
    Raises ConfigError for a damaged file and OSError when the directory cannot be written.
    """
    folder = run_dir / "figures"
    paths = []
    for name, figure in _figures(load_run(run_dir, summary)):
        folder.mkdir(exist_ok=True)
        paths.append(folder / f"{name}.png")
        _save(figure, paths[-1])
    return paths


def _figures(run: RunFiles) -> "Iterator[tuple[str, Figure]]":
    """The pictures that this run has data for, one at a time."""
    from fedexp.figures import draw

    if run.history:
        yield "class_accuracy", draw.class_accuracy(run, run.history)
        yield "class_accuracy_normalised", draw.class_accuracy_normalised(run, run.history)
    if run.tasks is not None:
        yield "tasks", draw.tasks(run, run.tasks)
    if run.has("test_accuracy"):
        yield "curves", draw.curves(run)
    if run.has("train_loss") or run.has("test_loss"):
        yield "loss", draw.loss(run)
    if run.counts is not None:
        yield "data_distribution", draw.data_distribution(run, run.counts)
    if run.history and run.history.local_rounds:
        yield "local_round", draw.local_round(run, run.history)


def _save(figure: "Figure", path: Path) -> None:
    """Write to a temporary file and rename it: a reader never sees half a picture."""
    with files.temporary_of(path) as partial:
        figure.savefig(partial, format="png", dpi=DPI, facecolor="white")
        os.replace(partial, path)
