"""Find the checkout that contains this code, if any, and say how to install missing packages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]  # the checkout if fedexp runs from source


def how_to_install(extra: str) -> str:
    """Return the pip command that installs an extra of fedexp, from the checkout if possible."""
    if (ROOT / "pyproject.toml").is_file() and (ROOT / "src" / "fedexp").is_dir():
        here = "" if Path.cwd() == ROOT else f" (in {ROOT})"
        return f"pip install -e '.[{extra}]'{here}"
    return f"pip install 'fedexp[{extra}]'"
