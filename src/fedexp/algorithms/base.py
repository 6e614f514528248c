"""FedAvg, and with it the hooks by which every other algorithm states what it does differently.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, Algorithm 1: each sampled client runs E epochs of SGD from the global model, the server
averages the local models. Weights: p_k proportional to n_k (FedNTD Eq. 2); `weighting=uniform` is
the 1/|S_t| of FedNTD Algorithm 1.

Client-side hooks (client_setup .. finish) are pure and safe under torch.func.vmap: no `.item()`, no
`if tensor`, no indexing by boolean masks, no in-place writes to trees that they were given. What
they are given is explained in interfaces.py. Algorithms that do more than replace these
hooks name an optional base of families.py.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms import optimizers
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Needs,
    Network,
    ServerRound,
)
from fedexp.algorithms.local_training import OPTIMIZERS
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.limits import Checked
from fedexp.core.tree import Params, Tree


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each example, [B], of logits [B, C] and labels [B]."""
    return F.cross_entropy(logits, labels, reduction="none")


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of values [B] over the rows that are examples; 0 when there is none."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)


def one_per_example(algorithm: "FedAvg", losses: Tensor, batch: Batch) -> Tensor:
    """Return the losses [B]. Raises ConfigError for another shape: of a mean the engine could not
    leave out padding."""
    if not isinstance(losses, Tensor) or losses.shape != batch.y.shape:
        found = (
            f"the shape {[*losses.shape]}"
            if isinstance(losses, Tensor)
            else f"a {type(losses).__name__}"
        )
        raise ConfigError(
            f"algorithm: example_loss of {type(algorithm).__name__} returns {found}; "
            f"must be {[*batch.y.shape]}, a loss of each example (reduction='none')"
        )
    return losses


