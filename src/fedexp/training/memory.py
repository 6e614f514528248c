"""Peak memory of a run."""

import resource
import sys
from pathlib import Path

import torch

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
