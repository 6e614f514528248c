"""Callbacks of Hydra at both ends of a sweep: its launchers may run jobs in other processes, on
other machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from fedexp.cli import launchers
from fedexp.core import interrupts
from fedexp.core.storage import remove_if_empty
from fedexp.rundir.files import ERROR

Mark = tuple[int, int]  # inode, time of writing
# the configuration of a sweep, which is there before the jobs are checked
OF_HYDRA = "multirun.yaml"
NOTES = ".failed"  # of a sweep: what jobs could not write into their own directories


@dataclass
class SweepWatch:
    """The sweeps of one command, by their directories."""

    begun: dict[Path, dict[Path, Mark]] = field(default_factory=dict)  # its failures as it began
    made: set[Path] = field(default_factory=set)  # those that were not there before
    running: dict[Path, str] = field(default_factory=dict)  # the launcher of each that is not over
    ended: list[Path] = field(default_factory=list)
    said: set[str] = field(default_factory=set)  # messages of jobs, which many of them may share

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """Inside, Hydra's callback reports here.

        Hydra makes the callback from the class name in conf/config.yaml, with plain values alone,
        so that it can be given no object; a context variable is the way that is left, and ends with
        the command.
        """
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def take_back(self, here: Path) -> None:
        """Remove what Hydra has made for sweeps that were refused before their first job; of
        parents only those below `here`."""
        for directory in self.made:
            if directory.is_dir() and [path.name for path in directory.iterdir()] == [OF_HYDRA]:
                (directory / OF_HYDRA).unlink()
                remove_if_empty(directory, here)


_current: ContextVar[SweepWatch | None] = ContextVar("sweep_watch", default=None)


def said_before(message: str) -> bool:
    """Return whether another job of this command has said the same, as far as this process
    knows."""
    watch = _current.get()
    if watch is None:
        return False
    known = message in watch.said
    watch.said.add(message)
    return known


class Sweeps(Callback):
    """The callback that conf/config.yaml names."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Stop in time: Hydra would write its files over those of a run that is there, before it
        can be refused."""
        with read_write(config), open_dict(config):
            config.hydra.output_subdir = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note what was in the directory before, and say where the jobs run."""
        directory, launcher = (
            Path(config.hydra.sweep.dir).absolute(),
            config.hydra.runtime.choices["hydra/launcher"],
        )
        watch = _current.get()
        jobs = launchers.settle(config)
        if watch:
            if not directory.exists():
                watch.made.add(directory)
            # a sweep may consist of several multiruns
            watch.begun.setdefault(directory, failures(directory))
            watch.running[directory] = launcher
        if launcher != "basic":
            interrupts.release()  # this process only waits
            print(launchers.sentence(launcher, config.hydra.launcher, jobs, directory), flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Note that its jobs are over."""
        directory = Path(config.hydra.sweep.dir).absolute()
        if watch := _current.get():
            watch.running.pop(directory, None)
            watch.ended.append(directory)


def failures(sweep: Path) -> dict[Path, Mark]:
    """Return the reports of failed jobs, with what tells a new one from an old one, whatever the
    clock says."""
    paths = [*sweep.glob(f"*/{ERROR}"), *sweep.glob(f"{NOTES}/*.json")]
    found = ((path, path.stat()) for path in paths)
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found}
