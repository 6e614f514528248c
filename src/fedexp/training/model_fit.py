"""Check that a model can be built, accepts the data and can be trained, before a run starts.

If the backbone is frozen, the features of all examples are computed once, and clients then train
only the head on them. The rounding of a row in a matrix product may depend on the other rows. So
the last digits of these features may differ from those of features that are computed for each
batch.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Federation
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core import memory
from fedexp.core.errors import ConfigError, lacks_memory
from fedexp.core.memory import size_of
from fedexp.data.types import Data
from fedexp.engine.base import ClientRuntime
from fedexp.engine.batch_norm import has_batch_norm
from fedexp.engine.network import HEAD_PREFIX, trainable
from fedexp.engine.schedule import count_skipped_examples
from fedexp.engine.vectorised import engine as vectorised
from fedexp.engine.vectorised.graphs import is_out_of_memory
from fedexp.engine.vectorised.support import find_obstacle
from fedexp.models import Model, classifier_of
from fedexp.models.own import Headed, LogitsOnly, describe_head, unreadable_input

log = logging.getLogger("fedexp")


@contextmanager
def model_file_errors(model: Model) -> Iterator[None]:
    """Raise ConfigError if the model fails to read a file in the block, such as its weights."""
    try:
        yield
    except OSError as error:
        if error.filename is None or lacks_memory(error):
            raise
        raise ConfigError(
            f"model: {type(model).__name__} cannot read {error.filename} ({error.strerror})"
        ) from error


def first_inputs(data: Data, dtype: torch.dtype) -> torch.Tensor:
    """Return the inputs of the first two training examples, without augmentation."""
    index = torch.arange(min(2, len(data.x_train)), device=data.x_train.device)
    return data.inputs(data.x_train, index, None, None, dtype)


@torch.no_grad()
def check_reads(model: Model, runtime: ClientRuntime) -> None:
    """Check the model on two training examples.

    Raises ConfigError if the network does not return one row of logits per example, for example
    because it expects colour images or has too few outputs.
    """
    data = runtime.data
    x = first_inputs(data, runtime.dtype)
    try:
        output = runtime.net({}, x)
    except Exception as error:  # the network may be a user's
        if lacks_memory(error) or is_out_of_memory(error):
            raise
        raise unreadable_input(x, error) from error
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ConfigError(
            "model: the network must return logits, a tensor of shape [examples, classes], but it"
            f" returned {type(logits).__name__}"
        )
    # the algorithm makes the heads of tasks, so their size is not checked
    classes = data.num_classes if runtime.heads is None else 1
    if logits.dim() != 2 or len(logits) != len(x) or logits.shape[1] < classes:
        wanted = [len(x), data.num_classes]
        raise ConfigError(
            f"model: the logits of {type(model).__name__} have shape {[*logits.shape]}, but must"
            f" have shape {wanted}"
        )


def check_parts(module: torch.nn.Module, algorithm: FedAvg) -> None:
    """Raise ConfigError if a part that the algorithm needs is missing, or frozen if it is trained.

    Such parts are the features, the last layer and its bias.
    """
    name, what = type(algorithm).__name__, ""
    classifier = dict(module.named_modules()).get("classifier")
    is_linear = isinstance(classifier, torch.nn.Linear)
    if algorithm.needs_features and isinstance(module, LogitsOnly):
        what = "the features of the model, which are the input of its last layer"
    elif (algorithm.needs_head or algorithm.must_train) and not is_linear:
        what = "the last layer of the model"
    elif algorithm.must_train and getattr(classifier, "bias", None) is None:
        raise ConfigError(f"model: {name} needs a bias in the last layer, but the model has none")
    if what:
        known = describe_head(getattr(module, "network", module), None)
        raise ConfigError(
            f"model: {name} needs {what}; name this layer in the yaml file of the model, such as"
            f" head: fc (model.head {known})"
        )
    frozen = [k for k in algorithm.must_train if not module.get_parameter(k).requires_grad]
    if frozen:
        raise ConfigError(
            f"model: {', '.join(frozen)} must be trainable, not frozen (requires_grad=False),"
            f" because {name} trains the classifier separately"
        )


def check_frozen(module: torch.nn.Module) -> None:
    """Log how many parameters are frozen (requires_grad=False).

    Raises ConfigError if all parameters are frozen.
    """
    every, trained = dict(module.named_parameters()), trainable(module)
    frozen = [name for name in every if name not in trained]
    if not trained:
        raise ConfigError(
            "model: all parameters are frozen (requires_grad=False), but at least one must be"
            " trainable"
        )
    if frozen:
        total, left = (sum(p.numel() for p in each.values()) for each in (every, trained))
        sizes = total - left, total
        log.info(
            "%d of %d parameters are frozen (requires_grad=False); they are neither trained nor"
            " sent",
            *sizes,
        )


def count_left_out(
    algorithm: FedAvg,
    tasks: Sequence[Federation],
    local: LocalTraining,
    skip_single: bool,
    given: int,
) -> dict[str, int]:
    """Count the clients and examples that training leaves out.

    given: the batch size in the configuration, for messages; that of `local` is limited.

    With `local.drop_last`, these are the examples in incomplete batches. With `skip_single`, the
    model has batch normalisation, which needs batches of at least two examples. The result has the
    keys `clients`, the number of clients that do not train in some task because they have no batch,
    and `examples`, the number of examples that each pass over the data leaves out. The result is
    empty if no example is left out.

    Raises ConfigError if no client can train in some task.
    """
    why = "batch normalisation needs batches of at least two examples"
    missing = (
        "a batch of at least two examples, which the model's batch normalisation needs; use a"
        " larger local.batch_size, fewer clients, or a model without batch normalisation"
        " (model=cnn)"
    )
    if local.drop_last and local.batch_size > 1:
        why = "local.drop_last=true leaves out incomplete batches"
        missing = "a complete batch; use a smaller local.batch_size or fewer clients"
    idle: set[int] = set()
    lost = 0
    for federation in tasks:
        unable = set()
        for client in range(federation.num_clients):
            part = algorithm.training_part(federation, client)
            sizes = [len(each) for each in (part if isinstance(part, tuple) else (part,))]
            skipped = sum(count_skipped_examples(size, local, skip_single) for size in sizes)
            lost += skipped
            if skipped == sum(sizes):
                unable.add(client)
        if len(unable) == federation.num_clients:
            task = f" of task {federation.task + 1}" if len(tasks) > 1 else ""
            raise ConfigError(f"local.batch_size={given}: no client{task} has {missing}")
        idle |= unable
    if lost:
        log.log(
            logging.WARNING if idle else logging.INFO,
            "%s: each pass over the data leaves out %d examples, and %d of %d clients never train",
            why,
            lost,
            len(idle),
            tasks[0].num_clients,
        )
    return {"clients": len(idle), "examples": lost} if lost else {}


SHARE_OF_MEMORY = 0.25  # largest share of the free memory that the features may use


def has_fixed_features(module: nn.Module, x: Tensor) -> bool:
    """Return whether the features of an example are the same in every step of training.

    The backbone must be frozen, and must not use batch norm, or random numbers in training.

    x: inputs [B, ...], whose values are not read.
    """
    only_head = all(name.startswith(HEAD_PREFIX) for name in trainable(module))
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
    free = vectorised.free_gpu_memory(device) if device.type == "cuda" else memory.free_memory()
    if size > SHARE_OF_MEMORY * free:
        log.info(
            "the features of the frozen backbone are computed in every step, because they need"
            " %s, too much for %s of free memory; the last digits of results can differ from those"
            " with stored features",
            size_of(size),
            size_of(free),
        )
        return runtime
    start = time.perf_counter()
    train = runtime.features({}, torch.arange(len(data.y_train)))
    test = runtime.features({}, torch.arange(len(data.y_test)), runtime.load_test)
    log.info(
        "the features of the frozen backbone are computed once for all examples: %s, %.1f s",
        size_of(size),
        time.perf_counter() - start,
    )
    return replace(runtime, data=replace(data, train_features=train, test_features=test))
