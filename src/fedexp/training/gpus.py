"""Choose the GPU with the fewest jobs for a job of a sweep, up to `jobs_per_gpu` jobs per GPU.

All sweeps of a user on a machine coordinate through lock files, one for each job on a GPU. A lock
ends with its process, even after kill -9. This is tested with processes and simulated GPUs, but not
yet on a machine with several GPUs.
"""

import getpass
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock

from fedexp.rundir.lock import is_occupied, occupied

log = logging.getLogger("fedexp")


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the GPUs that this process sees, in torch's order.

    Processes that use the same names for the GPUs get the same list.
    """
    count, named = count_gpus(), environment.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if named is None else named.replace(" ", "").split(",")
    return list(names)[:count]


def default_folder() -> Path:
    """Return the default folder of the locks, one per machine and user.

    Other users' files could not be locked.
    """
    return Path(tempfile.gettempdir(), f"fedexp-gpus-{getpass.getuser()}")


@contextmanager
def reserve_gpu(
    names: Sequence[str], jobs_per_gpu: int, folder: Path | None = None, interval: float = 1
) -> Iterator[int]:
    """Yield the position in `names` of a GPU that is reserved while the block runs.

    If all GPUs have the maximum number of jobs, wait and try again every `interval` seconds.

    folder: where the lock files are.
    """
    folder = default_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    choosing, waits = FileLock(folder / "choosing.lock"), False
    with ExitStack() as held:
        while True:
            with choosing:
                position = take(names, jobs_per_gpu, folder, held)
            if position is not None:
                break
            if not waits:
                log.info("waiting for a GPU: each has hardware.jobs_per_gpu=%d jobs", jobs_per_gpu)
            waits = True
            time.sleep(interval)
        try:
            yield position
        finally:
            with choosing:
                held.close()


def take(names: Sequence[str], jobs_per_gpu: int, folder: Path, held: ExitStack) -> int | None:
    """Reserve the GPU with the fewest jobs, or return None if all GPUs have too many jobs."""
    running: list[list[int]] = []
    for name in names:
        slots = (folder / name).glob("*")
        running.append([int(slot.name) for slot in slots if is_occupied(slot)])
    position = min(range(len(names)), key=lambda i: len(running[i]))
    if len(running[position]) >= jobs_per_gpu:
        return None
    number = min(set(range(jobs_per_gpu)) - set(running[position]))
    slot = folder / names[position] / str(number)
    slot.mkdir(parents=True, exist_ok=True)
    held.enter_context(occupied(slot))
    return position


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
