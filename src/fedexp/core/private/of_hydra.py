"""Hydra and OmegaConf: the loader that composes, and nodes as they are written.

The loader: Hydra instantiates what the composed configuration names before it calls anything of
ours, and only the loader sees all ways in which a name can come in (see `fedexp.config.composing`);
no plugin can take its place. The nodes: the public functions of OmegaConf resolve interpolations,
which must be looked at first.
"""

from typing import Any

from hydra._internal import hydra as _application
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from omegaconf import DictConfig, ListConfig

__all__ = ["CORE_PLUGINS", "ConfigLoaderImpl", "ConfigRepository"]

# where Hydra's own launcher and sweeper are, as its configuration says
CORE_PLUGINS = "hydra._internal.core_plugins"


def replace_loader(loader: type[ConfigLoaderImpl]) -> None:
    """From now on Hydra composes with this loader."""
    _application.ConfigLoaderImpl = loader  # type: ignore[misc]


def current_loader() -> type[ConfigLoaderImpl]:
    """Return the loader that Hydra composes with."""
    return _application.ConfigLoaderImpl


def is_empty(node: Any) -> bool:
    """Return whether a node is None or `???`."""
    return node is None or node._is_none() or node._is_missing()


def is_interpolation(node: Any) -> bool:
    """Return whether a node is written with `${`."""
    return node._is_interpolation()


def written(node: Any) -> Any:
    """The value of a node as it is written."""
    return node._value()


def child(node: DictConfig | ListConfig, key: Any) -> Any:
    """A node in another one, not resolved."""
    return node._get_node(key)


def resolved(node: Any) -> Any:
    """The node that an interpolation stands for. Raises OmegaConfBaseException where there is
    none."""
    return node._dereference_node()
