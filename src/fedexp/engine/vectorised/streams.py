"""Run work at the same time as other work of a local step, while the step is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


def is_recorded(device: torch.device) -> bool:
    """Return whether the current stream of a device is recorded as a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that marks the present end of the recorded work, or None without a graph."""
    if not is_recorded(device):
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def beside(device: torch.device, start: torch.cuda.Event | None = None) -> Iterator[None]:
    """Record the block such that it runs beside later work, until `join` is called.

    The block starts at the mark `start`, or by default after all work recorded before. Until
    `join`, keep the tensors that the block reads, because later work would reuse their memory, and
    do not use its results. Without a graph, this has no effect, since memory that the caching
    allocator hands from one stream to another would have to be marked.
    """
    if not is_recorded(device):
        yield
        return
    side = _side(device)
    if start is None:
        side.wait_stream(torch.cuda.current_stream(device))
    else:
        side.wait_event(start)
    with torch.cuda.stream(side):
        yield


def join(device: torch.device) -> None:
    """Let later work wait for the blocks of `beside`, of which there must be at least one."""
    if is_recorded(device):
        torch.cuda.current_stream(device).wait_stream(_side(device))


@lru_cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
