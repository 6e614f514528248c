"""The sweeper `hydra/sweeper=optuna`: trials of a study of Optuna as jobs of Hydra's launchers.

Hydra takes sweepers from the package hydra_plugins alone and imports it at each start, so the work
is in fedexp.cli.search.
"""

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """Options: those of conf/sweeper/optuna.yaml, which fedexp.cli.search reads from the config."""

    def __init__(self, **options: Any) -> None:
        pass

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from fedexp.cli.search import search

        assert self.config is not None, "Hydra calls setup before"
        return search(self.config, self.launcher, arguments)
