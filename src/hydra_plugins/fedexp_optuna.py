"""The sweeper `hydra/sweeper=optuna`.

Hydra takes sweepers from the package hydra_plugins alone, and looks through it at each start. So
what this one does is in fedexp.cli.search, which it imports when there is something to do.
"""

from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """Trials of a study of Optuna as jobs of Hydra's launchers. options: those of
    conf/sweeper/optuna.yaml."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take the launcher and the configuration of the command."""
        from hydra.core.plugins import Plugins

        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the trials. arguments: the overrides of the command."""
        assert self.config is not None, "Hydra calls setup before"
        from fedexp.cli.search import search

        return search(self.options, self.config, self.launcher, arguments)
