"""Checks of a model before a run begins: that it can be made, and that it can read the data."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedexp.core.errors import ConfigError, lacks_memory
from fedexp.engine.base import ClientRuntime
from fedexp.models import Model


@contextmanager
def making(model: Model) -> Iterator[None]:
    """Raise ConfigError for a file that a model needs and that cannot be read, such as one of weights."""
    try:
        yield
    except OSError as error:
        if error.filename is None or lacks_memory(error):
            raise
        raise ConfigError(f"model: {error.filename}: cannot be read by {name_of(model)} ({error.strerror})") from error


def check_reads(model: Model, bench: ClientRuntime) -> None:
    """Raise ConfigError where the network does not give a row of logits for each of two training examples: made for
    images in colour, and these are grey; or for fewer classes."""
    data = bench.data
    device = data.x_train.device
    index = torch.arange(min(2, len(data.x_train)), device=device)
    x = data.inputs(data.x_train, index, None, None, bench.dtype)
    what = f"model: {name_of(model)} cannot read dataset={data.name} (examples of shape {tuple(x.shape[1:])}): "
    try:
        with torch.no_grad():
            logits = bench.net({}, x).logits
    except (RuntimeError, ValueError) as error:
        if lacks_memory(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(what + str(error).splitlines()[0]) from error
    classes = data.num_classes if bench.heads is None else 1  # heads of tasks: the algorithm has made them
    if logits.dim() != 2 or len(logits) != len(index) or logits.shape[1] < classes:
        wanted = [len(index), data.num_classes]
        raise ConfigError(f"{what}its logits have the shape {[*logits.shape]}; must be {wanted}")


def name_of(model: Model) -> str:
    return type(model).__name__
