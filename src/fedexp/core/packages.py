"""The checkout that this code lies in, if any, and advice on installing a package that is not
there, for messages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]  # of a checkout, where it is one


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of fedexp: from the checkout that this code lies
    in, else by name."""
    if (ROOT / "pyproject.toml").is_file() and (ROOT / "src" / "fedexp").is_dir():
        here = "" if Path.cwd() == ROOT else f" (in {ROOT})"
        return f"pip install -e '.[{extra}]'{here}"
    return f"pip install 'fedexp[{extra}]'"
