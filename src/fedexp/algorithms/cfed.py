"""CFeD: some clients learn the new task while others review the old ones on unlabelled surrogate
examples.

Y. Ma et al., "Continual Federated Learning Based on Knowledge Distillation", IJCAI 2022, Eq.
(3)-(6). Task 1 is FedAvg. In each round of task t > 1, N = ceil(review_fraction m) of the m sampled
clients, drawn at random, review, and the others learn. All start from the same global model and
train for E epochs:
    learner   L = CE on its examples of task t
    reviewer  L = lambda_d L_d on its surrogate examples, teacher theta_{t-1} (see continual.py)
The server averages with the n_k of the new task for both kinds of clients.

`server_distillation` (section 4.3) applies from the first task on. The server's surrogate set is
split at random into m + 1 contiguous parts. Part j gets the soft labels of local model j, and the
last part those of the global model before the round. The average is trained on all parts with L_d
for E epochs, in batches of `server_batch_size`, with the clients' optimizer and with dropout if the
model has any.

`paradigm=centralized` (algorithm=cfed_c) trains one model. Batches of the new task (CE) are mixed
with batches (lambda_d L_d) of the same number of surrogate examples, drawn at random in each round.

The paper leaves some points open. Here N is rounded up, lambda_d is kept in the reviewers' loss,
and the server's term has weight 1. In the paper, a client without data of the new task reviews.
Here every client has data: every partition of a task gives each client at least one example or is
refused (Partition.build).

Deviations from the released code: A client never both learns and reviews in a round; the code draws
learners and reviewers independently. Weights are n_k, not uniform. Teachers run in eval mode, not
in training mode. A client trains on all of its examples in a new order in each epoch, not on the
first 80 % in a fixed order without the last partial batch. The parts of server distillation are
drawn once per round; the code assigns examples to the models in turn, uses lambda_d as weight, and
uses 80 % of the shards of a random client. For cfed_c, the code keeps one mixture for all epochs
and does not enlarge a surrogate set smaller than the new task; here the set is repeated.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms import distillation, optimizers
from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.continual import Remembering, distillation_loss
from fedexp.algorithms.families import MultiExchange, OwnTraining, ServerTraining
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Needs,
    Network,
    ServerNetwork,
    ServerRound,
)
from fedexp.core.limits import Count, NonNegative, Positive, Share
from fedexp.core.tree import Params, Tree


class CFeD(Remembering, MultiExchange, ServerTraining):
    lambda_d: NonNegative  # weight of the review
    temperature: Positive  # temperature T of teacher and student
    # alpha: share of the sampled clients that review, from the second task on
    review_fraction: Share
    server_distillation: bool
    server_batch_size: Count

    @property
    def needs(self) -> Needs:
        holders = "clients and server" if self.server_distillation else "clients"
        return Needs(
            server_state="old model",
            down=1,
            data=f"surrogate, unlabelled ({holders})",
            surrogate=True,
            work="reviewers train on surrogate examples with a teacher",
            server_work="training on surrogate examples with a teacher" * self.server_distillation,
        )

    def roles(
        self, federation: Federation, clients: Sequence[int], rng: np.random.Generator
    ) -> Sequence[FedAvg]:
        if federation.task == 0:
            return [Learner()] * len(clients)
        if self.paradigm == "centralized":
            draw = int(rng.integers(2**63))
            return [Student(lambda_d=self.lambda_d, temperature=self.temperature, draw=draw)] * len(
                clients
            )
        reviewers = math.ceil(self.review_fraction * len(clients) - 1e-9)
        chosen = rng.permutation(len(clients))[:reviewers]
        reviewer = Reviewer(lambda_d=self.lambda_d, temperature=self.temperature)
        return [reviewer if position in chosen else Learner() for position in range(len(clients))]

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        return self.distil(net, server, messages, round) if self.server_distillation else server

    def distil(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        examples, local = round.surrogate, round.local
        assert examples is not None
        old = round.previous["params"] | round.previous["buffers"]
        teachers = [*distillation.local_models(messages, round.buffers), old]
        parts = np.array_split(round.rng.permutation(len(examples)), len(teachers))
        answers = examples.logits_of_parts(teachers, parts)
        targets = torch.empty(
            len(examples), answers[0].shape[-1], dtype=answers[0].dtype, device=answers[0].device
        )
        for part, answer in zip(parts, answers, strict=True):
            targets[torch.as_tensor(part, device=targets.device)] = answer

        def loss(student: Tensor, labels: Tensor, numbers: np.ndarray) -> Tensor:
            teacher = targets[torch.as_tensor(numbers, device=targets.device)]
            return distillation_loss(student, teacher, self.temperature).mean()

        net.load(server["params"], server["buffers"])
        memory, steps = optimizers.memory_of(net.snapshot(), local), iter(range(2**62))

        def update(params: Params, grads: Params) -> None:
            optimizers.step_in_place(params, grads, memory, round.lr, local, next(steps))

        batches = distillation.minibatches(
            round.rng, len(examples), self.server_batch_size, local.epochs
        )
        distillation.fit(net, examples, batches, loss, update, dropout=round.rng)
        return distillation.with_trained_model(net, server)


class Learner(FedAvg):
    """Client that trains on its examples of the task.

    clients.csv shows the name of this class as the client's role.
    """


class Reviewer(OwnTraining):
    """Client that trains on its surrogate examples with the old model's predictions as targets."""

    lambda_d: float
    temperature: float

    def training_part(
        self, federation: Federation, client: int
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        return federation.surrogate[client]

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        teacher = net(ctx.server["old"], batch.x).logits.detach()
        return self.lambda_d * distillation_loss(
            net(params, batch.x).logits, teacher, self.temperature
        )


class Student(Reviewer):
    """Client that trains on both kinds of examples (the centralised form).

    Each batch has examples of one kind. Surrogate examples have the label -1.
    """

    draw: int  # seed for this round's choice of surrogate examples

    def training_part(
        self, federation: Federation, client: int
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        new, old = federation.parts[client], federation.surrogate[client]
        # the same number of surrogate examples: a random subset, or all of them repeated
        return new, np.resize(np.random.default_rng(self.draw).permutation(old), len(new))

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        logits, teacher = (
            net(params, batch.x).logits,
            net(ctx.server["old"], batch.x).logits.detach(),
        )
        learning = cross_entropies(logits, batch.y.clamp(min=0))
        reviewing = self.lambda_d * distillation_loss(logits, teacher, self.temperature)
        return torch.where(batch.y < 0, reviewing, learning)
