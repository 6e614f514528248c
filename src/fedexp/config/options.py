"""Find the groups, options and keys in conf/ and in the users' config directories."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import omegaconf
from omegaconf import OmegaConf

from fedexp.core import storage
from fedexp.core.errors import ConfigError

# Folders of conf/ that are not config groups with keys.
PRESETS = ("experiment", "launcher", "sweep", "sweeper", "tuned")
# groups that may have several options in a run, each under its own name, as in tracker.wandb
MULTIPLE = ("tracker", "callback", "analysis", "forgetting_metric")
FILE = "file://"  # begins the paths of directories in Hydra's search path
ALIASES = {"dirichlet": "lda"}  # name of a partition in the literature -> option
PACKAGE = re.compile(r"^# @package (\S+)", re.MULTILINE)


def add_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register a resolver with OmegaConf, which renamed its function for this in version 2.4."""
    is_old = omegaconf.__version__.startswith("2.3.")
    register: Any = OmegaConf.register_new_resolver if is_old else OmegaConf.register_resolver
    register(name, resolver, replace=True)


def list_groups(directories: Sequence[Path]) -> list[str]:
    """Return the names of the config groups."""
    folders = [path for each in directories if each.is_dir() for path in each.iterdir()]
    names = {path.name for path in folders if path.is_dir()}
    return sorted(names - {*PRESETS, "__pycache__", "hydra"})


def list_options(group: str, directories: list[Path]) -> list[str]:
    """Return a group's options, including those in subfolders, such as `fedntd/cifar10_s2`.

    A file whose name begins with `_` is not an option. It has values that several options share.
    """
    if group == "sweep":
        return sorted(read_sweeps(directories))
    folders = [directory / group for directory in directories]
    paths = [
        (path, f) for f in folders for path in f.rglob("*.yaml") if not path.name.startswith("_")
    ]
    return sorted({path.relative_to(f).with_suffix("").as_posix() for path, f in paths})


def read_sweeps(directories: Sequence[Path]) -> dict[str, tuple[Path, Any]]:
    """Return a dict that maps sweeps to (file, content), from the folder `sweep` of each directory.

    If several sweeps have the same name, the first one is returned. A file with the key `blocks`
    defines one sweep, named after the file. Any other file maps names to sweeps, and has default
    values under the key `defaults`. If a file cannot be read, the content is the exception.
    """
    found: dict[str, tuple[Path, Any]] = {}
    for path in (path for each in directories for path in sorted(each.glob("sweep/*.yaml"))):
        try:
            content = parse_sweeps(path.read_text(encoding="utf-8"))
            sweeps = {path.stem: content} if "blocks" in content else dict(content)
            defaults = sweeps.pop("defaults", {})
            sweeps = {str(name): defaults | dict(sweep) for name, sweep in sweeps.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            sweeps = {path.stem: error}
        for name, sweep in sweeps.items():
            found.setdefault(name, (path, sweep))
    return found


@lru_cache(maxsize=32)
def parse_sweeps(text: str) -> Any:
    """Parse a file of sweeps. The result is shared, so it must not be changed.

    A command that compares several sweeps would otherwise parse the same files for each of them.
    """
    return storage.load_yaml(text)


def find_option(group: str, name: str, folders: Sequence[Path]) -> Path | None:
    """Return the first file of an option in the folders, or None."""
    paths = [folder / group / f"{name}.yaml" for folder in folders]
    return next((path for path in paths if path.exists()), None)


def values_in(path: Path, group: str) -> dict[str, Any]:
    """Return the values in an option's file by dotted key. Mappings are also values."""
    text = path.read_text(encoding="utf-8")
    content, found = storage.load_yaml(text), PACKAGE.search(text)
    package = found[1] if found else group
    prefix = "" if package == "_global_" else f"{package}."
    values = {} if "." not in package else {package: content}
    return values | dict(walk(content, prefix)) if isinstance(content, dict) else values


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for nested mappings, for each mapping before its entries."""
    for name, child in node.items():
        yield f"{prefix}{name}", child
        if isinstance(child, dict):
            yield from walk(child, f"{prefix}{name}.")


def known_keys(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Return a dict that maps each key that a user may set to the options that define the key.

    Options are written as `group=option`. The list is empty for keys that every run has. folders:
    the directories with the user's config groups.
    """
    main, places = storage.read_values(conf_directory() / "config.yaml"), conf_directories()
    places += [each for each in folders if each not in places]
    keys: dict[str, list[str]] = {
        key: [] for key, _ in walk(main) if not key.startswith(("hydra", "defaults"))
    }
    keys |= {"sweep": [], "preview": []}
    for group in list_groups(places):
        keys[group] = []
        for path in sorted(path for each in places for path in (each / group).glob("*.yaml")):
            for key in values_in(path, group):
                if key.split(".")[-1] != "defaults" and not (key in keys and not keys[key]):
                    keys.setdefault(key, []).append(f"{group}={path.stem}")
    return keys


def conf_directory() -> Path:
    """Return conf/ of the installed package or of the checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parents[1] / "conf"):
        if (candidate / "config.yaml").exists():
            return candidate
    raise ConfigError(
        f"conf/config.yaml: not found in {package} or in its checkout; reinstall fedexp"
    )


def conf_directories() -> list[Path]:
    """Return fedexp's conf/, then the directories that `added_directories` returns."""
    return [conf_directory(), *added_directories()]


@cache
def added_directories() -> tuple[Path, ...]:
    """Return the directories that installed packages add to Hydra's search path.

    A package adds its own conf/ with a `SearchPathPlugin`. Plugins that add something else, such as
    `pkg://...`, are left out.
    """
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    paths: list[str] = []

    def add(provider: str, path: str, anchor: Any = None) -> None:
        paths.append(path)

    # what a plugin may call of Hydra's abstract ConfigSearchPath
    added: Any = SimpleNamespace(append=add, prepend=add, get_path=list)
    for plugin in Plugins.instance().discover(SearchPathPlugin):
        made = plugin()
        assert isinstance(made, SearchPathPlugin)
        made.manipulate_search_path(added)
    return tuple(Path(path[len(FILE) :]) for path in paths if path.startswith(FILE))
