"""Find the machine's free memory, and format sizes in bytes."""

import os
from pathlib import Path


def free_memory() -> int:
    """Return the available memory in bytes, or a very large number if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return 2**62


def size_of(number: int) -> str:
    """Format a number of bytes as text, in GB or MB."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
