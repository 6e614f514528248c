"""A job from the command line, with its configuration, its resources and its deadline."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from fedexp.core.errors import BudgetSpent

if TYPE_CHECKING:
    from fedexp.training.stopping import Watch

DEADLINE = "FEDEXP_DEADLINE"  # key of hydra.job.env_set: seconds since the epoch


@dataclass(frozen=True)
class Deadline:
    """The time by which a job must have saved its state and exited."""

    # Seconds since the epoch. The clocks of all machines in a sweep must agree.
    at: float = math.inf

    def check(self, seconds: float = 0.0) -> None:
        """Raise BudgetSpent if work that takes `seconds` would end after the deadline."""
        if time.time() + seconds >= self.at:
            raise BudgetSpent


def deadline_of(hydra_config: Any) -> Deadline:
    """Return the deadline that Hydra's option `job.env_set` sets for a job, or no deadline."""
    given: Mapping[str, Any] = hydra_config.job.get("env_set") or {}
    return Deadline(float(given[DEADLINE])) if DEADLINE in given else Deadline()


@dataclass(frozen=True)
class Place:
    """The resources that the launcher gives to a job."""

    cores: int | None = None  # cores that the job may use; None: all cores of its process
    # True if no scheduler assigns GPUs, so the jobs on this machine share them (see gpus.py).
    finds_gpu: bool = False
    alone: bool = True  # True if no other job writes to the same terminal


@dataclass(frozen=True)
class Job:
    """A job of a command: its configuration, directory, resources and deadline."""

    config: DictConfig
    directory: Path
    overrides: Sequence[str]
    choices: Mapping[str, str]  # the option chosen from each config group
    sweep: str | None  # name of the sweep that this job belongs to; None for a single run
    overwrite: bool = False  # whether to replace a run in the directory
    place: Place = field(default_factory=Place)
    deadline: Deadline = field(default_factory=Deadline)
    watch: "Watch | None" = None  # function by which a search may end the run
