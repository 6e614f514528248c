"""Provenance of a run: the versions, commit and hardware that produced its results."""

import functools
import platform
import resource
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fedexp
from fedexp.core.packages import ROOT
from fedexp.engine.hardware import Resolved

# packages that affect the results, from decoding images to solving linear programs
NUMERIC = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "pillow")
PROCESSES = Path("/proc")


def environment(hardware: Resolved) -> dict[str, Any]:
    """Return the versions, the commit and the hardware that produce the results."""
    return {
        "versions": versions(*NUMERIC, "hydra-core", "wandb"),
        "commit": commit(),
        "hardware": hardware.as_dict(),
    }


@functools.cache
def versions(*packages: str) -> dict[str, str]:
    """Return the versions of fedexp, Python and the given packages, if they are installed."""
    found = {"fedexp": fedexp.__version__, "python": platform.python_version()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | {"torch": str(torch.__version__)}  # includes the build, such as +cpu


# The result is cached, because the running code does not change and calling git is slow.
@functools.cache
def commit() -> str | None:
    """Return the git commit of the fedexp checkout, or None if fedexp was installed from a wheel.

    A `+` at the end means that the checkout has uncommitted changes.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != ROOT:
            # fedexp is installed in an environment inside another project's checkout
            return None
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Return the peak memory in bytes.

    The entry `host` is the sum of the peaks of this process and its child processes. This is an
    upper bound of the memory used at any time, because shared pages are counted once per process.
    The entry `device` is the memory that torch reserved on a GPU, or None on a CPU. If a process
    runs several jobs, the values are the peaks over all of these jobs.
    """
    held = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    host = 0
    with suppress(OSError):  # the system has no /proc
        children = (PROCESSES / "self" / "task").glob("*/children")
        names = " ".join(["self", *(path.read_text() for path in children)]).split()
        host = sum(peak_of(PROCESSES / name) for name in names)
    return {"host": host or own_peak(), "device": held}


def peak_of(process: Path) -> int:
    """Return a process's peak resident memory (VmHWM) in bytes, or 0 if it is unknown."""
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def own_peak() -> int:
    """Return this process's peak memory in bytes, on systems without /proc."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
