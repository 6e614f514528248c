"""Find the checkout that contains this code, if any, and say how to install missing packages."""

from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]  # the checkout if fedexp runs from source


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
