"""Import optional packages, or say how to install them, from the checkout of this code if any."""

from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError, reason_of
from fedexp.core.provenance import ROOT


def import_extra(module: str, extra: str, setting: str) -> Any:
    """Return a module of a package that an extra of fedexp installs.

    setting: what needs the package, for the message. Raises ConfigError if the import fails.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{setting}: {reason_of(error)}; install it with {how_to_install(extra)}"
        ) from error


def how_to_install(extra: str) -> str:
    """Return the pip command that installs an extra of fedexp, from the checkout if possible.

    The versions of its packages that fedexp works with follow in parentheses.
    """
    versions = f" ({', '.join(requirements(extra))})"
    if (ROOT / "pyproject.toml").is_file() and (ROOT / "src" / "fedexp").is_dir():
        here = "" if Path.cwd() == ROOT else f" (in {ROOT})"
        return f"pip install -e '.[{extra}]'{here}{versions}"
    return f"pip install 'fedexp[{extra}]'{versions}"


def requirements(extra: str) -> list[str]:
    """Return the packages of an extra with their versions, such as `datasets<6,>=4.0`."""
    found = [line.partition("; extra == ") for line in metadata.requires("fedexp") or ()]
    return [package for package, _, name in found if name.strip("'\"") == extra]
