"""Interface between algorithms and engines.

It defines the arguments of the hooks in base.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.tree import Params, Tree
from fedexp.models import Output


class Network(Protocol):
    """A model as a function of its parameters.

    A call with the parameters being trained runs in train mode. A call with any other parameters,
    such as those of the received global model, runs in eval mode. Such a call uses the running
    statistics of the received global model, unless the parameter tree contains buffers.
    """

    def __call__(self, params: Params, x: Tensor, mask: Tensor | None = None) -> Output:
        """Return the output for inputs x [n, ...].

        mask [n] is 1 for an example and 0 for padding. Batch norm ignores padding. If mask is None
        and x is the input of a `Batch`, the batch's mask is used. For any other x, None means that
        x has no padding.
        """

    def gradient(
        self, function: Callable[[Params], Tensor], params: Params, moves: bool = True
    ) -> tuple[Params, Tensor]:
        """Return (gradient, value) of a scalar function of the parameters.

        Inside the function, the model runs in train mode. moves: whether the call updates the
        running statistics of the model being trained.
        """

    def slim(self, params: Params, x: Tensor, width: float, mask: Tensor | None = None) -> Tensor:
        """Return the last stage's output for its input x, computed with fewer channels.

        Only models with stages support this method (see models.Staged). width: the fraction of
        channels to use. mask: [n], 1 for examples and 0 for padding; None: no padding.
        """

    def buffers(self) -> Params:
        """Return the running statistics of the model being trained; empty if it has none."""


class ServerNetwork(Network, Protocol):
    """The network that `refine` uses to train the global model."""

    params: Params  # parameters of the model being trained; `refine` changes them in place
    mixes_examples: bool  # whether the model's batch norm needs batches of at least two examples

    def load(self, params: Params, buffers: Params) -> None:
        """Load a model's parameters and buffers."""

    def snapshot(self) -> Params:
        """Return a copy of the parameters."""

    def norm_inputs(self, params: Params, x: Tensor) -> tuple[Output, list[tuple[Tensor, ...]]]:
        """Return a model's output in eval mode, and the statistics of its batch norm layers.

        For each batch norm layer with running statistics, the list contains four tensors
        [channels]: the mean and variance of the layer's input for x, then the running mean and
        variance.
        """


class Batch(NamedTuple):
    """One local mini-batch of a client."""

    # [B, channels, height, width], normalised and augmented; texts: int64 [B, length]
    x: Tensor
    y: Tensor  # int64 [B]; -1: unlabelled
    mask: Tensor | None  # [B], 1 = example, 0 = padding; None: every row is an example
    step: int  # number of the local step in the round, from 0
    features: Tensor | None = None  # [B, D]: features of x, if a frozen backbone has computed them


class ClientData(Protocol):
    """One client's view of the training data during one round."""

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of this round in training order."""

    def take(self, index: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the training examples with the given indices, normalised: (x [n, ...], y [n]).

        The examples are augmented only if `draws`, the random numbers for augmentation, is given
        (see FedAvg.extra_batches).
        """

    @property
    def steps(self) -> int:
        """Return the number of batches.

        If several clients are trained together, this is the number of batches of the client with
        the most batches.
        """

    @property
    def pass_steps(self) -> int:
        """Return the number of batches of the first pass over the examples.

        If several clients are trained together, this is the largest of their numbers. If local
        training is shorter than a pass, the number is that of its batches.
        """


