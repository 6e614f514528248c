"""A check of what Hydra composes, before Hydra calls anything that it names.

Hydra instantiates the classes of `hydra.callbacks`, `hydra.launcher` and `hydra.sweeper`, and those
of its two logging nodes, before the configuration of a run is looked at. The loader of this module
takes the place of Hydra's own, also in the processes that a launcher starts: a configuration that
names a class that is neither known here nor named in a directory of the user's is refused as soon
as it has been composed, whatever way the name came in.
"""

import copy
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from fedexp.config.trust import named_by
from fedexp.core.errors import ConfigError
from fedexp.core.private import of_hydra
from fedexp.core.private.of_hydra import CORE_PLUGINS, ConfigLoaderImpl, ConfigRepository

PLUGINS = "hydra_plugins.hydra"
KNOWN = {
    "fedexp.cli.sweeps.Sweeps",
    *(
        "hydra.experimental.callbacks.LogJobReturnCallback",
        "hydra.experimental.callbacks.PickleJobInfoCallback",
    ),
    *(f"{CORE_PLUGINS}.basic_launcher.BasicLauncher", f"{CORE_PLUGINS}.basic_sweeper.BasicSweeper"),
    f"{PLUGINS}_joblib_launcher.joblib_launcher.JoblibLauncher",
    *(
        f"{PLUGINS}_submitit_launcher.submitit_launcher.{name}Launcher"
        for name in ("Local", "Slurm")
    ),
    f"{PLUGINS}_ray_launcher.ray_launcher.RayLauncher",
    "hydra_plugins.fedexp_optuna.OptunaSweeper",
    *("logging.Formatter", "logging.StreamHandler", "logging.FileHandler", "logging.NullHandler"),
    *(f"logging.handlers.{kind}FileHandler" for kind in ("Rotating", "TimedRotating", "Watched")),
    *(
        "rich.logging.RichHandler",
        "colorlog.ColoredFormatter",
        "ext://sys.stdout",
        "ext://sys.stderr",
    ),
}
# nodes that Hydra makes objects from
CALLED = ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")
# keys whose value is imported: of Hydra's instantiate and of logging's dictConfig
NAMES = ("_target_", "()", "class")
HARMLESS = ("${fedexp.gpus:}",)  # our own resolver, a number; asking it would import torch


class CheckedRepository(ConfigRepository):
    """The groups of the configuration directories; an option outside of them is refused."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckedRepository":
        """Return a shallow copy: Hydra composes with a copy only to replace its list of sources,
        whole."""
        return copy.copy(self)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Raise ConfigError for a path that leaves the configuration directory."""
        normal = posixpath.normpath(config_path.replace("\\", "/"))
        if normal.startswith(("/", "..")):
            raise ConfigError(
                f"{config_path}: lies outside the configuration directories; --config-dir adds one"
            )
        return super().load_config(config_path)


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader, whose configurations are checked before anybody sees them."""

    def __init__(self, config_search_path: ConfigSearchPath):
        super().__init__(config_search_path)
        self.repository = CheckedRepository(config_search_path)

    def load_configuration(self, *arguments: Any, **options: Any) -> DictConfig:
        """Raise ConfigError where the configuration names a class for Hydra that is not to be
        trusted."""
        config = super().load_configuration(*arguments, **options)
        check_called(config)
        return config


def install() -> None:
    """Puts the checked loader in the place of Hydra's own."""
    of_hydra.replace_loader(CheckedLoader)


@contextmanager
def checked() -> Iterator[None]:
    """Have Hydra compose with the checked loader while the block runs, and with its own
    afterwards."""
    before = of_hydra.current_loader()
    install()
    try:
        yield
    finally:
        of_hydra.replace_loader(before)


def check_called(config: DictConfig) -> None:
    """Raise ConfigError unless everything that Hydra will import is known, or named in a directory
    of the user's."""
    folders = [
        Path(each.path) for each in config.hydra.runtime.config_sources if each.schema == "file"
    ]
    for key, name in called_names(config.hydra, "hydra"):
        if name not in KNOWN and (name.startswith("ext://") or not named_by(name, folders, NAMES)):
            raise ConfigError(
                f"{key}={name}: is not among the classes that Hydra may call here; one of your own,"
                " or of a plugin, is named in a yaml file of your own directory, which"
                " --config-dir gives"
            )


def called_names(node: object, key: str) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of everything in a node of Hydra's that is imported when Hydra uses it,
    interpolations followed."""
    strict, last = key.split(".")[1:2] and key.split(".")[1] in CALLED, key.rpartition(".")[2]
    imported = last == "_target_" or (last in NAMES and "_logging." in key)
    if of_hydra.is_empty(node):
        return
    if of_hydra.is_interpolation(node):
        if imported:
            yield key, str(of_hydra.written(node))  # it could stand for another name a moment later
        if not strict or of_hydra.written(node) in HARMLESS:
            return
        node = followed(node, key)
    if isinstance(node, DictConfig):
        for name in list(node):
            yield from called_names(of_hydra.child(node, name), f"{key}.{name}")
    elif isinstance(node, ListConfig):
        for number in range(len(node)):
            yield from called_names(of_hydra.child(node, number), f"{key}.{number}")
    elif node is not None and (imported or str(of_hydra.written(node)).startswith("ext://")):
        yield key, str(of_hydra.written(node))


def followed(node: object, key: str) -> Any:
    """Follow an interpolation to its value; None for a text that is only known when the job runs (a
    directory)."""
    try:
        return of_hydra.resolved(node)
    except OmegaConfBaseException as error:
        text = str(of_hydra.written(node))
        if text.startswith("${") and text.endswith("}"):  # else it can only be a text
            raise ConfigError(
                f"{key}={text}: cannot be resolved ({str(error).splitlines()[0]})"
            ) from error
        return None
