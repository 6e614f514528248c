"""Compute the features of all examples once per run if the backbone is frozen.

Clients then train only the head on these features. The rounding of a row in a matrix product may
depend on the other rows. So the last digits of these features may differ from those of features
that are computed for each batch.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedexp.core import memory
from fedexp.core.memory import size_of
from fedexp.engine.base import ClientRuntime
from fedexp.engine.batch_norm import has_batch_norm
from fedexp.engine.network import HEAD, trainable
from fedexp.engine.vectorised import engine as vectorised
from fedexp.engine.vectorised.support import find_obstacle
from fedexp.models import classifier_of
from fedexp.models.own import Headed

log = logging.getLogger("fedexp")
SHARE_OF_MEMORY = 0.25  # largest share of the free memory that the features may use


def has_fixed_features(module: nn.Module, x: Tensor) -> bool:
    """Return whether the features of an example are the same in every step of training.

    The backbone must be frozen, and must not use batch norm, or random numbers in training.

    x: inputs [B, ...], whose values are not read.
    """
    only_head = all(name.startswith(HEAD) for name in trainable(module))
    if type(module) is not Headed or not only_head or has_batch_norm(module):
        return False
    return find_obstacle(module, x) is None


def with_features(runtime: ClientRuntime) -> ClientRuntime:
    """Return the runtime with the features of all examples, unless they need too much memory.

    The backbone must be frozen (see `has_fixed_features`), and examples are not augmented.
    """
    data, device = runtime.data, runtime.device
    width = classifier_of(runtime.net.module).in_features
    size = (len(data.y_train) + len(data.y_test)) * width * runtime.dtype.itemsize
    free = vectorised.free_memory(device) if device.type == "cuda" else memory.free_memory()
    if size > SHARE_OF_MEMORY * free:
        log.info(
            "the features of the frozen backbone are computed in every step, because they need"
            " %s, too much for %s of free memory",
            size_of(size),
            size_of(free),
        )
        return runtime
    start = time.perf_counter()
    train = compute(runtime, runtime.load_train, len(data.y_train))
    test = compute(runtime, runtime.load_test, len(data.y_test))
    log.info(
        "the features of the frozen backbone are computed once for all examples: %s, %.1f s",
        size_of(size),
        time.perf_counter() - start,
    )
    return replace(runtime, data=replace(data, train_features=train, test_features=test))


@torch.no_grad()
def compute(runtime: ClientRuntime, load: Callable[..., Any], count: int) -> Tensor:
    """Return the features of the first `count` examples, [count, D].

    load: `runtime.load_train` or `runtime.load_test`.
    """
    index = torch.arange(count, device=runtime.device)
    chunks = index.split(runtime.evaluation_batch)
    return torch.cat([runtime.net({}, load(chunk, None)[0]).features for chunk in chunks])