def first_pass(data: ClientData, ctx: Context, epochs: int) -> Iterator[tuple[Batch, Tensor]]:
    """Return the batches of the first of `epochs` passes over a client's data, and their masks [B],
    never None.

    A client that is trained together with longer ones has its later batches at the end; their masks
    are 0.
    """
    own = ctx.steps / epochs
    for batch in data.batches():
        if batch.step >= -(-data.steps // epochs):  # past the first pass even of the longest
            return
        ones = torch.ones(len(batch.y), dtype=ctx.steps.dtype, device=batch.y.device)
        yield batch, (ones if batch.mask is None else batch.mask) * (batch.step < own)


def fresh_pass(data: ClientData, ctx: Context) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the batches that `OwnTraining.after` has asked for, shuffled and augmented anew, and
    their masks [B]."""
    index, masks, draws = (ctx.plan.get(f"after_{name}") for name in ("index", "mask", "draws"))
    for step in range(len(index)):
        mask = masks[step].to(ctx.steps.dtype)
        x, y = data.take(index[step], None if draws is None else draws[step])
        yield Batch(x, y, mask, step), mask


def padded_numbers(numbers: np.ndarray, size: int) -> Tree:
    """Return a plan for `ClientData.take`: example numbers (at least one) padded to `size`, and
    their mask."""
    padded, mask = np.full(size, numbers[0]), np.zeros(size)
    padded[: len(numbers)], mask[: len(numbers)] = numbers, 1
    return {"numbers": padded, "mask": mask}


def rows_of_step(step: int, size: int, total: int, like: Tensor) -> Tensor:
    """Return which of `total` rows a local step takes, `size` or all of them, int64: the next ones,
    and from the beginning again at the end. like: on the device that they are for."""
    count = min(size, total)
    numbers = torch.arange(count, device=like.device)
    return (torch.as_tensor(step, device=like.device) * count + numbers) % total


# Hook -> its optional base in families.py, without which it would never be called.
OPTIONAL = {
    "adapt": "OwnModel",
    "fitted": "OwnModel",
    "initial_params": "OwnStart",
    "training_part": "OwnTraining",
    "epochs": "OwnTraining",
    "local_lr": "OwnTraining",
    "after": "OwnTraining",
    "prepare": "Prepared",
    "refine": "ServerTraining",
    "personal_model": "Personal",
    "personal_broadcast": "Personal",
    "counted": "Personal",
    "exchanges": "MultiExchange",
    "closing_exchanges": "MultiExchange",
    "roles": "MultiExchange",
    "begin_task": "Continual",
    "heads": "TaskHeads",
    "rehearse": "Rehearsal",
    "keep_examples": "Exemplars",
    "with_kept": "Exemplars",
}


class FedAvg(Checked, prefix="algorithm."):
    """The base of all algorithms: every hook with its FedAvg meaning."""

    optimizers: ClassVar[tuple[str, ...]] = OPTIMIZERS  # that suit its local training
    # why its server's step cannot be that of `server.optimizer`; empty: it can
    own_step: ClassVar[str] = ""
    scenarios: ClassVar[tuple[str, ...]] = (
        "none",
        "class_incremental",
        "domain_incremental",
        "rotations",
    )
    # only where all clients train on one task at a time, and on no other's
    separate_tasks: ClassVar[bool] = False
    inputs: ClassVar[tuple[str, ...]] = ("images", "text")
    # what its clients train is the global model, with its running statistics
    trains_model: ClassVar[bool] = True
    hint: ClassVar[str] = ""  # what to change where a run diverges or does not learn; said then
    # names of parameters that it treats apart, so they cannot be frozen
    must_train: ClassVar[tuple[str, ...]] = ()
    needs_features: ClassVar[bool] = False  # of the model, beyond its logits
    needs_head: ClassVar[bool] = False  # its last layer; what is in must_train needs it too
    # its clients keep running statistics: `client_init` gets the initial ones too
    keeps_buffers: ClassVar[bool] = False
    augments: ClassVar[bool] = True  # its training examples, where the data set says how
    # names in the server's state that every client of a round is sent, those that are there
    sends: ClassVar[tuple[str, ...]] = ("params",)

    paradigm: str = "federated"  # or centralized: one client holds all training data

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise ConfigError for an optional hook without its base."""
        super().__init_subclass__(**options)
        bases = {base.__name__ for base in cls.__mro__}
        for name, base in OPTIONAL.items():
            if name in vars(cls) and base not in bases:
                module = "exemplars" if base == "Exemplars" else "families"
                raise ConfigError(
                    f"algorithm: {cls.__name__} defines {name}, a hook of {base}; must inherit"
                    f" fedexp.algorithms.{module}.{base}"
                )

    @property
    def needs(self) -> Needs:
        return Needs()

    # --- what is kept and sent

    def server_init(self, params: Params, federation: Federation) -> Tree:
        """Return the server's state; `params` is the initial global model. Extra names in it are
        trained and averaged too."""
        return {"params": params}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        """Return what one client keeps between rounds, before it first takes part. `params`: the
        initial server's."""
        return {}

    def broadcast(self, server: Tree) -> Tree:
        """Return what the server sends to every client of a round; the rest of its state stays
        where it is."""
        return {name: server[name] for name in self.sends if name in server}

    # --- host side, before training

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        """Return numpy arrays such as extra example numbers or roles of this round, of one shape
        for all clients."""
        return {}

    # --- on the client

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        """Return the constants of one client's round, such as outputs of a teacher on fixed
        inputs."""
        return {}

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """Return the loss of each example, [B], not reduced: the engine reduces and masks."""
        return cross_entropies(net(params, batch.x).logits, batch.y)

    def penalty(self, net: Network, params: Params, ctx: Context) -> Tensor | float:
        """Return a scalar added to the mean of the example losses."""
        return 0.0

    def transform_grads(self, grads: Params, params: Params, batch: Batch, ctx: Context) -> Params:
        """Return the gradient to be used, changed before weight decay and momentum."""
        return grads

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """Return what a local step minimises: mean of the example losses plus the penalty; a
        scalar."""
        losses = one_per_example(self, self.example_loss(net, params, batch, ctx), batch)
        return masked_mean(losses, batch.mask) + self.penalty(net, params, ctx)

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Take one step of the optimizer, whose state is `memory`; return (params, memory,
        loss)."""
        grads, loss = net.gradient(lambda p: self.objective(net, p, batch, ctx), params)
        grads = self.transform_grads(grads, params, batch, ctx)
        params, memory = optimizers.step(params, grads, memory, ctx.lr, ctx.local, batch.step)
        return params, memory, loss

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return, after training, (message to the server, new client state)."""
        return {"params": params}, ctx.client

    # --- on the server

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        """Return the new server state. messages: leaves [|S|, ...] in the order of the cohort."""
        return server | {"params": tree.weighted_mean(messages["params"], round.weights)}
