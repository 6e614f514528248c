"""What Hydra tells at both ends of a sweep: its launchers may run jobs in other processes, on other machines."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from fedexp.cli import launchers
from fedexp.core import interrupts
from fedexp.rundir.files import ERROR

Mark = tuple[int, int]  # inode, time of writing

# Of this process, by the directory of each sweep.
begun: dict[Path, dict[Path, Mark]] = {}  # its failures as it began
running: dict[Path, str] = {}  # the launcher of each that is not over
ended: list[Path] = []
queued: dict[Path, int] = {}  # the number of jobs of each whose jobs are not those of its overrides


NOTES = ".failed"  # of a sweep: what jobs could not write into their own directories


class Sweeps(Callback):
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hydra would write its files over those of a run that is there, before it can be refused."""
        with read_write(config), open_dict(config):
            config.hydra.output_subdir = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        directory, launcher = Path(config.hydra.sweep.dir).absolute(), config.hydra.runtime.choices["hydra/launcher"]
        jobs = launchers.settle(config, queued.get(directory))
        begun.setdefault(directory, failures(directory))  # a sweep may consist of several multiruns
        running[directory] = launcher
        if launcher != "basic":
            interrupts.release()  # this process only waits
            print(launchers.sentence(launcher, config.hydra.launcher, jobs, directory), flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        directory = Path(config.hydra.sweep.dir).absolute()
        running.pop(directory, None)
        ended.append(directory)


def failures(sweep: Path) -> dict[Path, Mark]:
    """The reports of failed jobs, with what tells a new one from an old one, whatever the clock says."""
    paths = [*sweep.glob(f"*/{ERROR}"), *sweep.glob(f"{NOTES}/*.json")]
    found = ((path, path.stat()) for path in paths)
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found}
