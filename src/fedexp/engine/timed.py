"""Choice of the fastest way to compute by timing each for a few steps, once for a machine, model
and batch size.

What was found is kept below the user's cache directory ($XDG_CACHE_HOME, else ~/.cache), in
fedexp/ways: a file for each question, with the question in it. Of several processes that ask the
same one measures, and the others read. A file that is damaged, or answers another question, is
measured anew; where nothing can be written, each process measures.
"""

import copy
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

from fedexp.core.errors import StorageError
from fedexp.core.storage import write_atomically
from fedexp.engine.network import FunctionalNetwork, LiveNetwork
from fedexp.models import winograd

log = logging.getLogger("fedexp")
STEPS = 3  # timed, of each way in turn, after one that warms up; the fastest of each counts
PATIENCE = 120.0  # seconds to wait for another process that measures the same
Clock = Callable[[], float]


@dataclass(frozen=True)
class Way:
    """A way to compute the steps of one client."""

    precision: str  # fp32 | bf16
    convolution: str  # direct | winograd

    @property
    def name(self) -> str:
        return f"{self.precision} {self.convolution}"


@dataclass(frozen=True)
class Measured:
    """The fastest of several ways, and the seconds that a step took in each; none where a resumed
    run keeps its way."""

    way: Way
    seconds: Mapping[str, float]  # name of the way -> seconds
    decided: tuple[str, ...]  # the settings in which the ways differ

    def as_dict(self) -> dict[str, Any]:
        """Return the values as they stand in summary.json; `by_timing` may come out otherwise
        elsewhere."""
        return {"by_timing": list(self.decided), "seconds_of_a_step": dict(self.seconds)}


def fastest(
    ways: Sequence[Way],
    question: Mapping[str, Any],
    step_of: Callable[[Way], Callable[[], object]],
    clock: Clock = time.perf_counter,
) -> Measured:
    """Return the fastest of these ways: as it is noted for the question, else measured and noted.

    question: what else decides the answer, as JSON has it. step_of: makes the step of a way, which
    waits for its end.
    """
    whole = json.loads(json.dumps({**question, "ways": [way.name for way in ways]}))
    path = (
        folder()
        / f"{hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]}.json"
    )
    seconds = noted(path, whole)
    if seconds is None:
        with alone(path):
            seconds = noted(path, whole)  # another process may have measured meanwhile
            if seconds is None:
                seconds = measure({way.name: step_of(way) for way in ways}, clock)
                note(path, whole, seconds)
    return Measured(min(ways, key=lambda way: seconds[way.name]), seconds, differing(ways))


def differing(ways: Sequence[Way]) -> tuple[str, ...]:
    """Return the settings in which ways differ."""
    return tuple(
        name
        for name in ("precision", "convolution")
        if len({getattr(way, name) for way in ways}) > 1
    )


def measure(steps: Mapping[str, Callable[[], object]], clock: Clock) -> dict[str, float]:
    """Return the seconds of the fastest of a few steps of each; in turn, so that other work slows
    all of them."""
    for step in steps.values():
        step()
    found = dict.fromkeys(steps, float("inf"))
    for _ in range(STEPS):
        for name, step in steps.items():
            start = clock()
            step()
            found[name] = min(found[name], clock() - start)
    return found


def folder() -> Path:
    """Return the folder of the notes; like the XDG base directory specification, relative paths
    count as unset."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~"), ".cache")
    return home / "fedexp" / "ways"


def noted(path: Path, question: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the seconds that a file notes for this question; None where there is no such file or
    it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        seconds = content["seconds"]
        sound = content["question"] == question and set(seconds) == set(question["ways"])
        return (
            {str(k): float(v) for k, v in seconds.items()}
            if sound and all(v > 0 for v in seconds.values())
            else None
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def note(path: Path, question: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
    try:
        text = json.dumps({"question": question, "seconds": seconds}, indent=1)
        write_atomically(path, text.encode(), sync_folder=False)
    except (OSError, StorageError) as error:
        log.debug("what was measured cannot be kept (%s); the next run measures again", error)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the question while the block runs, or go on without where that cannot be had."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"), timeout=PATIENCE)
        lock.acquire()
    except (OSError, NotImplementedError, Timeout):  # not every file system has locks
        yield
        return
    try:
        yield
    finally:
        lock.release()


# --- steps of a model


def training_step(module: nn.Module, way: Way, x: torch.Tensor) -> Callable[[], object]:
    """Return a step of plain training on a copy of a model: forward and backward pass and update,
    on inputs x [B, ...].

    What is minimised is no matter to the time.
    """
    module = copy.deepcopy(module)
    if way.convolution == "winograd":
        winograd.convert(module)
    net = LiveNetwork(FunctionalNetwork(module, way.precision))

    def step() -> None:
        loss = net(net.params, x).logits.square().mean()
        grads = torch.autograd.grad(loss, list(net.params.values()), materialize_grads=True)
        with torch.no_grad():
            for value, grad in zip(net.params.values(), grads, strict=True):
                value.sub_(grad, alpha=1e-6)
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    return step


def winograd_pays(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether any convolution of a model would be computed by Winograd's method on inputs
    x."""
    found: list[bool] = []

    def look(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, winograd.Conv2d)
        found.append(layer.pays(inputs[0]))

    module = copy.deepcopy(module)
    winograd.convert(module)
    layers = [layer for layer in module.modules() if isinstance(layer, winograd.Conv2d)]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    if layers:
        with torch.no_grad():
            module.eval()(x)
    for hook in hooks:
        hook.remove()
    return any(found)
