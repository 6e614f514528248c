"""Choice of the way in which a run computes a client's steps, where its settings leave that to
timing (`auto`)."""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedexp.data.types import Data
from fedexp.engine import timed
from fedexp.engine.hardware import Resolved
from fedexp.engine.timed import Measured, Way

log = logging.getLogger("fedexp")


def with_fastest_way(
    hardware: Resolved,
    module: nn.Module,
    data: Data,
    batch_size: int,
    before: Mapping[str, Any] | None,
) -> Resolved:
    """Return the hardware with the fastest way of computing steps of `batch_size` examples where
    there are several.

    before: what `way_of` gave when a run began that is resumed, which is kept where there is that
    way; {} where that was not noted: then the convolution is chosen as it was then, by the
    instruction set; None: the run is new.
    """
    ways = hardware.ways
    if len(ways) == 1:
        return hardware.choose(ways[0])
    x = first_examples(data, batch_size, hardware)
    if any(way.convolution == "winograd" for way in ways) and not timed.winograd_pays(module, x):
        # What no layer would compute by it is not worth a question; nor does the choice change
        # anything.
        ways = [way for way in ways if way.convolution == "direct"]
        if len(ways) == 1:
            return hardware.choose(ways[0])
    found = kept(before, ways)
    if found is None and before == {} and hardware.precision != "auto":
        return hardware
    if found is None:
        found = timed.fastest(
            ways, question_of(hardware, module, x), lambda way: timed.training_step(module, way, x)
        )
        steps = ", ".join(
            f"{name} {1000 * seconds:.1f} ms" for name, seconds in found.seconds.items()
        )
        log.info("timed, a step of %d examples: %s; taking %s", len(x), steps, found.way.name)
    chosen = hardware.choose(found.way, found)
    chosen.apply()  # its precision may want other switches
    return chosen


def way_of(hardware: Resolved) -> dict[str, str]:
    """Return the way that a resumed run is to keep."""
    return {"precision": hardware.precision, "convolution": hardware.convolves}


def kept(before: Mapping[str, Any] | None, ways: list[Way]) -> Measured | None:
    """Return the way that a run began with, where it is among these, or one of the same precision:
    that decides about the numbers, and another device need not have the other."""
    if before is None:
        return None
    same = [way for way in ways if way.precision == before.get("precision")]
    exact = (way for way in same if way.convolution == before.get("convolution"))
    way = next(exact, next(iter(same), None))
    return None if way is None else Measured(way, {}, timed.differing(ways))


def first_examples(data: Data, count: int, hardware: Resolved) -> torch.Tensor:
    """Return the inputs of the first training examples, as the model reads them: [count, ...]."""
    here = data.to(hardware.device)
    index = torch.arange(min(count, len(data.y_train)), device=hardware.device)
    return here.inputs(here.x_train, index, None, None, hardware.dtype)


def question_of(hardware: Resolved, module: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Return what decides how fast each way is, beside the way."""
    shapes = [(name, tuple(value.shape)) for name, value in module.named_parameters()]
    return {
        "machine": hardware.as_dict()["name"],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": hardware.threads,
        "torch": str(torch.__version__),
        "model": hashlib.sha256(f"{module}{shapes}".encode()).hexdigest()[:16],
        "inputs": list(x.shape),
    }
