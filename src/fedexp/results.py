"""What a run leaves when it is over: pictures, and summary.json last."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp import files
from fedexp.errors import ConfigError
from fedexp.experiment import State
from fedexp.figures import make_figures, missing_figures
from fedexp.views import VIEWS, file_of

log = logging.getLogger("fedexp")


def write_results(directory: Path, state: State, summary: dict[str, Any], figures: bool) -> list[Path]:
    """summary.json last: a run that has one is complete, whenever it was killed."""
    for view, tested in state.tested.items():
        if tested.history.local_rounds:
            tested.history.save_local(directory / file_of(files.LOCAL, view))
    pictures = draw(directory, summary) if figures else []
    files.write_json(directory / files.SUMMARY, summary)
    return pictures


def draw(directory: Path, summary: dict[str, Any]) -> list[Path]:
    """A picture that fails does not lose a run."""
    try:
        return make_figures(directory, summary)
    except OSError as error:
        log.warning("the figures cannot be written (%s)", error.strerror)
    except Exception:
        log.exception("the figures could not be drawn; `python -m fedexp.figures %s` tries again", directory)
    return []


def draw_missing(directory: Path, summary: dict[str, Any]) -> None:
    """The pictures of a finished run that a full disk has kept from being written."""
    try:
        lost = missing_figures(directory)
    except (ConfigError, OSError):
        return  # the files are damaged: nothing can be drawn from them
    if lost:
        log.info("%s: %s drawn now", directory, "1 figure is" if lost == 1 else f"{lost} figures are")
        draw(directory, summary)


def result_files(directory: Path, pictures: Sequence[Path]) -> list[Path]:
    names = (
        files.SUMMARY,
        files.ROUNDS,
        *(file_of(files.CLASSES, view) for view in VIEWS),
        files.TASKS,
        files.CLIENTS,
        *(file_of(files.LOCAL, view) for view in VIEWS),
        files.PARTITION,
        files.CONFIG,
    )
    return [directory / name for name in names if (directory / name).exists()] + list(pictures)
