"""Compose configurations with Hydra for subcommands and for runs started from Python."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from traceback import walk_tb
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedexp.config import launchers
from fedexp.config.arguments import hydra_arguments
from fedexp.config.messages import explain
from fedexp.config.options import conf_directory
from fedexp.config.overrides import UNQUOTED, quoted
from fedexp.core.errors import ConfigError
from fedexp.core.storage import display_path

# errors of Hydra, OmegaConf and yaml that `explain` turns into messages
OWN_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
COMPOSITION_ERRORS = (*OWN_ERRORS, ValueError, RecursionError)
LIBRARIES = ("hydra", "omegaconf", "yaml")


def is_of_composition(error: Exception) -> bool:
    """Return whether Hydra, OmegaConf or yaml raised an error, not the code that Hydra runs."""
    if isinstance(error, OWN_ERRORS):
        return True
    frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in reversed(frames)]
    last = next(each for each in packages if each in LIBRARIES or each.startswith("fedexp"))
    return isinstance(error, COMPOSITION_ERRORS) and last in LIBRARIES


@contextmanager
def composed(overrides: Sequence[str], config_dir: Path | None = None) -> Iterator[DictConfig]:
    """Yield the configuration of `fedexp <overrides>`, including its node `hydra`.

    While the block runs, this is Hydra's current configuration, and classes named in `config_dir`
    are trusted. Hydra's previous state is restored afterwards. If the composition fails,
    ConfigError has the message that the command line would print.
    """
    folders = [] if config_dir is None else [config_dir.expanduser().absolute()]
    (written,) = hydra_arguments(checked_overrides(overrides), folders)
    if folders:
        written.append(f"hydra.searchpath=[{quoted(f'file://{folders[0]}')}]")
    with isolated_hydra():
        launchers.register()
        try:
            with initialize_config_dir(str(conf_directory().resolve()), **launchers.DEFAULTS):
                config = compose("config", written, return_hydra_config=True)
        except COMPOSITION_ERRORS as error:
            raise ConfigError(explain(error, folders)) from error
        HydraConfig.instance().set_config(config)
        yield config


def trusted_classes(config_dir: Path | None) -> AbstractContextManager[Any]:
    """Return a context manager that trusts the classes named in a user's config directory."""
    return composed([], config_dir) if config_dir else nullcontext()


def checked_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides as a list.

    Raises ConfigError unless the overrides are a list of strings without flags.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            f"{overrides!r}: must be a list of overrides, such as ['algorithm=fedntd', 'rounds=5']"
        )
    if wrong := [each for each in overrides if not isinstance(each, str)]:
        raise ConfigError(f"{wrong[0]!r}: must be a string of the form key=value")
    if flags := [each for each in overrides if each.startswith("-")]:
        raise ConfigError(f"{flags[0]}: must be an override (key=value), not a flag")
    return list(overrides)


def path_override(key: str, path: Path) -> str:
    """Return the override that sets a key to a path, as a user would type it."""
    shown = str(display_path(path))
    return f"{key}={shown if UNQUOTED.fullmatch(shown) else quoted(shown)}"


@contextmanager
def isolated_hydra() -> Iterator[None]:
    """Clear Hydra's global state while the block runs, and restore it afterwards.

    The state may belong to another Hydra application or to a notebook.
    """
    application, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().clear()
        if application is not None:
            GlobalHydra.instance().initialize(application)
        HydraConfig.instance().cfg = config


def without_hydra(config: DictConfig) -> DictConfig:
    """Return the configuration without its node `hydra`."""
    own = config.copy()
    with open_dict(own):
        own.pop("hydra", None)
    return own
