"""Assign each job of a sweep to the GPU with the fewest jobs, at most `jobs_per_gpu` per GPU.

All sweeps that a user runs on a machine coordinate through lock files. Each job on a GPU holds one
lock. The lock is released when the process ends, even by kill -9. This has been tested with
processes and simulated GPUs, but not yet on a machine with several GPUs.
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
    """Return the names of the GPUs that are visible to this process, in torch's order.

    The names come from CUDA_VISIBLE_DEVICES. If this variable is not set, the names are the numbers
    of the GPUs.
    """
    count, named = count_gpus(), environment.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if named is None else named.replace(" ", "").split(",")
    return list(names)[:count]


def default_folder() -> Path:
    """Return the default folder of the lock files.

    Each user of a machine has a separate folder, because a user cannot lock other users' files.
    """
    return Path(tempfile.gettempdir(), f"fedexp-gpus-{getpass.getuser()}")


@contextmanager
def reserve_gpu(
    names: Sequence[str], jobs_per_gpu: int, folder: Path | None = None, interval: float = 1
) -> Iterator[int]:
    """Reserve a GPU while the block runs, and yield its position in `names`.

    If every GPU has `jobs_per_gpu` jobs, try again every `interval` seconds.

    folder: the folder of the lock files. None: `default_folder`.
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
                log.info(
                    "waiting for a GPU: each GPU already has hardware.jobs_per_gpu=%d jobs",
                    jobs_per_gpu,
                )
            waits = True
            time.sleep(interval)
        try:
            yield position
        finally:
            with choosing:
                held.close()


def take(names: Sequence[str], jobs_per_gpu: int, folder: Path, held: ExitStack) -> int | None:
    """Reserve the GPU with the fewest jobs and return its position in `names`.

    Return None if every GPU has `jobs_per_gpu` jobs.

    held: the stack that holds the lock until it is closed.
    """
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
