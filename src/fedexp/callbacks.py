"""What Hydra tells at the end of a sweep: its launchers may run jobs in other processes, on other machines."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from fedexp.files import ERROR

Mark = tuple[int, int]  # inode, time of writing

# Of this process, by the directory of each sweep: its failures as it began; those that have ended.
begun: dict[Path, dict[Path, Mark]] = {}
ended: list[Path] = []


class Sweeps(Callback):
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        directory = Path(config.hydra.sweep.dir).absolute()
        begun.setdefault(directory, failures(directory))  # a sweep may consist of several multiruns

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        ended.append(Path(config.hydra.sweep.dir).absolute())


def failures(sweep: Path) -> dict[Path, Mark]:
    """The reports of failed jobs, with what tells a new one from an old one, whatever the clock says."""
    found = ((path, path.stat()) for path in sweep.glob(f"*/{ERROR}"))
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found}
