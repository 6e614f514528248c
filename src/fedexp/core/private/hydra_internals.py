"""Replace Hydra's configuration loader (see `fedexp.config.composing`).

A plugin cannot replace the loader.
"""

from hydra._internal import hydra as _application
from hydra._internal.config_loader_impl import ConfigLoaderImpl

__all__ = ["ConfigLoaderImpl"]


def replace_loader(loader: type[ConfigLoaderImpl]) -> None:
    """Make Hydra compose configurations with this loader."""
    _application.ConfigLoaderImpl = loader  # type: ignore[misc]


def current_loader() -> type[ConfigLoaderImpl]:
    """Return the loader with which Hydra currently composes configurations."""
    return _application.ConfigLoaderImpl
