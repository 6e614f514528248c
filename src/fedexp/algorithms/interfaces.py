"""Interface between algorithms and engines: the arguments of the hooks (see base.py) and the
declarations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.tree import Params, Tree
from fedexp.models import Output

# numbers of examples [n] -> features [n, D], not augmented
Features = Callable[[np.ndarray], Tensor]


class Network(Protocol):
    """A model as a function of its parameters.

    The parameters in training run in train mode; the received global model and all other references
    in eval mode, with the running statistics of the received global model, unless the tree brings
    its own buffers.
    """

    def __call__(self, params: Params, x: Tensor, mask: Tensor | None = None) -> Output:
        """Return the output for inputs x [n, ...]. mask [n]: 1 = example, 0 = padding, which batch
        norm leaves out of its statistics; None: every row counts, or, where x is the x of a batch,
        its rows as `Batch.mask` has them."""

    def gradient(
        self, function: Callable[[Params], Tensor], params: Params, moves: bool = True
    ) -> tuple[Params, Tensor]:
        """Return (gradient, value) of a scalar function of the parameters; inside, these run in
        train mode. moves: whether that moves the running statistics of the model in training."""

    def slim(self, params: Params, x: Tensor, width: float, mask: Tensor | None = None) -> Tensor:
        """Return the last stage of a model that has one, with fewer channels (see models.Staged);
        mask as above, None: every row counts."""

    def buffers(self) -> Params:
        """Return running statistics of the model in training; empty for models without."""


class ServerNetwork(Network, Protocol):
    """The network that `refine` trains the global model with."""

    params: Params  # the model in training; changed in place
    mixes_examples: bool  # its batch norm needs batches of at least two examples

    def load(self, params: Params, buffers: Params) -> None:
        """Start from this model."""

    def snapshot(self) -> Params:
        """Return the parameters as tensors of their own."""

    def norm_inputs(self, params: Params, x: Tensor) -> tuple[Output, list[tuple[Tensor, ...]]]:
        """Return the output of a model in eval mode, and for each batch norm layer with running
        statistics (mean, variance) of its input over x and (running mean, running variance),
        [channels] each."""


class Batch(NamedTuple):
    """One local mini-batch."""

    # [B, channels, height, width], normalised and augmented; texts: int64 [B, length]
    x: Tensor
    y: Tensor  # int64 [B]; -1: not labelled
    mask: Tensor | None  # [B], 1 = example, 0 = padding; None: every row is an example
    step: int  # which local step of the round this is, from 0


class ClientData(Protocol):
    """One client's view of the training data during one round."""

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of this round in the order in which they are trained on."""

    def take(self, index: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return training examples by number, normalised, and augmented where random numbers for
        that are given (see OwnTraining.after): (x [n, ...], y [n])."""

    @property
    def steps(self) -> int:
        """Return the number of batches; with padding, that of the longest client that is trained
        together with this one."""


@dataclass(frozen=True)
class Federation:
    """What the server knows about its clients."""

    parts: tuple[np.ndarray, ...]  # client -> numbers of its training examples
    counts: np.ndarray  # int [K, C] training labels per client
    labels: np.ndarray  # int [N] of all training examples
    # int [C]: one training example of each class that all clients know (FedKA); -1: none exists
    shared: np.ndarray
    weighting: str  # examples | uniform
    task: int = 0  # of a scenario of several, from 0: `parts` and `counts` are those of this task
    tasks: tuple[tuple[int, ...], ...] = ()  # classes of each task
    # classes that clients held in earlier tasks; None: those of these tasks
    met: tuple[int, ...] | None = None
    # client -> numbers of its unlabelled examples; empty: there are none
    surrogate: tuple[np.ndarray, ...] = ()
    # numbers of all of them
    unlabelled: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def num_clients(self) -> int:
        return len(self.parts)

    @property
    def num_classes(self) -> int:
        return self.counts.shape[1]

    @cached_property
    def weights(self) -> np.ndarray:
        """Return the weights [K]: n_k, or ones with weighting=uniform."""
        return np.array([1 if self.weighting == "uniform" else len(part) for part in self.parts])

    @cached_property
    def largest(self) -> int:
        """Return the number of examples of the client that has the most."""
        return max(map(len, self.parts))

    def classes_before(self) -> list[int]:
        """Return the classes of the tasks before this one, ascending."""
        return sorted({c for classes in self.tasks[: self.task] for c in classes})

    def classes_met(self) -> list[int]:
        """Return the classes that some client has held examples of in the tasks before this one,
        ascending. They are others than `classes_before` where clients meet the tasks in different
        orders, or tasks are blurred."""
        return self.classes_before() if self.met is None else sorted(self.met)


