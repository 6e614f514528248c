"""A job from the command line, with its configuration and its resources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig


@dataclass(frozen=True)
class Place:
    """The resources that the launcher gives to a job."""

    cores: int | None = None  # cores that the job may use; None: all cores of its process
    # The job's number, by which it chooses a GPU; None for a single run or if a scheduler chooses.
    number: int | None = None
    alone: bool = True  # True if no other job writes to the same terminal


@dataclass(frozen=True)
class Job:
    """A job of a command: its configuration, directory and resources."""

    config: DictConfig
    directory: Path
    overrides: Sequence[str]
    choices: Mapping[str, str]  # the option chosen from each config group
    sweep: str | None  # name of the sweep that this job belongs to; None for a single run
    overwrite: bool = False  # whether to replace a run in the directory
    place: Place = field(default_factory=Place)
    in_search: bool = False  # whether the job is a trial of a search
    command: Sequence[str] = ()  # the whole command, or the arguments of `fedexp.run`

    @property
    def name(self) -> str:
        """Return the job's name on the console: its number or, without a number, its directory."""
        number = self.place.number
        return f"job {self.directory.name if number is None else number + 1}"
