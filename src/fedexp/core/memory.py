"""Find the free memory, and format sizes in bytes."""

import os
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNKNOWN = 2**62


def free_memory() -> int:
    """Return the available memory in bytes, or a very large number if it is unknown.

    A job of Slurm or a container may have less than the machine.
    """
    return min(free_in_machine(), free_in_cgroups())


def free_in_cgroups() -> int:
    """Return the memory that the limits of this process's control groups leave."""
    found = [UNKNOWN]
    groups = OWN_CGROUP.read_text(encoding="utf-8").splitlines() if OWN_CGROUP.exists() else []
    for kinds, path in (line.split(":", 2)[1:] for line in groups):
        limit, parts = "memory.max", ("anon", "shmem")
        if kinds:  # version 1
            limit, parts = "memory.limit_in_bytes", ("total_rss", "total_shmem")
        folder = CGROUPS / kinds / path.lstrip("/")
        for each in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # no limit
                most = int((each / limit).read_text(encoding="ascii"))
                lines = (each / "memory.stat").read_text(encoding="ascii").splitlines()
                stat = dict(line.split() for line in lines)
                found.append(max(most - sum(int(stat.get(part, 0)) for part in parts), 0))
    return min(found)


def free_in_machine() -> int:
    if found := proc_bytes("meminfo", "MemAvailable"):
        return found
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return UNKNOWN


def proc_value(file: str, name: str) -> str:
    """Return the value of the first line `name: value` in a file of /proc, or an empty text."""
    with suppress(OSError):
        for line in Path("/proc", file).read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def proc_bytes(file: str, name: str) -> int:
    """Return a size such as `1024 kB` in a file of /proc in bytes, or 0 if it is unknown."""
    return 1024 * int(proc_value(file, name).removesuffix(" kB") or 0)


def size_of(number: int) -> str:
    """Format a number of bytes as text, in GB or MB."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