@dataclass(frozen=True)
class Context:
    """Everything that a client-side hook may read."""

    server: Tree  # what the server sent to all, {"params": ..., ...}
    personal: Tree  # what the server sent to this client alone
    client: Tree  # what this client kept from its last participation
    plan: Tree  # what `host_plan` prepared for this round
    setup: Tree  # what `client_setup` computed for this round
    lr: float  # of this round
    steps: Tensor  # scalar: local steps of this client in this round
    local: LocalTraining


class Pixels(NamedTuple):
    """The form in which images enter a model: values v from 0 to 1 as (v - mean) / std."""

    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]


class PublicData(Protocol):
    """Examples that the server holds (config nodes `public` and `surrogate`)."""

    def __len__(self) -> int: ...

    def take(
        self, index: np.ndarray, dropout: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return public examples by their number 0, 1, ...: (x [n, ...] normalised and not
        augmented, y [n]); texts with the keys of their dropout, where `dropout` draws them."""

    def logits(self, models: Sequence[Params]) -> Tensor:
        """Return the logits of several models, each with its buffers, on all public examples:
        [models, n, C], without gradient."""

    def logits_of_parts(
        self, models: Sequence[Params], parts: Sequence[np.ndarray]
    ) -> list[Tensor]:
        """Return the logits of each model on its own part of the examples (by their numbers 0, 1,
        ...): [n_i, C] each."""


@dataclass(frozen=True)
class ServerRound:
    """Everything but trees that a server-side hook may read about the round."""

    federation: Federation
    clients: Sequence[int]  # the cohort
    weights: Tensor  # [|S|]: n_k, or ones with weighting=uniform
    previous: Tree  # the server's state before this round, with the "buffers" of its model
    buffers: Params  # leaves [|S|, ...]: running statistics of the local models
    lr: float  # of this round
    local: LocalTraining
    public: PublicData | None
    surrogate: PublicData | None  # the server's unlabelled examples; their labels are -1
    rng: np.random.Generator


@dataclass(frozen=True)
class Needs:
    """Requirements of an algorithm beyond FedAvg (FedNTD Table 6); tests compare them with what is
    really exchanged."""

    client_state: str = ""  # what a client keeps between rounds
    server_state: str = ""  # what the server keeps beside the global model
    # to the server, of each client and round, in multiples of the model; small change not counted
    up: float = 0.0
    down: float = 0.0  # to each client
    small: str = ""  # the small change: a few numbers
    unsent: str = ""  # a small part of the model that stays where it is
    data: str = ""  # extra data, and who holds them
    public: int = 0  # refuses to run with fewer examples in the public set; 0: it needs none
    surrogate: bool = False  # refuses to run without unlabelled examples
    # Computation. Of a step, in passes over the batch:
    gradients: int = 1  # forward and backward
    teachers: int = 0  # forward passes of other models
    # of a client in a round, beside the steps, in passes over its data:
    gradient_passes: int = 0
    forward_passes: int = 0
    work: str = ""  # what clients do that these do not count
    # of the server in a round, in passes over its set:
    server_teachers: tuple[int, int] = (0, 0)  # for each client of the cohort, and others
    server_passes: int = 0  # forward and backward
    server_work: str = ""  # what else it does
