"""Results of a finished run: figures, and summary.json last."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.data.views import VIEWS, file_of
from fedexp.figures import make_figures, missing_figures
from fedexp.figures.pictures import Pictures
from fedexp.rundir import files
from fedexp.training.state import State

if TYPE_CHECKING:
    from fedexp.training.simulation import Simulation

log = logging.getLogger("fedexp")


def write_results(
    directory: Path, state: State, summary: dict[str, Any], look: Pictures
) -> list[Path]:
    """Draw the figures, then write summary.json, so that a run that has one is complete."""
    for view, tested in state.tested.items():
        if tested.history.local_rounds:
            tested.history.save_local(directory / file_of(files.LOCAL, view))
    pictures = draw(directory, summary, look) if look.draw else []
    storage.write_json(directory / files.SUMMARY, summary)
    return pictures


def draw(directory: Path, summary: dict[str, Any], look: Pictures | None = None) -> list[Path]:
    """Draw the figures. A figure that fails does not end the run."""
    try:
        return make_figures(directory, summary, look)
    except OSError as error:
        log.warning("the figures cannot be written (%s)", error.strerror)
    except Exception:
        log.exception("the figures could not be drawn; `fedexp figures %s` tries again", directory)
    return []


def draw_missing(directory: Path, summary: dict[str, Any]) -> None:
    """Draw the figures of a finished run that could not be written because the disk was full."""
    try:
        lost = missing_figures(directory)
    except (ConfigError, OSError):
        return  # the files are damaged: nothing can be drawn from them
    if lost:
        log.info(
            "%s: %s drawn now", directory, "1 figure is" if lost == 1 else f"{lost} figures are"
        )
        draw(directory, summary)


def result_files(directory: Path, pictures: Sequence[Path]) -> list[Path]:
    names = (
        files.SUMMARY,
        files.ROUNDS,
        *(file_of(files.CLASSES, view) for view in VIEWS),
        files.TASKS,
        files.CLIENTS,
        *files.ANALYSES,
        *(file_of(files.LOCAL, view) for view in VIEWS),
        files.PARTITION,
        files.CONFIG,
    )
    return [directory / name for name in names if (directory / name).exists()] + list(pictures)


def data_of(simulation: "Simulation") -> dict[str, int]:
    """Return the sizes of a run's data for its summary, where they are compared with expected
    sizes.
    """
    import torch

    data, federation = simulation.runtime.data, simulation.stages[0].federation
    learned = torch.tensor(sorted(set().union(*federation.tasks)), device=data.y_train.device)
    return {
        "train": int(torch.isin(data.y_train, learned).sum()),
        "test": int(torch.isin(data.y_test, learned).sum()),
        **({} if data.validation is None else {"validation": len(data.validation)}),
        "classes": len(learned),
        "clients": federation.num_clients,
    }
