"""CFeD: some clients learn the new task while others review the old ones, on unlabelled surrogate
examples.

Y. Ma et al., "Continual Federated Learning Based on Knowledge Distillation", IJCAI 2022, Eq.
(3)-(6). Task 1 is FedAvg. In a round of task t > 1, N = ceil(review_fraction m) of the m sampled
clients review, drawn anew in every round, and the others learn, all from the same global model for
E epochs:
    learner   L = CE on its examples of task t
    reviewer  L = lambda_d L_d on its own surrogate examples, teacher theta_{t-1} (see continual.py)
and the server averages with the n_k of the new task for both kinds. `server_distillation` (section
4.3), from the first task on: the server's surrogate set is cut at random into m + 1 contiguous
parts; part j gets the soft labels of local model j, the last those of the global model before the
round; the average is trained on all of them with L_d, for E epochs of batches of
`server_batch_size` with the clients' optimizer and with dropout, where the model has any.
`paradigm=centralized` (algorithm=cfed_c): one model; batches of the new task (CE) are mixed with
batches (lambda_d L_d) of as many surrogate examples, drawn at random in every round. Readings of
what the paper leaves open: N is rounded up; lambda_d stays on the reviewers' loss; the server's
term has weight 1. The paper lets a client without data of the new task review. Here no client lacks
them: every partition of a task gives each client at least one example or is refused
(Partition.build). Deviations from the released code: a client of a round never does both, the code
draws learners and reviewers apart; weights are n_k, not uniform; teachers are in eval mode, not in
training mode; a client trains on all of its examples in a new order in every epoch, not on the
first 80 % in one order without the last partial batch; the parts of server distillation are drawn
once a round, the code deals examples to the models in turn, with lambda_d as weight, on 80 % of the
shards of a random client; cfed_c keeps one mixture for all epochs there and leaves a surrogate set
smaller than the new task as it is, where it is repeated here.
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
    temperature: Positive  # T of teacher and student
    review_fraction: Share  # alpha: of the sampled clients, from the second task on
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
        return distillation.refined(net, server)


class Learner(FedAvg):
    """Client that trains on its examples of the task; clients.csv has the class's name as its
    role."""


class Reviewer(OwnTraining):
    """Client that trains on its surrogate examples, as the old model answers them."""

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
    """Client that trains on both, in batches of one kind each (the centralised form); the label of
    surrogate examples is -1."""

    draw: int  # seed of this round's choice of surrogate examples

    def training_part(
        self, federation: Federation, client: int
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        new, old = federation.parts[client], federation.surrogate[client]
        # As many: a random part, or all of them repeated.
        return new, np.resize(np.random.default_rng(self.draw).permutation(old), len(new))

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        logits, teacher = (
            net(params, batch.x).logits,
            net(ctx.server["old"], batch.x).logits.detach(),
        )
        learning = cross_entropies(logits, batch.y.clamp(min=0))
        reviewing = self.lambda_d * distillation_loss(logits, teacher, self.temperature)
        return torch.where(batch.y < 0, reviewing, learning)
