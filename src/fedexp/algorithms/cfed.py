"""CFeD: some clients learn the new task, others review old tasks on unlabelled surrogate examples.

Learners train on their own examples of the new task. To limit forgetting, reviewers distil the
model from the end of the previous task on surrogate examples.

Y. Ma et al., "Continual Federated Learning Based on Knowledge Distillation", IJCAI 2022, Eq.
(3)-(6). Task 1 is trained with FedAvg. In each round of task t > 1, N = ceil(review_fraction m) of
the m sampled clients are drawn at random to review, and the others learn. All clients start from
the global model and train for E epochs with the losses
    learner   L = CE on its examples of task t
    reviewer  L = lambda_d L_d on its surrogate examples, with the teacher theta_{t-1} (see
              continual.py)
The server weights learners and reviewers by their n_k in the new task.

`server_distillation` (section 4.3) starts in the first task. The server shuffles its surrogate set
and splits it into m + 1 parts. Part j gets the soft labels of local model j, and the last part gets
the soft labels of the global model from before the round. The averaged model is then trained on all
parts with L_d for E epochs, in batches of `server_batch_size`, with the clients' optimizer, and
with dropout if the model has any.

`paradigm=centralized` (algorithm=cfed_c) trains one model. Batches of the new task (with the loss
CE) are mixed with batches of surrogate examples (with the loss lambda_d L_d). In each round, as
many surrogate examples as new ones are drawn at random.

The paper does not specify the following: N is rounded up, lambda_d is part of the reviewers' loss,
and the server's distillation loss has weight 1. In the paper, clients without data of the new task
review. In fedexp, every client has data, because `Partition.build` rejects partitions in which a
client has no example of a task.

Differs from the released code: A client never both learns and reviews in a round; in the code it
can, because learners and reviewers are drawn independently. Weights are n_k, not uniform. Teachers
run in eval mode, not in training mode. A client trains on all of its examples in a new order in
each epoch, not on the first 80 % in a fixed order without the last partial batch. The parts of
server distillation are drawn once per round; the code assigns examples to the models in turn, uses
lambda_d as weight, and uses 80 % of the shards of a random client. For cfed_c, the code draws the
surrogate examples once for all epochs, and does not repeat a surrogate set that is smaller than the
new task.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms import distillation
from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.continual import Remembering, distillation_loss
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Network,
    ServerNetwork,
    ServerRound,
)
from fedexp.core.limits import Count, NonNegative, Positive, Share
from fedexp.core.tree import Params, Tree


class CFeD(Remembering):
    needs_surrogate = True

    lambda_d: NonNegative  # weight of the reviewers' loss
    temperature: Positive  # temperature T of teacher and student
    # fraction of the sampled clients that review, from the second task on (the paper's alpha)
    review_fraction: Share
    server_distillation: bool
    server_batch_size: Count

    def roles(
        self, federation: Federation, clients: Sequence[int], rng: np.random.Generator
    ) -> Sequence[FedAvg]:
        if federation.task == 0:
            return [Learner()] * len(clients)
        if self.paradigm == "centralized":
            draw = int(rng.integers(2**63))
            return [Student(lambda_d=self.lambda_d, temperature=self.temperature, draw=draw)]
        reviewers = math.ceil(self.review_fraction * len(clients) - 1e-9)
        chosen = rng.permutation(len(clients))[:reviewers]
        reviewer = Reviewer(lambda_d=self.lambda_d, temperature=self.temperature)
        return [reviewer if position in chosen else Learner() for position in range(len(clients))]

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        if not self.server_distillation:
            return server
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

        size, count = self.server_batch_size, len(examples)
        pass_steps = -(-count // size)
        steps = local.steps_of(pass_steps)
        passes = distillation.minibatches(round.rng, count, size, -(-steps // pass_steps))
        batches = itertools.islice(passes, steps)
        return distillation.distil(
            net, server, examples, batches, loss, local, round.lr, dropout=round.rng
        )


class Learner(FedAvg):
    """Client that trains on its examples of the current task.

    The column `role` of clients.csv shows the name of this class.
    """


class Reviewer(FedAvg):
    """Client that distils the model of the previous task on its surrogate examples."""

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
    """The only client with `paradigm=centralized`. It trains on new and on surrogate examples.

    Each batch contains either new or surrogate examples. Surrogate examples have the label -1.
    """

    draw: int  # seed for this round's choice of surrogate examples

    def training_part(
        self, federation: Federation, client: int
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        new, old = federation.parts[client], federation.surrogate[client]
        # as many surrogate examples as new ones: a random subset, or the whole set, repeated
        return new, np.resize(np.random.default_rng(self.draw).permutation(old), len(new))

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        logits, teacher = (
            net(params, batch.x).logits,
            net(ctx.server["old"], batch.x).logits.detach(),
        )
        learning = cross_entropies(logits, batch.y.clamp(min=0))
        reviewing = self.lambda_d * distillation_loss(logits, teacher, self.temperature)
        return torch.where(batch.y < 0, reviewing, learning)
