"""With what a run was made: versions, commit, hardware, and what of it decides over the numbers."""

import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fedexp
from fedexp.hardware import Resolved
from fedexp.identity import fingerprint


def environment(container: Mapping[str, Any], hardware: Resolved) -> dict[str, Any]:
    """With what the numbers were made; under `determinism`, all that would have to be equal, beside the data, for them
    to come out the same to the last bit."""
    made_with = {"versions": versions(*NUMERIC, "hydra-core", "wandb"), "commit": commit()}
    decisive = {"config": fingerprint(container), "seeds": container["seeds"], "versions": versions(*NUMERIC)}
    decisive |= {"commit": made_with["commit"]} | hardware.arithmetic()
    return made_with | {"hardware": hardware.as_dict(), "determinism": decisive}


# Packages that take part in the numbers, from decoded images to solved linear programs.
NUMERIC = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "pillow")


def versions(*packages: str) -> dict[str, str]:
    """Of fedexp, Python and those packages that are installed."""
    found = {"fedexp": fedexp.__version__, "python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {"torch": str(torch.__version__)}  # with the build, such as +cpu


def commit() -> str | None:
    """The git commit of the fedexp checkout that runs, None when installed from a wheel; `+` = with local changes."""
    source = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=source, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != source.parents[1]:
            return None  # some other project's checkout holds the environment that fedexp is installed in
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
