"""Checks of a model before a run begins: that it can be made, and that it can read the data."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedexp.algorithms.base import FedAvg
from fedexp.core.errors import ConfigError, lacks_memory
from fedexp.data.types import Data, ImageData
from fedexp.engine.base import ClientRuntime
from fedexp.engine.vectorised.graphs import is_out_of_memory
from fedexp.models import Model
from fedexp.models.own import LogitsOnly, Reading, cannot_read, must_be_linear


@contextmanager
def making(model: Model) -> Iterator[None]:
    """Raise ConfigError for a file that a model needs and that cannot be read, such as one of
    weights."""
    try:
        yield
    except OSError as error:
        if error.filename is None or lacks_memory(error):
            raise
        raise ConfigError(
            f"model: {error.filename}: cannot be read by {name_of(model)} ({error.strerror})"
        ) from error


@torch.no_grad()
def check_reads(model: Model, runtime: ClientRuntime) -> None:
    """Raise ConfigError where the network does not give a row of logits for each of two training
    examples: made for images in colour, and these are grey; or for fewer classes."""
    data = runtime.data
    index = torch.arange(min(2, len(data.x_train)), device=data.x_train.device)
    x = data.inputs(data.x_train, index, None, None, runtime.dtype)
    try:
        output = runtime.net({}, x)
    except Exception as error:  # of a network of anybody's
        if lacks_memory(error) or is_out_of_memory(error):
            raise
        raise cannot_read(x, error) from error
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ConfigError(
            "model: its network must return logits [examples, classes], got"
            f" {type(logits).__name__}"
        )
    # heads of tasks: the algorithm has made them
    classes = data.num_classes if runtime.heads is None else 1
    if logits.dim() != 2 or len(logits) != len(index) or logits.shape[1] < classes:
        wanted = [len(index), data.num_classes]
        raise ConfigError(
            f"model: {name_of(model)}: its logits have the shape {[*logits.shape]}; must be"
            f" {wanted}"
        )


def check_parts(module: torch.nn.Module, algorithm: FedAvg) -> None:
    """Raise ConfigError where an algorithm needs more of a model than its logits, and the model
    does not say where it is."""
    classifier, what = dict(module.named_modules()).get("classifier"), ""
    if algorithm.needs_features and isinstance(module, LogitsOnly):
        what = "the features of the model, which are the input of its last layer"
    elif (algorithm.needs_head or algorithm.must_train) and not isinstance(
        classifier, torch.nn.Linear
    ):
        what = "the last layer of the model"
    elif (
        algorithm.must_train and isinstance(classifier, torch.nn.Linear) and classifier.bias is None
    ):
        raise ConfigError(
            f"model: its last layer has no bias, which {type(algorithm).__name__} needs"
        )
    if what:
        raise ConfigError(
            f"model: {type(algorithm).__name__} needs {what}: name it in the yaml of the model,"
            " such as head: fc (model.head"
            f" {must_be_linear(getattr(module, 'network', module), None)})"
        )


def read_like(module: torch.nn.Module, data: Data) -> None:
    """Tell a model that normalises its input anew how the data set has normalised it."""
    reading = getattr(module, "reading", None)
    if isinstance(reading, Reading) and isinstance(data, ImageData):
        reading.normalised_as(data.mean, data.std)


def name_of(model: Model) -> str:
    return type(model).__name__
