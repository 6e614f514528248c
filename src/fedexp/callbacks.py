"""What Hydra tells at the end of a sweep: its launchers may run jobs in other processes, on other machines."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

ended: list[Path] = []  # directories of the sweeps that have ended in this process


class Sweeps(Callback):
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        ended.append(Path(config.hydra.sweep.dir).absolute())
