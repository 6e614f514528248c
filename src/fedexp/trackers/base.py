"""Observers of a run: the interface of trackers, and `tracker=none`.

The files of the run directory are the truth; a tracker is a view of them. What fails in it is one
warning, and the run continues (see `Guarded`).
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedexp.core.errors import ConfigError
from fedexp.core.limits import Checked
from fedexp.core.packages import how_to_install
from fedexp.data.views import VIEWS, file_of
from fedexp.rundir import files
from fedexp.rundir.fingerprint import group_name, setting

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from fedexp.metrics.history import History


@dataclass(frozen=True)
class RunInfo:
    """The facts that are known when a run starts."""

    directory: Path
    config: dict[str, Any]  # resolved, plain containers
    name: str
    group: str  # the same for all seeds
    job_type: str
    tags: tuple[str, ...]
    total_rounds: int
    first_round: int  # 0, or the round of the checkpoint that is resumed
    classes: tuple[str, ...]  # names, in the order of RoundRecord.class_accuracy
    wandb_id: str | None  # of the run that is resumed
    best_accuracy: float | None = None  # before first_round, of the run that is resumed
    resumed: bool = False  # from a checkpoint, which may be one of round 0

    @classmethod
    def of(
        cls, directory: Path, config: dict[str, Any], sweep: str | None, **known: Any
    ) -> "RunInfo":
        """Build the facts, with labels that follow from the configuration (with `choices`). sweep:
        that of the run."""
        choices = config["choices"]
        tags = [choices[group] for group in ("dataset", "partition", "algorithm", "model")]
        return cls(
            directory=directory,
            config=config,
            name=f"{setting(config)}_seed{config['seed']}",
            group=group_name(config),
            job_type=choices["algorithm"],
            tags=(*tags, *([sweep] if sweep else [])),
            **known,
        )


@dataclass(frozen=True)
class RoundRecord:
    """One finished round; round 0 is the initial model."""

    round: int
    values: Mapping[str, float | None]  # the row of rounds.csv without `round`; None: undefined
    # [C] on the test set, nan for a class without examples; None: not evaluated
    class_accuracy: "np.ndarray | None"
    # all class accuracies up to this round; to be read at once, since it grows
    history: "History | None" = None
    others: "Mapping[str, History]" = field(default_factory=dict)  # the same in each further view
    # means of the group `analysis`, where it is measured
    analysed: Mapping[str, float] = field(default_factory=dict)


class Tracker:
    """The interface of trackers, and `tracker=none`, which does nothing."""

    name: ClassVar[str] = "the tracker"  # in messages

    def start(self, info: RunInfo) -> None:
        """Note that the run begins, or continues from a checkpoint."""

    def log_round(self, record: RoundRecord) -> None:
        """Note that a round has ended and its row has been written to the files."""

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: Mapping[str, "pd.DataFrame"]
    ) -> None:
        """End the run, with the content of summary.json, the figures, and final tables in long
        format by name."""

    def abort(self) -> None:
        """Close after an error or an interrupt."""

    @property
    def run_id(self) -> str | None:
        """Return the tracker's id of this run, by which it can be resumed."""
        return None


class TrackerConfig(Checked, ABC, prefix="tracker."):
    """Base of the `tracker` group: what a tracker is made from."""

    @property
    def stays(self) -> bool:
        """Return whether all that is tracked stays in the run directory."""
        return False

    def check(self) -> None:
        """Raise ConfigError where something that the tracker needs is not installed; before
        anything is written."""

    @abstractmethod
    def create(self) -> Tracker:
        """Return the tracker of one run."""


class NoTracker(TrackerConfig):
    """Configuration of `tracker=none`."""

    @property
    def stays(self) -> bool:
        return True

    def create(self) -> Tracker:
        return Tracker()


def require_package(package: str, tracker: str) -> None:
    """Raise ConfigError unless the package of a tracker is installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"tracker={tracker}: needs the package {package}: {how_to_install(tracker)}"
        )


def final_tables(directory: Path) -> "dict[str, pd.DataFrame]":
    """Return the tables in long format of a finished run, by name."""
    import pandas as pd

    names = [file_of(files.CLASSES, view) for view in VIEWS]
    paths = [directory / name for name in (*names, files.TASKS)]
    return {path.stem: pd.read_csv(path) for path in paths if path.exists()}
