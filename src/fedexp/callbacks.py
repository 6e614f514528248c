"""What Hydra tells at both ends of a sweep: its launchers may run jobs in other processes, on other machines."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from fedexp import launchers

begun: dict[Path, str] = {}  # directories of the sweeps of this process that are not over, and their launchers
ended: list[Path] = []  # directories of those that are


class Sweeps(Callback):
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        jobs = launchers.settle(config)
        directory, launcher = Path(config.hydra.sweep.dir), config.hydra.runtime.choices["hydra/launcher"]
        begun[directory] = launcher
        if launcher != "basic":
            print(launchers.sentence(launcher, config.hydra.launcher, jobs, directory), flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        directory = Path(config.hydra.sweep.dir)
        begun.pop(directory, None)
        ended.append(directory)
