"""A job from the command line: its configuration, its resources and its deadline."""

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

    # seconds since the epoch: the clocks of all machines of a sweep must agree
    at: float = math.inf

    def check(self, seconds: float = 0.0) -> None:
        """Raise BudgetSpent if work that takes `seconds` would end after the deadline."""
        if time.time() + seconds >= self.at:
            raise BudgetSpent


def deadline_of(hydra_config: Any) -> Deadline:
    """Return a job's deadline, which its overrides set."""
    given: Mapping[str, Any] = hydra_config.job.get("env_set") or {}
    return Deadline(float(given[DEADLINE])) if DEADLINE in given else Deadline()


@dataclass(frozen=True)
class Place:
    """What a job knows about where its launcher runs it."""

    cores: int | None = None  # cores that the job may use; None: all cores of its process
    # True if no scheduler assigns GPUs, so that this machine's jobs share them (see gpus.py)
    finds_gpu: bool = False
    alone: bool = True  # no other job writes to the same terminal at the same time


@dataclass(frozen=True)
class Job:
    """What the command line knows about a job."""

    config: DictConfig
    directory: Path
    overrides: Sequence[str]
    choices: Mapping[str, str]  # group -> option
    sweep: str | None  # name of the sweep this job belongs to
    place: Place = field(default_factory=Place)
    deadline: Deadline = field(default_factory=Deadline)
    watch: "Watch | None" = None  # a search's function that may end the run
