"""The sweeper `hydra/sweeper=optuna`: the trials of an Optuna study run as jobs of a launcher.

Hydra finds sweepers only in the package hydra_plugins, which it imports at every start. So this
module is small, and the search is in fedexp.cli.search.
"""

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """Calls `fedexp.cli.search`, which reads the sweeper's options from the configuration."""

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
