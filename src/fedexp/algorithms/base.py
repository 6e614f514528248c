"""FedAvg, and the hooks that other algorithms override.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, Algorithm 1: each sampled client runs E epochs of SGD from the global model, and the server
averages the local models. The weights p_k of the average are proportional to the numbers of
examples n_k (FedNTD Eq. 2). With `weighting=uniform`, they are 1/|S_t|, as in FedNTD's Algorithm 1.

The client-side hooks, from `client_setup` to `finish`, are pure and safe under torch.func.vmap: no
`.item()`, no `if tensor`, no indexing by boolean masks, and no in-place writes to the trees that
they receive. Their arguments are described in interfaces.py. mixins.py has bases for algorithms
whose clients keep a part of the model or do not train.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.algorithms import optimizers
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    ServerNetwork,
    ServerRound,
    TaskStart,
)
from fedexp.algorithms.local_training import OPTIMIZERS, LocalTraining
from fedexp.core import tree
from fedexp.core.errors import ConfigError, naming_hook
from fedexp.core.limits import Checked
from fedexp.core.tree import Params, Tree
from fedexp.core.unchanged import Unchanged


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each example, [B], for logits [B, C] and labels [B]."""
    # On a GPU, this takes fewer kernels inside vmap than F.cross_entropy, and has the same bits.
    return -F.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0]


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of the values [B] of all rows that are examples, or 0 without examples.

    mask: [B], 1 for examples and 0 for padding; None if all rows are examples.
    """
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)


def require_loss_per_example(algorithm: "FedAvg", losses: Tensor, batch: Batch) -> Tensor:
    """Check that the losses have the shape [B], and return them.

    Raises ConfigError for other shapes, because padding cannot be excluded from an averaged loss.
    """
    if not isinstance(losses, Tensor) or losses.shape != batch.y.shape:
        found = (
            f"a tensor of shape {[*losses.shape]}"
            if isinstance(losses, Tensor)
            else f"a {type(losses).__name__}"
        )
        raise ConfigError(
            f"algorithm: example_loss of {type(algorithm).__name__} returned {found}; must be "
            f"one loss per example, a tensor of shape {[*batch.y.shape]} (use reduction='none')"
        )
    return losses


def first_pass(data: ClientData, ctx: Context) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the batches of the first pass over a client's data, each with its mask [B].

    The masks are never None. If a client is trained together with clients that have more batches,
    it receives extra batches with mask 0 after its own batches. If a client's local training is
    shorter than a pass, so is this pass.
    """
    own = torch.minimum(ctx.steps, ctx.pass_steps)
    for batch in data.batches():
        # even the client with the most batches has completed its first pass
        if batch.step >= data.pass_steps:
            return
        ones = torch.ones(len(batch.y), dtype=ctx.steps.dtype, device=batch.y.device)
        yield batch, (ones if batch.mask is None else batch.mask) * (batch.step < own)


