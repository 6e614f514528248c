"""Hydra's composition outside its command line: of a subcommand's overrides, and of a run that
Python starts."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedexp.cli import launchers
from fedexp.cli.arguments import literal, parse
from fedexp.cli.messages import explain
from fedexp.config import composing, run_names
from fedexp.config.options import conf_directory
from fedexp.core.errors import ConfigError

# errors of Hydra, OmegaConf and yaml that `explain` puts into words
OF_COMPOSING = (
    HydraException,
    OmegaConfBaseException,
    ValueError,
    yaml.YAMLError,
    RecursionError,
)


@contextmanager
def composed(overrides: Sequence[str], config_dir: Path | None = None) -> Iterator[DictConfig]:
    """Yield the configuration that `fedexp <overrides>` runs with, its node `hydra` included; while
    the block runs, Hydra knows it as the one of this job, and classes that `config_dir` names are
    trusted.

    What Hydra held before is there again afterwards. Raises ConfigError with the messages of the
    command line.
    """
    extra = [] if config_dir is None else [checked(config_dir)]
    plan = parse([*(f"--config-dir={path}" for path in extra), *listed(overrides)])
    with ExitStack() as held:
        held.enter_context(composing.checked())
        held.enter_context(hydra_aside())
        try:
            config = compose_all(plan.launches[0], extra)
        except ConfigError:
            raise
        except OF_COMPOSING as error:
            raise ConfigError(explain(error, conf_directory(), extra)) from error
        HydraConfig.instance().set_config(config)
        yield config


def checked(config_dir: Path) -> Path:
    """Return the absolute path of a directory of the user's own; raise ConfigError unless it can be
    read safely."""
    from fedexp.core.yaml_files import check_directories

    check_directories([config_dir])
    return config_dir.expanduser().absolute()


def listed(overrides: Sequence[str]) -> list[str]:
    """Return overrides that Python gives as a list; raise ConfigError for anything else, and for a
    flag."""
    if isinstance(overrides, str):
        raise ConfigError(
            f"{overrides!r}: must be a list of overrides, such as ['algorithm=fedntd', 'rounds=5']"
        )
    if wrong := [each for each in overrides if not isinstance(each, str)]:
        raise ConfigError(f"{wrong[0]!r}: must be a text of the form key=value")
    if flags := [each for each in overrides if each.startswith("-")]:
        raise ConfigError(
            f"{flags[0]}: a flag of the command line; here only overrides (key=value) are taken"
        )
    return list(overrides)


def compose_all(overrides: Sequence[str], extra: Sequence[Path]) -> DictConfig:
    """Compose with Hydra, its own node included."""
    register()
    with initialize_config_dir(str(conf_directory().resolve()), version_base="1.3"):
        return compose("config", [*overrides, *search_path(extra)], return_hydra_config=True)


def register() -> None:
    """Make fedexp's resolvers, launchers and sweepers known to Hydra."""
    run_names.register()
    launchers.register(conf_directory())


def search_path(folders: Sequence[Path]) -> list[str]:
    """Return the override by which Hydra finds the user's own groups."""
    places = ",".join(literal(f"file://{folder.resolve()}") for folder in folders)
    return [f"hydra.searchpath=[{places}]"] if folders else []


@contextmanager
def hydra_aside() -> Iterator[None]:
    """Put what Hydra holds in this process (an application's, a notebook's own) aside while the
    block runs."""
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
    """Return the configuration of the run alone."""
    own = config.copy()
    with open_dict(own):
        own.pop("hydra", None)
    return own
