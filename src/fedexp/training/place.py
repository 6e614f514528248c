"""A job as the command line hands it over, and the place where a launcher has put it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from fedexp.training.deadline import Deadline

if TYPE_CHECKING:
    from fedexp.training.stopping import Watch


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
