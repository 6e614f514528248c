"""Compose configurations with Hydra for subcommands and for runs started from Python."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedexp.cli import launchers
from fedexp.cli.arguments import parse, quote_literal
from fedexp.cli.messages import explain
from fedexp.config import composing, run_names
from fedexp.config.options import conf_directory
from fedexp.core.errors import ConfigError

# errors raised by Hydra, OmegaConf and yaml that `explain` turns into messages
COMPOSITION_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    ValueError,
    yaml.YAMLError,
    RecursionError,
)


@contextmanager
def composed(overrides: Sequence[str], config_dir: Path | None = None) -> Iterator[DictConfig]:
    """Yield the configuration of `fedexp <overrides>`, including its node `hydra`.

    While the block runs, this is Hydra's current configuration, and classes named in `config_dir`
    are trusted. Hydra's previous state is restored afterwards. If the composition fails,
    ConfigError has the message that the command line would print.
    """
    extra = [] if config_dir is None else [check_config_dir(config_dir)]
    plan = parse([*(f"--config-dir={path}" for path in extra), *checked_overrides(overrides)])
    with composing.use_loader(), isolated_hydra():
        try:
            config = compose_all(plan.launches[0], extra)
        except ConfigError:
            raise
        except COMPOSITION_ERRORS as error:
            raise ConfigError(explain(error, conf_directory(), extra)) from error
        HydraConfig.instance().set_config(config)
        yield config


def check_config_dir(config_dir: Path) -> Path:
    """Return the absolute path of a user's config directory."""
    return config_dir.expanduser().absolute()


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


def compose_all(overrides: Sequence[str], extra: Sequence[Path]) -> DictConfig:
    """Compose the configuration with Hydra, including its node `hydra`."""
    register()
    with initialize_config_dir(str(conf_directory().resolve()), version_base="1.3"):
        return compose(
            "config", [*overrides, *search_path_override(extra)], return_hydra_config=True
        )


def register() -> None:
    """Register fedexp's resolvers, launchers and sweepers with Hydra."""
    run_names.register()
    launchers.register(conf_directory())


def search_path_override(folders: Sequence[Path]) -> list[str]:
    """Return the override that tells Hydra where the user's config groups are."""
    places = ",".join(quote_literal(f"file://{folder.resolve()}") for folder in folders)
    return [f"hydra.searchpath=[{places}]"] if folders else []


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
