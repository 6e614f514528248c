"""Provenance of a run: versions, commit, hardware, and what of it decides over the numbers."""

import functools
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fedexp
from fedexp.core.packages import ROOT
from fedexp.data.marks import BYTES
from fedexp.engine.hardware import Resolved
from fedexp.rundir.fingerprint import code_marks, fingerprint
from fedexp.training.state import State


def environment(container: Mapping[str, Any], hardware: Resolved, state: State) -> dict[str, Any]:
    """Return the versions and hardware with which the numbers were made; under `determinism`, all
    that would have to be equal, beside the data, for them to come out the same to the last bit.
    Where a run has been resumed with another setting, `spans` lists the rounds of each with its
    own, and beside it stands only what was equal in all."""
    made_with = {"versions": versions(*NUMERIC, "hydra-core", "wandb"), "commit": commit()}
    decisive = {
        "config": fingerprint(container),
        "seeds": container["seeds"],
        "versions": versions(*NUMERIC),
    }
    decisive |= {"commit": made_with["commit"]} | own_code(container) | hardware.arithmetic()
    if len(state.spans) > 1:
        differing = {
            key
            for span in state.spans
            for key, value in span.items()
            if decisive.get(key, value) != value
        }
        unknown = any(span.keys() == {"first"} for span in state.spans)
        decisive = {
            k: v
            for k, v in decisive.items()
            if k not in differing and not (unknown and k in state.spans[-1])
        }
        decisive["spans"] = list_spans(state)
    return made_with | {"hardware": hardware.as_dict(), "determinism": decisive}


def own_code(container: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the classes of a user's own, with the marks of their code."""
    marks = sorted(set(code_marks(container).values()))
    return {"code": marks} if marks else {}


def begin_span(
    state: State, container: Mapping[str, Any], hardware: Resolved, marks: Mapping[str, str]
) -> None:
    """Note the versions, hardware and data for the rounds from here on, unless they are as before.
    marks: `origin.marks_of` the run."""
    now = (
        {"versions": versions(*NUMERIC), "commit": commit()}
        | own_code(container)
        | {"data": {key: mark for key, mark in marks.items() if BYTES in mark}}
        | hardware.arithmetic()
    )
    # a checkpoint of an older version, which has not kept it
    if state.accuracy and not state.spans:
        state.spans.append({"first": 0})
    first = state.round + 1 if state.accuracy else 0
    if not state.spans or {k: v for k, v in state.spans[-1].items() if k != "first"} != now:
        state.spans.append({"first": first} | now)


def list_spans(state: State) -> list[dict[str, Any]]:
    """Return `rounds` (first and last) of each span, and its setting; only `rounds` where that was
    not kept."""
    lasts = [*(span["first"] - 1 for span in state.spans[1:]), state.round]
    return [
        {"rounds": [span["first"], last]}
        | {key: value for key, value in span.items() if key != "first"}
        for span, last in zip(state.spans, lasts, strict=True)
    ]


# Packages that take part in the numbers, from decoded images to solved linear programs.
NUMERIC = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "pillow")


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of fedexp, Python and those packages that are installed."""
    found = {"fedexp": fedexp.__version__, "python": platform.python_version()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = version(package)
    return found | {"torch": str(torch.__version__)}  # with the build, such as +cpu


@functools.cache
def version(package: str) -> str:
    """Return the version of an installed package. Raises PackageNotFoundError."""
    return metadata.version(package)


# the code that runs was loaded once, whatever becomes of the checkout; and git takes processes
@functools.cache
def commit() -> str | None:
    """Return the git commit of the fedexp checkout that runs, None when installed from a wheel; `+`
    = with local changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != ROOT:
            # some other project's checkout holds the environment that fedexp is installed in
            return None
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


PROCESSES = Path("/proc")


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Return the peak memory in bytes: `host` is the sum of the peaks of this process and its
    children, so at most this much was in use at once (pages that they share count for each);
    `device` what torch has held on a GPU, None on a CPU.

    A process that runs several jobs has the peak of all of them.
    """
    held = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return {"host": sum(map(peak_of, family())) or own_peak(), "device": held}


def family() -> list[Path]:
    """Return the processes of this run: /proc/self and its children; none where the system does not
    tell."""
    try:
        texts = [path.read_text() for path in (PROCESSES / "self" / "task").glob("*/children")]
    except OSError:
        return []
    return [PROCESSES / name for name in ("self", *" ".join(texts).split())]


def peak_of(process: Path) -> int:
    """Return the peak of a process's resident memory (VmHWM); 0 where it is gone or not told."""
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def own_peak() -> int:
    """Return the peak memory of this process alone, on systems without /proc."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
