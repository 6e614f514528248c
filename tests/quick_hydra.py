"""Hydra composes the same, sooner: what it reads and merges from files that no test changes is done once in a process.

Kept as bytes: each composition gets nodes of its own, which it may change. Directories that a test made, and options
that it put into Hydra's store, are read anew.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType

CONF = Path(__file__).resolve().parents[1] / "conf"
UNCHANGED = {("file", str(CONF)), ("pkg", "hydra.conf")}
load_config, compose = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
LOADED: dict[Any, bytes] = {}
COMPOSED: dict[Any, bytes] = {}
ALIVE: dict[int, Any] = {}  # nodes of the store, so that no other one gets the id of one that is gone


def nodes(store: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """What is in Hydra's store, by name and identity."""
    for name, node in store.items():
        if isinstance(node, dict):
            yield (name, -1)
            yield from nodes(node)
        else:
            ALIVE[id(node)] = node
            yield (name, id(node))


def in_store() -> tuple[tuple[str, int], ...]:
    return tuple(nodes(ConfigStore.instance().repo))


def load_config_once(self: ConfigRepository, config_path: str) -> Any:
    """`origin` says what a configuration was read from; None: from something that may change."""
    source = self._find_object_source(config_path, ObjectType.CONFIG)
    structured = source is not None and source.scheme() == "structured"
    if source is None or not (structured or (source.scheme(), source.path) in UNCHANGED):
        return load_config(self, config_path)
    origin = (source.scheme(), source.provider, source.path, config_path, in_store() if structured else None)
    if origin not in LOADED:
        LOADED[origin] = pickle.dumps(load_config(self, config_path))
    result = pickle.loads(LOADED[origin])
    result.origin = origin
    return result


def compose_once(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
    """Of the same files in the same order and places comes the same."""
    origins = [getattr(repo.load_config(each.config_path), "origin", None) for each in defaults]
    if None in origins:
        return compose(self, defaults, repo)
    places = [(each.parent, each.package, each.is_self, each.primary) for each in defaults]
    key = (*origins, *places, in_store())
    if key not in COMPOSED:
        COMPOSED[key] = pickle.dumps(compose(self, defaults, repo))
    return pickle.loads(COMPOSED[key])
