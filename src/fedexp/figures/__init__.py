"""Pictures of a run, drawn from the files of its directory alone: now, or at any time later.

    fedexp figures <run directory>...

matplotlib is used through its object interface (no pyplot, no global state), so any thread or job
may draw.
"""

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core import storage
from fedexp.core.errors import StorageError
from fedexp.data.views import VIEWS, suffix
from fedexp.figures.load import RunData, load_run
from fedexp.figures.pictures import Pictures
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedexp.metrics.history import History

# Without the time of writing: equal runs give equal files.
METADATA: dict[str, dict[str, None]] = {
    "png": {},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}
# and those of further test views
INTERIM = ("class_accuracy", "class_accuracy_normalised", "local_round")


def make_figures(
    run_dir: Path, summary: dict[str, Any] | None = None, look: Pictures | None = None
) -> list[Path]:
    """Write `figures/*` of a run directory and return their paths. summary: if summary.json is
    still to be written. look: formats, titles and style; None: as the configuration of the run
    says.

    A picture whose source file is missing or empty is left out, so an interrupted run gives what it
    has. Raises ConfigError for a damaged file and OSError when the directory cannot be written.
    """
    look = look or look_of(run_dir)
    return save_all(run_dir / "figures", _figures(load_run(run_dir, summary=summary)), look)


def look_of(run_dir: Path) -> Pictures:
    """Return what the configuration of a run says of its pictures."""
    return Pictures.of(RunDirectory(run_dir).config.get("figures"))


def missing_figures(run_dir: Path) -> int:
    """Return the number of pictures that `make_figures` would write and are not there."""
    names = [
        f"{name}.{form}"
        for name, _ in _figures(load_run(run_dir))
        for form in look_of(run_dir).format
    ]
    return sum(not (run_dir / "figures" / name).exists() for name in names)


def save_all(
    folder: Path, figures: "Iterable[tuple[str, Callable[[], Figure]]]", look: Pictures
) -> list[Path]:
    """Draw figures, each by a call, and write them into a folder, which is made for the first;
    return the paths."""
    from fedexp.figures.style import styled

    paths = []
    with styled(look.style):
        for name, draw in figures:
            folder.mkdir(exist_ok=True)
            figure = draw()
            if not look.titles:
                figure.suptitle("").set_in_layout(False)
            for form in look.format:
                paths.append(folder / f"{name}.{form}")
                save(figure, paths[-1])
    return paths


def interim_pictures(
    run_dir: Path, history: "History", further: "Mapping[str, History] | None" = None
) -> dict[str, bytes]:
    """Heat maps of the class accuracies up to the last round of `history` and, where local models
    were evaluated in it, its round picture: name -> png. Nothing is written; the run may continue
    or be long over. further: the history in each further view of the test set."""
    names = [f"{name}{suffix(view)}" for name in INTERIM for view in VIEWS]
    from fedexp.figures.style import styled

    run = load_run(run_dir, history, further=further)
    with styled(look_of(run_dir).style):
        return {name: _png(draw()) for name, draw in _figures(run) if name in names}


def _figures(run: RunData) -> "Iterator[tuple[str, Callable[[], Figure]]]":
    """Yield the figures that this run has data for, each to be drawn by a call."""
    from fedexp.figures import draw, draw_analyses

    for view, history in run.histories.items():
        shown = partial(draw.class_accuracy, run, history, view)
        yield f"class_accuracy{suffix(view)}", shown
        yield f"class_accuracy_normalised{suffix(view)}", partial(shown, normalised=True)
    for view, tasks in run.tasks_of.items():
        yield f"tasks{suffix(view)}", partial(draw.tasks, run, tasks, view)
    if run.has("test_accuracy") or run.has("validation_accuracy"):
        yield "curves", partial(draw.curves, run)
    if run.has("train_loss") or run.has("test_loss"):
        yield "loss", partial(draw.loss, run)
    if run.counts is not None:
        yield "data_distribution", partial(draw.data_distribution, run, run.counts)
    for view, history in run.histories.items():
        if history.local_rounds:
            yield f"local_round{suffix(view)}", partial(draw.local_round, run, history, view)
    if run.reduced and run.history and run.history.local_rounds:
        yield "class_reduction", partial(draw_analyses.class_reduction, run, run.history)
    for name, table in run.analyses.items():
        yield Path(name).stem, partial(draw_analyses.PICTURES[name], run, table)


def save(figure: "Figure", path: Path) -> None:
    """Write to a temporary file and rename it: a reader never sees half a picture. Raises
    StorageError where the folder is a link, which may lead anywhere."""
    if path.parent.is_symlink():
        raise StorageError(
            path.parent,
            OSError(errno.ELOOP, "it is a link; pictures are not written through links"),
        )
    with storage.temporary_of(path) as temporary:
        _write(figure, temporary, path.suffix.removeprefix("."))
        os.replace(temporary, path)


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    _write(figure, buffer, "png")
    return buffer.getvalue()


def _write(figure: "Figure", file: Path | io.BytesIO, form: str) -> None:
    figure.savefig(file, format=form, metadata=METADATA[form])
