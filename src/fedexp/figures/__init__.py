"""Draw the figures of a run from the files in its directory, during or after the run.

    fedexp figures <run directory>...

matplotlib is used through its object interface, without pyplot or global state, so any thread or
job may draw figures.
"""

import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core import storage
from fedexp.data.views import name_in_view, suffix
from fedexp.figures.load import RunData, load_run_data
from fedexp.figures.pictures import Pictures
from fedexp.rundir import origin
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedexp.metrics.forgetting_metric import ForgettingMetric
    from fedexp.metrics.record import Record

# Leave out the time of writing, so that equal runs give equal files.
METADATA: dict[str, dict[str, None]] = {
    "png": {},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}
# a figure -> the column of rounds.csv that a run with this figure has
OF_COLUMNS = {
    "phases": "lost_accuracy",
    "absence": "present_forgetting",
    "clients": "personal_accuracy",
    "own_tests": "own_accuracy",
}
INTERIM = ("class_accuracy", "local_round")  # prefixes of the figures that are drawn during a run


def make_figures(
    run_dir: Path,
    summary: dict[str, Any] | None = None,
    look: Pictures | None = None,
    metrics: "Sequence[ForgettingMetric]" = (),
) -> list[Path]:
    """Write the figures of a run to `figures/` in the run directory, and return their paths.

    summary: the content of summary.json, if this file has not been written yet. look: formats,
    titles and style, or None for the settings in the run's configuration. metrics: the run's
    metrics, whose own figures are drawn, too.

    A figure is left out if its source file is missing or empty, so an interrupted run has only some
    of the figures. Raises ConfigError if a file is damaged, and OSError if the directory cannot be
    written to.
    """
    look = look or read_settings(run_dir)
    run = load_run_data(run_dir, summary=summary)
    own = (
        (f"{name}{suffix(view)}", draw)
        for view, record in run.records.items()
        for metric in metrics
        for name, draw in metric.figures(record).items()
    )
    return save_all(run_dir / "figures", itertools.chain(list_figures(run), own), look)


def read_settings(run_dir: Path) -> Pictures:
    """Return the figure settings of a run's configuration.

    A relative style file is first looked for where the run was started.
    """
    run = RunDirectory(run_dir)
    node: Any = run.config.get("figures")
    style = node.get("style") if isinstance(node, Mapping) else None
    if isinstance(style, str) and run.has(origin.NAME):
        place = Path(origin.read(run_dir)["directory"], style)
        node = {**node, "style": str(place)} if place.is_file() else node
    return Pictures.of(node)


def save_all(
    folder: Path, figures: "Iterable[tuple[str, Callable[[], Figure]]]", look: Pictures
) -> list[Path]:
    """Draw figures, write them to a folder, and return their paths.

    figures: pairs (name, function that draws the figure). The folder is created before the first
    figure is drawn.
    """
    from fedexp.figures.style import styled

    paths = []
    with styled(look):
        for name, draw in figures:
            folder.mkdir(exist_ok=True)
            figure = draw()
            if not look.titles:
                figure.suptitle("").set_in_layout(False)
            if look.size:
                width, height = look.size
                figure.set_size_inches(width, height)
            for form in look.format:
                paths.append(folder / f"{name}.{form}")
                save(figure, paths[-1])
    return paths


def interim_pictures(run_dir: Path, records: "Mapping[str, Record]") -> dict[str, bytes]:
    """Return figures (name -> PNG content) that show the run up to the end of the records.

    These are the heat maps of class accuracies and, if local models were evaluated, the latest
    round figure. No file is written, and the run may be in progress or finished. records: a dict
    that maps each view of the test set to its record.
    """
    from fedexp.figures.style import styled

    drawn = {}
    with styled(read_settings(run_dir)):
        for name, draw in list_figures(load_run_data(run_dir, records=records)):
            if name.startswith(INTERIM):
                buffer = io.BytesIO()
                draw().savefig(buffer, format="png")
                drawn[name] = buffer.getvalue()
    return drawn


def list_figures(run: RunData) -> "Iterator[tuple[str, Callable[[], Figure]]]":
    """Yield (name, function that draws the figure) for each figure whose data the run contains."""
    from fedexp.figures import draw, draw_details

    for view, record in run.records.items():
        shown = partial(draw.class_accuracy, run, record, view)
        yield f"class_accuracy{suffix(view)}", shown
        yield f"class_accuracy_normalised{suffix(view)}", partial(shown, normalised=True)
        if record.domains is not None:
            yield f"domain_accuracy{suffix(view)}", partial(draw.domain_accuracy, run, record, view)
    for view, tasks in run.tasks_of.items():
        yield f"tasks{suffix(view)}", partial(draw.tasks, run, tasks, view)
        if len(tasks.matrix):
            shown = partial(draw_details.task_matrix, run, tasks, view)
            yield f"task_matrix{suffix(view)}", shown
    if run.has("test_accuracy") or run.has("validation_accuracy"):
        yield "curves", partial(draw.curves, run)
    if run.has("train_loss") or run.has("test_loss"):
        yield "loss", partial(draw.loss, run)
    if run.counts is not None and run.counts.any():
        yield "data_distribution", partial(draw.data_distribution, run, run.counts)
    for view, record in run.records.items():
        yield from list_detailed_figures(run, record, view)
    if run.reduced and run.record and run.record.local_rounds:
        yield "class_reduction", partial(draw_details.class_reduction, run, run.record)


def list_detailed_figures(
    run: RunData, record: "Record", view: str
) -> "Iterator[tuple[str, Callable[[], Figure]]]":
    """Yield the figures of a view whose data only some forgetting metrics record."""
    from fedexp.figures import draw, draw_details

    if record.local_rounds:
        yield f"local_round{suffix(view)}", partial(draw.local_round, run, record, view)
    if record.labels is not None and len(record.rounds) > 1:
        shown = partial(draw_details.example_forgetting, run, record, view)
        yield f"example_forgetting{suffix(view)}", shown
    for name, column in OF_COLUMNS.items():
        if run.has(name_in_view(column, view)):
            yield f"{name}{suffix(view)}", partial(getattr(draw_details, name), run, record, view)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure atomically, so that readers never see an incomplete file."""
    form = path.suffix.removeprefix(".")
    with storage.temporary_path(path) as temporary:
        figure.savefig(temporary, format=form, metadata=METADATA[form])
        os.replace(temporary, path)
