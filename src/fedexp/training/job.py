"""A job as the command line hands it over: what it runs, where its launcher has put it, and until
when it may work."""

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
    """The moment by which a job has saved its state and ended."""

    # seconds since the epoch: the clocks of all machines of a sweep must agree
    at: float = math.inf

    def check(self, seconds: float = 0.0) -> None:
        """Raise BudgetSpent unless what takes so many seconds is over before the deadline."""
        if time.time() + seconds >= self.at:
            raise BudgetSpent


def deadline_of(hydra_config: Any) -> Deadline:
    """Return the deadline of a job, as its overrides have brought it along."""
    given: Mapping[str, Any] = hydra_config.job.get("env_set") or {}
    return Deadline(float(given[DEADLINE])) if DEADLINE in given else Deadline()


@dataclass(frozen=True)
class Place:
    """Facts that a job knows about where its launcher has put it."""

    cores: int | None = None  # that it may use; None: all that its process may
    # no scheduler has given it one: the jobs of this machine share them out (see gpus.py)
    finds_gpu: bool = False
    alone: bool = True  # no other job writes to the same terminal at the same time


@dataclass(frozen=True)
class Job:
    """Facts that the command line knows about a job."""

    config: DictConfig
    directory: Path
    overrides: Sequence[str]
    choices: Mapping[str, str]  # group -> option
    sweep: str | None  # name of the sweep this job belongs to
    place: Place = field(default_factory=Place)
    deadline: Deadline = field(default_factory=Deadline)
    watch: "Watch | None" = None  # of a search, which may end the run
