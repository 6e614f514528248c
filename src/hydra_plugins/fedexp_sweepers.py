"""The sweepers `hydra/sweeper=grid` (the default) and `hydra/sweeper=optuna`.

Hydra finds sweepers only in the package hydra_plugins, which it imports at every start. So this
module is small, and the work is done in fedexp.cli.
"""

from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class GridSweeper(Sweeper):
    """Runs all combinations of values, or the blocks of a sweep (`fedexp.cli.sweeps`)."""

    def __init__(self, **options: Any) -> None:
        pass  # they are read from the configuration

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        from fedexp.cli.sweeps import Multirun, run_grid

        run_grid(Multirun.of(self), arguments)


class OptunaSweeper(GridSweeper):
    """Runs the trials of an Optuna study (`fedexp.cli.search`)."""

    def sweep(self, arguments: list[str]) -> Any:
        from fedexp.cli.sweeps import Multirun
        from fedexp.config.launchers import check_installed

        multirun = Multirun.of(self)
        check_installed(multirun.config.hydra.runtime.choices)
        from fedexp.cli.search import search  # it imports optuna, which may be missing

        search(multirun, arguments)