def read_only_view(array: np.ndarray) -> np.ndarray:
    """Return a view of an array through which the array cannot be changed."""
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class Federation:
    """What the server knows about the clients and their data.

    Hooks, which may be a user's, only read it: its arrays are read-only.
    """

    parts: tuple[np.ndarray, ...]  # client -> indices of its training examples
    counts: np.ndarray  # int [K, C]: number of training labels per client and class
    labels: np.ndarray  # int [N]: labels of all training examples
    # int [C]: for each class, the index of a training example that all clients share (FedKA); -1:
    # none
    shared: np.ndarray
    weighting: str  # "examples" or "uniform"
    task: int = 0  # current task, from 0, which `parts` and `counts` describe
    tasks: tuple[tuple[int, ...], ...] = ()  # classes of each task
    # client -> indices of its unlabelled examples; empty if the run has none
    surrogate: tuple[np.ndarray, ...] = ()
    # indices of all unlabelled examples
    unlabelled: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        for name in ("parts", "surrogate"):
            object.__setattr__(self, name, tuple(map(read_only_view, getattr(self, name))))
        for name in ("counts", "labels", "shared", "unlabelled"):
            object.__setattr__(self, name, read_only_view(getattr(self, name)))

    @property
    def num_clients(self) -> int:
        return len(self.parts)

    @property
    def num_classes(self) -> int:
        return self.counts.shape[1]

    @cached_property
    def weights(self) -> np.ndarray:
        """Return the aggregation weights [K]: n_k, or ones with weighting=uniform."""
        uniform = self.weighting == "uniform"
        return read_only_view(np.array([1 if uniform else len(part) for part in self.parts]))

    @cached_property
    def largest(self) -> int:
        """Return the largest number of examples that a client has."""
        return max(map(len, self.parts))

    def classes_before(self) -> list[int]:
        """Return the classes of the earlier tasks in ascending order."""
        return sorted({c for classes in self.tasks[: self.task] for c in classes})


@dataclass(frozen=True)
class Context:
    """Everything that a client-side hook may read."""

    server: Tree  # what the server sent to all clients: {"params": ..., ...}
    personal: Tree  # what the server sent only to this client
    client: Tree  # the state that this client kept from its last participation
    plan: Tree  # what `host_plan` prepared for this round
    setup: Tree  # what `client_setup` computed for this round
    lr: float  # learning rate of this round
    steps: Tensor  # scalar: number of local steps of this client in this round
    # its options; with `local.steps`, `epochs` is None, and slow clients take fewer steps
    local: LocalTraining
    pass_steps: Tensor  # scalar: number of batches of a whole pass over this client's examples


class Pixels(NamedTuple):
    """The shape and normalisation of images: a value v in [0, 1] becomes (v - mean) / std."""

    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[float, ...]  # one value per channel
    std: tuple[float, ...]


class PublicData(Protocol):
    """Examples on the server (config nodes `public` and `surrogate`)."""

    def __len__(self) -> int: ...

    @property
    def numbers(self) -> Tensor:
        """Return the examples' indices among all training examples, int64 [n], on the CPU."""

    def take(
        self, index: np.ndarray, dropout: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the examples with the given indices: (x [n, ...], y [n]).

        x is normalised but not augmented. index: [n], from 0. dropout: if given, texts include
        dropout keys drawn from this generator.
        """

    def logits(self, models: Sequence[Params]) -> Tensor:
        """Return the logits [models, n, C] of several models on all examples, without gradients.

        models: parameters and buffers of each model.
        """

    def logits_of_parts(
        self, models: Sequence[Params], parts: Sequence[np.ndarray]
    ) -> list[Tensor]:
        """Return each model's logits on its part of the examples, [n_i, C] each.

        parts: for each model, the indices (from 0) of its examples.
        """


@dataclass(frozen=True)
class ServerRound:
    """What a server-side hook may read, in addition to the server's state and the messages."""

    federation: Federation
    clients: Sequence[int]  # the cohort
    weights: Tensor  # [|S|]: n_k, or ones with weighting=uniform
    previous: Tree  # the server's state before this round, including its model's "buffers"
    buffers: Params  # leaves [|S|, ...]: running statistics of the local models
    lr: float  # learning rate of this round
    local: LocalTraining
    public: PublicData | None
    surrogate: PublicData | None  # the server's unlabelled examples, whose labels are -1
    rng: np.random.Generator


@dataclass(frozen=True)
class TaskStart:
    """What `begin_task` may read, in addition to the server's state."""

    federation: Federation  # with the new task
    before: Federation  # with the previous task
    initial: Params  # the run's initial model, including buffers
    pixels: Pixels | None  # None if the examples are not images
    # maps the server's state to the network with the running statistics of its model
    network: Callable[[Tree], ServerNetwork]
    # maps a model with its buffers, and the indices of training examples [n], to the examples'
    # features [n, D], computed without augmentation
    features: Callable[[Params, np.ndarray], Tensor]
    rng: Callable[[str], np.random.Generator]  # a new generator for each purpose
