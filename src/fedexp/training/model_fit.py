"""Check that a model can be built, reads the data and can be trained, before a run starts."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.families import training_part_of
from fedexp.algorithms.interfaces import Federation
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.errors import ConfigError, lacks_memory
from fedexp.data.types import Data, ImageData
from fedexp.engine.base import ClientRuntime
from fedexp.engine.network import trainable
from fedexp.engine.schedule import count_skipped_examples
from fedexp.engine.vectorised.graphs import is_out_of_memory
from fedexp.models import Model
from fedexp.models.own import LogitsOnly, Reading, describe_head, unreadable_input

log = logging.getLogger("fedexp")


@contextmanager
def model_file_errors(model: Model) -> Iterator[None]:
    """Raise ConfigError if a file that a model needs, such as one with weights, cannot be read."""
    try:
        yield
    except OSError as error:
        if error.filename is None or lacks_memory(error):
            raise
        raise ConfigError(
            f"model: {error.filename}: cannot be read by {type(model).__name__} ({error.strerror})"
        ) from error


@torch.no_grad()
def check_reads(model: Model, runtime: ClientRuntime) -> None:
    """Raise ConfigError unless the network returns a row of logits for each of two training
    examples.

    It may fail, for example, because it expects colour images or has too few outputs.
    """
    data = runtime.data
    index = torch.arange(min(2, len(data.x_train)), device=data.x_train.device)
    x = data.inputs(data.x_train, index, None, None, runtime.dtype)
    try:
        output = runtime.net({}, x)
    except Exception as error:  # the network may be a user's
        if lacks_memory(error) or is_out_of_memory(error):
            raise
        raise unreadable_input(x, error) from error
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ConfigError(
            "model: its network must return logits [examples, classes], got"
            f" {type(logits).__name__}"
        )
    # the algorithm makes the heads of tasks, so their size is not checked
    classes = data.num_classes if runtime.heads is None else 1
    if logits.dim() != 2 or len(logits) != len(index) or logits.shape[1] < classes:
        wanted = [len(index), data.num_classes]
        raise ConfigError(
            f"model: {type(model).__name__}: its logits have the shape {[*logits.shape]}; must be"
            f" {wanted}"
        )


def check_parts(module: torch.nn.Module, algorithm: FedAvg) -> None:
    """Raise ConfigError if an algorithm needs a part of the model that the model does not name."""
    name, what = type(algorithm).__name__, ""
    classifier = dict(module.named_modules()).get("classifier")
    is_linear = isinstance(classifier, torch.nn.Linear)
    if algorithm.needs_features and isinstance(module, LogitsOnly):
        what = "the features of the model, which are the input of its last layer"
    elif (algorithm.needs_head or algorithm.must_train) and not is_linear:
        what = "the last layer of the model"
    elif algorithm.must_train and getattr(classifier, "bias", None) is None:
        raise ConfigError(f"model: its last layer has no bias, which {name} needs")
    if what:
        known = describe_head(getattr(module, "network", module), None)
        raise ConfigError(
            f"model: {name} needs {what}: name it in the yaml of the model, such as head: fc"
            f" (model.head {known})"
        )


def pass_normalisation(module: torch.nn.Module, data: Data) -> None:
    """Pass the data set's normalisation to a model that normalises its input again."""
    reading = getattr(module, "reading", None)
    if isinstance(reading, Reading) and isinstance(data, ImageData):
        reading.set_data_normalisation(data.mean, data.std)


def check_frozen(module: torch.nn.Module, algorithm: FedAvg) -> None:
    """Raise ConfigError if all parameters are frozen, or if the algorithm must train a frozen one.

    Frozen parameters have requires_grad=False. Their number is logged.
    """
    every, trained = dict(module.named_parameters()), trainable(module)
    frozen = [name for name in every if name not in trained]
    if not trained:
        raise ConfigError(
            "model: all its parameters are frozen (requires_grad=False); must have one to train"
        )
    if wanted := [name for name in frozen if name in algorithm.must_train]:
        raise ConfigError(
            f"model: {', '.join(wanted)} frozen (requires_grad=False); must be trainable, because"
            f" {type(algorithm).__name__} trains the classifier separately"
        )
    if frozen:
        total, left = (sum(p.numel() for p in each.values()) for each in (every, trained))
        sizes = total - left, total
        log.info("frozen (requires_grad=False): %d of %d parameters, not trained or sent", *sizes)


def count_left_out(
    algorithm: FedAvg, tasks: Sequence[Federation], local: LocalTraining
) -> dict[str, int]:
    """Count the clients and examples that batch norm cannot train on.

    The model's batch norm needs batches of at least two examples. `clients` is the number of
    clients that have no such batch in some task and do not train in it. `examples` is the number of
    examples that each pass leaves out. Return an empty dict if no example is left out.

    Raises ConfigError if no client could train in a task.
    """
    idle: set[int] = set()
    lost = 0
    for federation in tasks:
        clients = range(federation.num_clients)
        sizes = [len(training_part_of(algorithm, federation, client)) for client in clients]
        alone = [count_skipped_examples(size, local.batch_size) for size in sizes]
        unable = {client for client in clients if sizes[client] == alone[client]}
        if len(unable) == federation.num_clients:
            task = f" of task {federation.task + 1}" if len(tasks) > 1 else ""
            raise ConfigError(
                f"local.batch_size={local.batch_size}: no client{task} has a batch of at least two"
                " examples, which the model's batch normalisation needs; use a larger"
                " local.batch_size, fewer clients, or a model without batch normalisation"
                " (model=cnn)"
            )
        idle |= unable
        lost += sum(alone)
    if lost:
        log.log(
            logging.WARNING if idle else logging.INFO,
            "batch normalisation needs batches of at least two examples: each pass over the data"
            " leaves out %d examples, and %d of %d clients never train",
            lost,
            len(idle),
            tasks[0].num_clients,
        )
    return {"clients": len(idle), "examples": lost} if lost else {}
