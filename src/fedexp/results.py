"""What a run leaves when it is over: pictures, and summary.json last."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp import files
from fedexp.experiment import State
from fedexp.figures import make_figures

log = logging.getLogger("fedexp")


def write_results(directory: Path, state: State, summary: dict[str, Any], figures: bool) -> list[Path]:
    """summary.json last: a run that has one is complete, whenever it was killed."""
    if state.history.local_rounds:
        state.history.save_local(directory / files.LOCAL)
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


def result_files(directory: Path, pictures: Sequence[Path]) -> list[Path]:
    names = (
        files.SUMMARY,
        files.ROUNDS,
        files.CLASSES,
        files.TASKS,
        files.CLIENTS,
        files.LOCAL,
        files.PARTITION,
        files.CONFIG,
    )
    return [directory / name for name in names if (directory / name).exists()] + list(pictures)
