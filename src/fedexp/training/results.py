"""Write the results of a finished run: the figures and, last, summary.json."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp.core import storage
from fedexp.figures import make_figures
from fedexp.figures.pictures import Pictures
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.rundir import files
from fedexp.trackers.base import Callback, RunInfo

log = logging.getLogger("fedexp")


class RunFigures(Callback):
    """Draws the figures of a run at its end."""

    def __init__(self, look: Pictures, metrics: Sequence[ForgettingMetric]):
        self.look, self.metrics = look, metrics

    def start(self, info: RunInfo) -> None:
        self.directory = info.directory

    def draw(self, summary: dict[str, Any]) -> list[Path]:
        return make_figures(self.directory, summary, self.look, self.metrics)


def write_results(
    directory: Path, summary: dict[str, Any], callbacks: Sequence[Callback] = ()
) -> list[Path]:
    """Draw the figures and write summary.json, and return the paths of the figures.

    The file summary.json is written last, so a run directory that contains it is complete.
    """
    pictures: list[Path] = []
    for each in callbacks:
        pictures += draw(directory, each, summary)
    storage.write_json(directory / files.SUMMARY, summary)
    return pictures


def draw(directory: Path, callback: Callback, summary: dict[str, Any]) -> Sequence[Path]:
    """Draw the figures of a callback. An error is only logged, so it does not end the run."""
    again = f"run `fedexp figures {directory}` to try again"
    try:
        return callback.draw(summary)
    except OSError as error:
        log.warning("the figures could not be written (%s); %s", error.strerror, again)
    except Exception:
        log.exception("the figures could not be drawn; %s", again)
    return []


def result_files(directory: Path, pictures: Sequence[Path]) -> list[Path]:
    names = (
        files.SUMMARY,
        *files.TABLES,
        files.PARTITION,
        files.CONFIG,
    )
    return [directory / name for name in names if (directory / name).exists()] + list(pictures)
