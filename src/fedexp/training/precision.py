"""Choose the fastest precision for a run with `hardware.precision=auto`."""

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.core.tree import Tree
from fedexp.engine.base import ClientRuntime, Cohort, Shared
from fedexp.engine.hardware import Resolved
from fedexp.engine.schedule import BatchSchedule

log = logging.getLogger("fedexp")
STEPS = 3  # steps per client in a timed call
CALLS = 3  # timed calls after a warm-up call; the fastest call is used


def choose_precision(
    hardware: Resolved, runtime: ClientRuntime, clients: int, before: str | None
) -> Resolved:
    """Replace the precision `auto` by the fastest one, and set up this process for it.

    clients: the number of clients per round.
    before: the precision that a resumed run started with, or None for a new run. This precision is
        used again if the device supports it.
    """
    if hardware.precision != "auto":
        return hardware
    names = hardware.precisions
    if before in names:
        chosen = hardware.choose(before, {})
    elif len(names) == 1:
        chosen = hardware.choose(names[0])
    else:
        seconds = time_steps(hardware, runtime, clients, names)
        chosen = hardware.choose(min(names, key=seconds.__getitem__), seconds)
        steps = ", ".join(f"{name} {1000 * seconds[name]:.1f} ms" for name in names)
        log.info("hardware.precision=auto: %s per step; using %s", steps, chosen.precision)
    chosen.apply()
    return chosen


def time_steps(
    hardware: Resolved, runtime: ClientRuntime, clients: int, precisions: Sequence[str]
) -> dict[str, float]:
    """Return the seconds that a local step of FedAvg takes in each precision.

    The steps run on the engine of the run. The vectorised engine trains all clients in one step,
    and the other engines train one client. The calls alternate between the precisions, so that
    other work on the machine slows down all of them equally.
    """
    count = clients if hardware.vectorises else 1
    cohort = make_timing_cohort(runtime, count)
    server = {"params": runtime.net.parameters(), "buffers": runtime.net.buffers()}
    engines = {name: copy.copy(hardware.trainer) for name in precisions}
    shared = {}
    for name in precisions:
        copied = replace(runtime, net=runtime.net.copy(precision=name))
        shared[name] = Shared(FedAvg(), copied, server, runtime.local.lr)
    found = dict.fromkeys(precisions, float("inf"))
    for call in range(1 + CALLS):
        for name in precisions:
            hardware.choose(name).apply()
            start = time.perf_counter()
            trained = engines[name].train(shared[name], cohort, False)
            trained.losses.tolist()  # waits for the device
            seconds = (time.perf_counter() - start) / STEPS
            if call:  # the first call warms up
                found[name] = min(found[name], seconds)
    return found


def make_timing_cohort(runtime: ClientRuntime, count: int) -> Cohort:
    """Return a cohort whose clients all train on the first training examples for a few steps."""
    size = runtime.local.batch_size
    index = torch.arange(STEPS * size).view(STEPS, size) % len(runtime.data.y_train)
    schedule = BatchSchedule(index, np.full(STEPS, size), None)
    empty: list[Tree] = [{}] * count
    roles = [FedAvg()] * count
    return Cohort(1, range(count), roles, [schedule] * count, empty, empty, empty)
