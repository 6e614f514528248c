"""Interface between algorithms and engines: the arguments of the hooks in base.py, and the
requirements that an algorithm declares."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.tree import Params, Tree
from fedexp.models import Output

# indices of examples [n] -> their features [n, D], computed without augmentation
Features = Callable[[np.ndarray], Tensor]


class Network(Protocol):
    """A model as a function of its parameters.

    The parameters being trained run in train mode. The received global model and all other
    reference models run in eval mode. They use the running statistics of the received global model
    unless the parameter tree contains buffers.
    """

    def __call__(self, params: Params, x: Tensor, mask: Tensor | None = None) -> Output:
        """Return the output for inputs x [n, ...].

        mask [n] is 1 for an example and 0 for padding, which batch norm excludes from its
        statistics. If mask is None, every row counts; if x is the x of a batch, `Batch.mask`
        applies.
        """

    def gradient(
        self, function: Callable[[Params], Tensor], params: Params, moves: bool = True
    ) -> tuple[Params, Tensor]:
        """Return (gradient, value) of a scalar function of the parameters.

        The parameters run in train mode inside the function. moves: whether the call updates the
        running statistics of the model in training.
        """

    def slim(self, params: Params, x: Tensor, width: float, mask: Tensor | None = None) -> Tensor:
        """Return the output of the model's last stage computed with fewer channels.

        Only models that have stages support this (see models.Staged). mask: as in `__call__`; None:
        every row counts.
        """

    def buffers(self) -> Params:
        """Return the running statistics of the model in training; empty if the model has none."""


class ServerNetwork(Network, Protocol):
    """The network that `refine` trains the global model with."""

    params: Params  # the model in training; `refine` changes it in place
    mixes_examples: bool  # whether its batch norm needs batches of at least two examples

    def load(self, params: Params, buffers: Params) -> None:
        """Load the parameters and buffers of a model."""

    def snapshot(self) -> Params:
        """Return a copy of the parameters."""

    def norm_inputs(self, params: Params, x: Tensor) -> tuple[Output, list[tuple[Tensor, ...]]]:
        """Return the output of a model in eval mode and the statistics of its batch norm layers.

        For each batch norm layer that keeps running statistics, the list contains the mean and
        variance of the layer's input over x, then the running mean and variance; each has shape
        [channels].
        """


class Batch(NamedTuple):
    """One local mini-batch."""

    # [B, channels, height, width], normalised and augmented; texts: int64 [B, length]
    x: Tensor
    y: Tensor  # int64 [B]; -1: unlabelled
    mask: Tensor | None  # [B], 1 = example, 0 = padding; None: every row is an example
    step: int  # index of the local step within the round, from 0


class ClientData(Protocol):
    """One client's view of the training data during one round."""

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of this round in training order."""

    def take(self, index: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the training examples with the given indices, normalised: (x [n, ...], y [n]).

        The examples are augmented only if `draws`, the random numbers for augmentation, is given
        (see OwnTraining.extra_batches).
        """

    @property
    def steps(self) -> int:
        """Return the number of batches.

        If clients are trained together and padded, this is the number of batches of the longest
        client.
        """


@dataclass(frozen=True)
class Federation:
    """What the server knows about its clients."""

    parts: tuple[np.ndarray, ...]  # client -> indices of its training examples
    counts: np.ndarray  # int [K, C]: number of training labels per client and class
    labels: np.ndarray  # int [N]: labels of all training examples
    # int [C]: for each class, one training example that all clients know (FedKA); -1: there is none
    shared: np.ndarray
    weighting: str  # examples | uniform
    task: int = 0  # current task, from 0; `parts` and `counts` refer to this task
    tasks: tuple[tuple[int, ...], ...] = ()  # classes of each task
    # classes that clients held in earlier tasks; None: the classes of the earlier tasks in `tasks`
    met: tuple[int, ...] | None = None
    # client -> indices of its unlabelled examples; empty if the run has none
    surrogate: tuple[np.ndarray, ...] = ()
    # indices of all unlabelled examples
    unlabelled: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def num_clients(self) -> int:
        return len(self.parts)

    @property
    def num_classes(self) -> int:
        return self.counts.shape[1]

    @cached_property
    def weights(self) -> np.ndarray:
        """Return the aggregation weights [K]: n_k, or ones with weighting=uniform."""
        return np.array([1 if self.weighting == "uniform" else len(part) for part in self.parts])

    @cached_property
    def largest(self) -> int:
        """Return the number of examples of the largest client."""
        return max(map(len, self.parts))

    def classes_before(self) -> list[int]:
        """Return the classes of the earlier tasks in ascending order."""
        return sorted({c for classes in self.tasks[: self.task] for c in classes})

    def classes_met(self) -> list[int]:
        """Return the classes of which clients held examples in earlier tasks, in ascending order.

        They differ from `classes_before` if clients meet the tasks in different orders or the tasks
        are blurred.
        """
        return self.classes_before() if self.met is None else sorted(self.met)


