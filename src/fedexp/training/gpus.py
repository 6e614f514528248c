"""Choice of the GPU that a job of a sweep takes: the one with the fewest jobs, and at most
`jobs_per_gpu` of them.

The jobs of all sweeps of a user on a machine agree by locks in files, one for each job on a GPU; a
lock ends with its process, also after kill -9. Tested with processes and made-up GPUs; it has not
run on a machine with several GPUs yet.
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
    """Return the names of the GPUs that this process sees, in torch's order; the same in every
    process that names them alike."""
    count, named = count_gpus(), environment.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if named is None else named.replace(" ", "").split(",")
    return list(names)[:count]


def default_folder() -> Path:
    """Return the default folder of this machine and this user: files of others could not be
    locked."""
    return Path(tempfile.gettempdir(), f"fedexp-gpus-{getpass.getuser()}")


@contextmanager
def one_gpu(
    names: Sequence[str], jobs_per_gpu: int, folder: Path | None = None, interval: float = 1
) -> Iterator[int]:
    """Yield the position in `names` of a GPU that is ours while the block runs; wait where all have
    as many jobs as may be, asking again every `interval` seconds. folder: where the locks are."""
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
    """Take the GPU with the fewest jobs, the first of several; None where each has too many."""
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
