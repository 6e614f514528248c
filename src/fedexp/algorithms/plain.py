"""Clients in ordinary PyTorch: a module in train mode, a loop over batches, any optimizer.

The engine gives each client a copy of the module with the parameters that the server sent, so
`fit` may change it in place. Random numbers of torch, numpy and `random` are seeded for the round
and the client, so a run does not depend on the engine or on an interruption.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Batch
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree

# hooks of FedAvg on the client, which `fit` replaces
REPLACED = (
    *("client_setup", "initial_params", "example_loss", "penalty", "objective"),
    *("transform_grads", "local_step", "finish"),
)
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
}


class Loader:
    """A client's batches (x, y), normalised and augmented. Each iteration is a local epoch.

    x: [B, channels, height, width]; texts: int64 [B, length]. y: int64 [B]. The order of the
    examples is that of the other engines and algorithms. The last epoch is shorter with
    `local.steps`, and for a slow client. ConfigError is raised if `fit` begins more epochs than
    the client makes, or the next one before it has finished one.
    """

    def __init__(self, batches: Iterator[Batch], steps: int, pass_steps: int):
        """batches: of all epochs. steps: their number. pass_steps: that of a whole epoch."""
        self._batches, self._length, self._left = batches, pass_steps, steps
        self._open = False

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self._length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._open:
            raise ConfigError(
                "algorithm: fit begins an epoch before the one before has ended; read all batches"
                " of the loader"
            )
        if not self._left:
            raise ConfigError(
                "algorithm: fit reads the loader more than ctx.epochs times; loop over"
                " range(ctx.epochs), and raise local.epochs or local.steps for more"
            )
        steps = min(self._length, self._left)
        self._left -= steps
        self._open = True
        for _ in range(steps):
            batch = next(self._batches)
            yield batch.x, batch.y
        self._open = False


@dataclass
class PlainContext:
    """What `fit` may read and write, besides the module and the loader."""

    client: int  # the client's number
    round: int
    received: Tree  # what the server sent: {"params": ..., "buffers": ..., ...}; do not change it
    personal: Tree  # what it sent only to this client, the result of `personal_broadcast`
    plan: Tree  # tensors of the arrays that `host_plan` returned for this client
    lr: float  # learning rate of this round
    local: LocalTraining
    steps: int  # number of batches in all epochs
    epochs: int  # number of epochs; the last one may be incomplete
    # the client's own: tensors, or dicts of tensors; at first what `client_init` returned, by
    # default nothing
    kept: dict[str, Any]
    # sent to the server beside the model: tensors whose shapes are the same for all clients
    message: dict[str, Tensor] = field(default_factory=dict)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the torch optimizer that `local.*` describe, with this round's learning rate."""
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.local.weight_decay}
        if self.local.optimizer in ("sgd", "nesterov"):
            options["momentum"] = self.local.momentum
            options["nesterov"] = self.local.optimizer == "nesterov"
        return OPTIMIZERS[self.local.optimizer](parameters, **options)


class PlainClient(FedAvg):
    """Base of algorithms whose clients train an ordinary module in `fit`.

    The server averages the modules' parameters and running statistics; the hooks of `FedAvg` on the
    server, such as `aggregate`, can be overridden as usual. Clients train one after another, also
    on a GPU: the vectorised engine needs pure functions.
    """

    plain: ClassVar[bool] = True
    fresh_optimizer = "fit makes its own optimizer"

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise ConfigError for a hook that would not be called."""
        super().__init_subclass__(**options)
        if wrong := [name for name in REPLACED if name in vars(cls)]:
            raise ConfigError(
                f"algorithm: {cls.__name__} defines {wrong[0]}, which a PlainClient does not call:"
                " its clients only call fit"
            )

    @abstractmethod
    def fit(self, model: nn.Module, loader: Loader, ctx: PlainContext) -> Tensor | float:
        """Train the module in place, and return the mean loss of the round.

        model: in train mode; model(x) returns an `Output` with `logits` [B, C] and `features`. A
        client without a batch is not trained.
        """


def state_of(module: nn.Module) -> Params:
    """Return the parameters and buffers of a module."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: value.detach() for name, value in named}


def require_same_shapes(before: Params, after: Params) -> None:
    """Raise ConfigError if `fit` has changed names or shapes of the model."""
    for name in sorted({*before, *after}):
        shapes = [list(each[name].shape) if name in each else None for each in (before, after)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"algorithm: fit changed {name} of the model from shape {shapes[0]} to"
                f" {shapes[1]}; the server cannot average it"
            )


def require_tensors(values: Any, name: str) -> None:
    """Raise ConfigError unless `values` consists of tensors and dicts.

    name: where the values are, for the message.
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            require_tensors(value, f"{name}[{key!r}]")
    elif not isinstance(values, Tensor):
        raise ConfigError(
            f"algorithm: {name} is a {type(values).__name__}; it must be a tensor or a dict of"
            " tensors, which a checkpoint can hold"
        )