@dataclass(frozen=True)
class Context:
    """Everything that a client-side hook may read."""

    server: Tree  # what the server sent to all clients: {"params": ..., ...}
    personal: Tree  # what the server sent only to this client
    client: Tree  # what this client kept from its last participation
    plan: Tree  # what `host_plan` prepared for this round
    setup: Tree  # what `client_setup` computed for this round
    lr: float  # learning rate of this round
    steps: Tensor  # scalar: number of local steps of this client in this round
    local: LocalTraining


class Pixels(NamedTuple):
    """The form in which images enter a model: values v from 0 to 1 become (v - mean) / std."""

    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[float, ...]  # one value per channel
    std: tuple[float, ...]


class PublicData(Protocol):
    """Examples that the server holds (config nodes `public` and `surrogate`)."""

    def __len__(self) -> int: ...

    def take(
        self, index: np.ndarray, dropout: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the public examples with the given indices 0, 1, ...: (x [n, ...], y [n]).

        x is normalised and not augmented. Texts include their dropout keys if the generator
        `dropout` is given to draw them.
        """

    def logits(self, models: Sequence[Params]) -> Tensor:
        """Return the logits [models, n, C] of several models on all public examples, without
        gradient.

        Each model includes its buffers.
        """

    def logits_of_parts(
        self, models: Sequence[Params], parts: Sequence[np.ndarray]
    ) -> list[Tensor]:
        """Return each model's logits on its part of the examples, [n_i, C] each.

        parts: the indices 0, 1, ... of the examples for each model.
        """


@dataclass(frozen=True)
class ServerRound:
    """Everything that a server-side hook may read about the round, except the trees."""

    federation: Federation
    clients: Sequence[int]  # the cohort
    weights: Tensor  # [|S|]: n_k, or ones with weighting=uniform
    previous: Tree  # the server's state before this round, including its model's "buffers"
    buffers: Params  # leaves [|S|, ...]: running statistics of the local models
    lr: float  # learning rate of this round
    local: LocalTraining
    public: PublicData | None
    surrogate: PublicData | None  # the server's unlabelled examples; their labels are -1
    rng: np.random.Generator


@dataclass(frozen=True)
class Needs:
    """What an algorithm requires beyond FedAvg (FedNTD Table 6).

    Tests compare these declarations with what is actually exchanged.
    """

    client_state: str = ""  # what a client keeps between rounds
    server_state: str = ""  # what the server keeps in addition to the global model
    # uploaded per client and round, as a multiple of the model's size; small items are not counted
    up: float = 0.0
    down: float = 0.0  # downloaded by each client, in the same unit
    small: str = ""  # the small items that are not counted: a few numbers
    unsent: str = ""  # a small part of the model that is not sent
    data: str = ""  # extra data, and who holds it
    public: int = 0  # minimum number of public examples; 0: needs no public data
    surrogate: bool = False  # whether the algorithm refuses to run without unlabelled examples
    # Computation per local step, in passes over the batch:
    gradients: int = 1  # forward and backward passes
    teachers: int = 0  # forward passes of other models
    # computation per client and round in addition to the local steps, in passes over the client's
    # data:
    gradient_passes: int = 0
    forward_passes: int = 0
    work: str = ""  # client work that the numbers above do not include
    # computation of the server per round, in passes over its data:
    # forward passes: per client of the cohort, and others
    server_teachers: tuple[int, int] = (0, 0)
    server_passes: int = 0  # forward and backward passes
    server_work: str = ""  # other work of the server