def fresh_pass(data: ClientData, ctx: Context) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the batches of an extra pass over a client's data, each with its mask [B].

    `FedAvg.extra_batches` sets the number of batches. The examples are shuffled and augmented
    again.
    """
    index, masks, draws = (ctx.plan.get(f"after_{name}") for name in ("index", "mask", "draws"))
    for step in range(len(index)):
        mask = masks[step].to(ctx.steps.dtype)
        x, y = data.take(index[step], None if draws is None else draws[step])
        yield Batch(x, y, mask, step), mask


def padded_numbers(numbers: np.ndarray, size: int) -> Tree:
    """Return example indices, padded to `size`, and a mask [size] that is 0 for padding.

    The result is a part of a client's plan. numbers: the example indices, at least one.
    """
    padded, mask = np.full(size, numbers[0]), np.zeros(size)
    padded[: len(numbers)], mask[: len(numbers)] = numbers, 1
    return {"numbers": padded, "mask": mask}


class FedAvg(Checked, prefix="algorithm."):
    """FedAvg, and the base class of all other algorithms."""

    _replaced: ClassVar = {"needs": "the attributes needs_public, needs_features and so on"}

    # why clients cannot keep their optimizer's state between rounds; empty if they can
    fresh_optimizer: ClassVar[str] = ""
    # values of `local.optimizer` that the algorithm supports
    optimizers: ClassVar[tuple[str, ...]] = OPTIMIZERS
    # whether steps with local.optimizer=sgd have no momentum and no weight decay
    plain_sgd: ClassVar[bool] = False
    # why no message may be lost (`cohorts.dropout_at=upload`); empty if messages may be
    needs_messages: ClassVar[str] = ""
    # why `server.optimizer` cannot be used with this algorithm; empty if it can be used
    own_step: ClassVar[str] = ""
    scenarios: ClassVar[tuple[str, ...]] = (
        "none",
        "class_incremental",
        "domain_incremental",
    )
    # whether all clients must train on the same task at any time, without examples of other tasks
    separate_tasks: ClassVar[bool] = False
    inputs: ClassVar[tuple[str, ...]] = ("images", "text")
    # whether clients train the global model, including its running statistics
    trains_model: ClassVar[bool] = True
    # advice shown to the user if a run diverges or does not learn
    hint: ClassVar[str] = ""
    # names of parameters that cannot be frozen, because the algorithm trains them separately
    must_train: ClassVar[tuple[str, ...]] = ()
    # smallest number of public examples that the server needs; 0: none
    needs_public: ClassVar[int] = 0
    needs_surrogate: ClassVar[bool] = False  # whether the algorithm needs unlabelled examples
    # whether the algorithm uses the model's features in addition to the logits
    needs_features: ClassVar[bool] = False
    # whether the algorithm needs the model's last layer; `must_train` implies this too
    needs_head: ClassVar[bool] = False
    # whether the algorithm reads the inputs of layers, so that the whole model must always run
    needs_inputs: ClassVar[bool] = False
    # whether clients keep running statistics; if so, `client_init` receives their initial values
    # too
    keeps_buffers: ClassVar[bool] = False
    # whether the algorithm has no global model; the clients' models are then tested instead, and
    # the results are means over all clients
    tests_clients: ClassVar[bool] = False
    # whether clients train an ordinary module (`fedexp.algorithms.plain.PlainClient`)
    plain: ClassVar[bool] = False
    # whether training examples are augmented, if the data set defines an augmentation
    augments: ClassVar[bool] = True
    # whether a pass leaves out batches that `local.drop_last` or batch norm excludes from training
    skips_batches: ClassVar[bool] = True
    # entries of the server's state that are sent to every client of the cohort, if they exist
    sends: ClassVar[tuple[str, ...]] = ("params",)

    paradigm: str = "federated"  # or "centralized": one client holds all training data

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise ConfigError if a hook would not be called, or if a field hides a hook."""
        super().__init_subclass__(**options)
        for name in (*vars(cls), *vars(cls).get("__annotations__", ())):
            hides = inspect.isfunction(vars(FedAvg).get(name))
            if hides and not callable(vars(cls).get(name)):
                raise ConfigError(
                    f"algorithm: {cls.__name__} has a field {name}, but `{name}` is a hook; rename"
                    " the field"
                )
        if "keeps" in vars(cls) and not hasattr(cls, "kept_part"):
            raise ConfigError(
                f"algorithm: {cls.__name__} defines keeps, a hook of KeepsPart; it must inherit"
                " from fedexp.algorithms.mixins.KeepsPart"
            )
        several = {"exchanges", "closing_exchanges", "roles"} & vars(cls).keys()
        if several and not cls.fresh_optimizer:
            cls.fresh_optimizer = "its clients train for several purposes"

    # --- the model

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        """Return the model in the form that this algorithm trains and tests.

        PyTorch's random number generator is seeded before the call.
        """
        return module

    def fitted(self, module: nn.Module) -> Self:
        """Return a copy of the algorithm that stores properties of the model, such as layer names.

        Raises ConfigError if the algorithm is not defined for this model.
        """
        return self

    def heads(self, tasks: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Return, for each task and class, the index of the output that predicts it, int [T, C].

        When a task is tested, only these outputs are used. An index of -1 excludes the class from
        the predictions for this task. If the result is None, output c predicts class c in every
        task. tasks: the classes of each task.
        """
        return None

    # --- state and messages

    def server_init(self, params: Params, federation: Federation) -> Tree:
        """Return the initial state of the server; `params` is the initial global model.

        Clients train all entries of "params", including those that an algorithm adds, and the
        server averages them.
        """
        return {"params": params}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        """Return the initial value of the state that a client keeps between rounds.

        params: the parameters in the server's initial state.
        """
        return {}

    def broadcast(self, server: Tree) -> Tree:
        """Return what the server sends to every client of the cohort."""
        return {name: server[name] for name in self.sends if name in server}

    def personal_broadcast(
        self, server: Tree, client: int, kept: Mapping[int, Tree], rng: np.random.Generator
    ) -> Tree:
        """Return what the server sends only to this client.

        kept: the states of all clients that have taken part so far. The server may use only what
        clients have sent to it. An algorithm that reads them declares `needs_messages`, because
        the server does not know the state of a client whose message was lost.
        """
        return {}

    def counted(self, sent: Tree, up: bool) -> Tree:
        """Return the part of the transmitted tree that counts as traffic.

        The rest is not sent in the published method, but only in fedexp, for example to build a
        generic model for testing.

        sent: if `up` is true, the messages of a cohort, with leaves of shape [|S|, ...]; otherwise
        the broadcast, with the client's personal broadcast under "personal". Both include
        "buffers".
        """
        return sent

    # --- the exchanges of a round

    def exchanges(self, federation: Federation) -> "Sequence[FedAvg]":
        """Return the exchanges of a round in the order in which they take place.

        In each exchange, the server sends a broadcast, the same cohort trains, and the server
        aggregates the messages.
        """
        return (self,)

    def closing_exchanges(self, federation: Federation) -> "Sequence[FedAvg]":
        """Return additional exchanges, in which all clients take part at the end of a task.

        They are not run after the last task. The states that clients return in them are not kept.
        """
        return ()

    def roles(
        self, federation: Federation, clients: Sequence[int], rng: np.random.Generator
    ) -> "Sequence[FedAvg]":
        """Return one algorithm for each client of the cohort. It provides the client-side hooks."""
        return [self] * len(clients)

    # --- host side, before training

    def training_part(
        self, federation: Federation, client: int
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """Return the indices of the examples that this client trains on.

        If the result is a tuple of several arrays, each batch contains examples from only one of
        them.
        """
        return federation.parts[client]

    def epochs(self, local: LocalTraining) -> float:
        """Return the number of passes over the local data per round, which may be a fraction.

        local: the options of a client, whose `epochs` are set: with `local.steps`, to those that
        give this number of steps, and for a slow client to fewer.
        """
        assert local.epochs is not None
        return local.epochs

    def local_lr(self, lr: float) -> float:
        """Return the learning rate of local training, given the round's learning rate."""
        return lr

    def extra_batches(self, federation: Federation, local: LocalTraining) -> int:
        """Return the maximum number of batches of the extra pass that `fresh_pass` yields."""
        return 0

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        """Return numpy arrays that a client needs in this round, such as indices of extra examples.

        The arrays must have the same shapes for all clients.
        """
        return {}

    # --- on the client

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        """Return values that stay constant while a client trains, such as a teacher's outputs."""
        return {}

    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        """Return the parameters from which local training starts.

        If they include running statistics, these replace the global model's.
        """
        params: Params = ctx.server["params"]
        return params

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """Return the loss of each example, [B]; padding is excluded later, in `objective`."""
        return cross_entropies(net(params, batch.x).logits, batch.y)

    def penalty(self, net: Network, params: Params, ctx: Context) -> Tensor | float:
        """Return a scalar added to the mean of the example losses."""
        return 0.0

    def transform_grads(self, grads: Params, params: Params, batch: Batch, ctx: Context) -> Params:
        """Return the gradients to which the optimizer adds weight decay and momentum."""
        return grads

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """Return the scalar that a local step minimises: the mean example loss plus the penalty."""
        losses = require_loss_per_example(self, self.example_loss(net, params, batch, ctx), batch)
        mean = masked_mean(losses, batch.mask)
        return mean + self.penalty(net, params, ctx) if overrides(self, "penalty") else mean

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Take one optimizer step and return (params, memory, loss).

        memory: the optimizer's state.
        """
        grads, loss = net.gradient(lambda p: self.objective(net, p, batch, ctx), params)
        grads = self.transform_grads(grads, params, batch, ctx)
        params, memory = optimizers.step(params, grads, memory, ctx.lr, ctx.local, batch.step)
        return params, memory, loss

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the client's message to the server and the client's new state, after training."""
        return {"params": params}, ctx.client

    # --- on the server

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        """Return the server's state at the start of the second or a later task.

        server: the state at the end of the previous task. PyTorch's random number generator is
        seeded before the call.
        """
        return server

    def training_data(self, server: Tree, federation: Federation) -> Federation:
        """Return the federation with the examples that the clients train on in this round.

        federation: the clients' data of the current task.
        """
        return federation

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        """Return the new server state.

        messages: a tree whose leaves have shape [|S|, ...], in the order of the cohort.
        """
        if "params" not in messages:
            raise ConfigError(
                f"algorithm: finish of {type(self).__name__} sends"
                f" {', '.join(messages) or 'nothing'}, but aggregate of FedAvg needs params; send"
                " the trained parameters under this name, or write an own aggregate"
            )
        return server | {"params": tree.weighted_mean(messages["params"], round.weights)}

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        """Train the aggregated model further, and return the server's new state.

        server: the state after aggregation, with averaged "buffers".
        """
        return server

    # --- the tests

    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the client's personal model, which the personalised test evaluates.

        If the model includes running statistics, these replace the global model's. state: the
        client's state, or the result of `client_init` if the client has not taken part yet.
        """
        params: Params = server["params"]
        return params


def overrides(algorithm: FedAvg, hook: str) -> bool:
    """Return whether an algorithm has its own version of a hook."""
    return getattr(type(algorithm), hook) is not getattr(FedAvg, hook)


NOTHING: Mapping[str, Tree] = {}
STEP_HOOKS = ("example_loss", "penalty", "objective", "transform_grads", "local_step")
ADVICE = "a hook must not change what it receives: return new tensors, or clone() them first"


def step_hooks(algorithm: FedAvg) -> str:
    """Return the names of the hooks of a local step that an algorithm overrides, for messages."""
    if algorithm.plain:
        return "fit"
    return " or ".join(hook for hook in STEP_HOOKS if overrides(algorithm, hook))


def require_unchanged(algorithm: FedAvg, hook: str, before: Unchanged) -> None:
    """Raise ConfigError if a hook has changed its arguments, since `before` was created."""
    before.check(f"algorithm: {hook} of {type(algorithm).__name__}", ADVICE)


@contextmanager
def reading(
    algorithm: FedAvg,
    hook: str,
    trees: Mapping[str, Tree],
    models: Mapping[str, Tree] = NOTHING,
    round: int = 0,
) -> Iterator[None]:
    """Call a hook in the block. Raises ConfigError if an own version of it changes its arguments.

    An exception of an own version becomes a HookFailed, see `naming_hook`.

    trees, models: the arguments by name. The elements of `models` are compared in round 1.
    """
    if not overrides(algorithm, hook):
        yield
        return
    before = Unchanged(trees)
    before.add(models, copies=round == 1)
    with naming_hook("algorithm", hook, type(algorithm)):
        yield
    require_unchanged(algorithm, hook, before)
