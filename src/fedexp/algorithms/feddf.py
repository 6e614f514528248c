"""FedDF: the server distils the ensemble of local models into their average on public data.

Clients train as in FedAvg.

T. Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
Eq. (1) and Algorithm 1. Starting from the average w = sum_k p_k w_k, the server trains on
mini-batches of public images x, without their labels, and minimises
    min_w  KL( softmax(mean_k f_{w_k}(x)) || softmax(f_w(x)) ).
The mean is over logits, not probabilities, and the temperature is 1. Teachers run in eval mode, and
the student runs in train mode (textcnn without dropout).

The settings are those of the authors' code: Adam with lr 1e-3, cosine annealing over `steps` =
10,000 steps of batches of 128, and gradients clipped at norm 5. The student is evaluated on
held-out labelled data every 100 steps, and the best student is used. Training stops after
`patience` = 1,000 steps without improvement (2,000 if the code is called without a value). As in
the code's default, the average from which the student starts is not a candidate.

If `epochs_on_server` is greater than 0, the server makes this number of passes over the public set
and uses the last model, as in comparisons with Flashback (E_s); `steps`, `patience`, `interval` and
`validation` then have no effect. Differs from the released code: The authors validate on 10 % of
the training data. Here, a random fraction `validation` of the public set is used for validation.
This is the only use of public labels.
"""

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms import distillation
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import PublicData, ServerNetwork, ServerRound
from fedexp.algorithms.optimizers import clipped
from fedexp.core.limits import Count, CountFrom0, NonNegative, OpenShare, Positive
from fedexp.core.tree import Params, Tree


class FedDF(FedAvg):
    lr: Positive  # learning rate of Adam
    batch_size: Count
    clip: NonNegative  # maximum norm of the gradient; 0: no clipping
    epochs_on_server: CountFrom0  # passes over the public set; 0: train for at most `steps` steps
    steps: Count  # maximum number of steps
    patience: Count  # number of steps without improvement before training stops
    interval: Count  # number of steps between two evaluations on the validation data
    validation: OpenShare  # fraction of the public set used for validation

    @property
    def needs_public(self) -> int:  # type: ignore[override]
        return 1 if self.epochs_on_server else 2  # one for validation, the rest for training

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        public = round.public
        assert public is not None
        models = distillation.local_models(messages, round.buffers)
        loss = divergence_from(public.logits(models).mean(0))
        net.load(server["params"], server["buffers"])
        if not self.epochs_on_server:
            return self.search(net, server, public, loss, round.rng)
        batches = distillation.minibatches(
            round.rng, len(public), self.batch_size, self.epochs_on_server
        )
        total = self.epochs_on_server * -(-len(public) // self.batch_size)
        distillation.fit(net, public, batches, loss, Adam(net.params, self.lr, total, self.clip))
        return distillation.with_trained_model(net, server)

    def search(
        self,
        net: ServerNetwork,
        server: Tree,
        public: PublicData,
        loss: distillation.Loss,
        rng: np.random.Generator,
    ) -> Tree:
        """Train with early stopping and return the student that is best on the validation data.

        The average from which the student starts is not a candidate.
        """
        order = rng.permutation(len(public))
        held = max(int(self.validation * len(public)), 1)
        check, rest = order[:held], order[held:]
        forever = (rest[part] for part in endless(rng, len(rest), self.batch_size))
        adam = Adam(net.params, self.lr, self.steps, self.clip)
        best, best_accuracy, best_step = server, -math.inf, 0
        for done in range(0, self.steps, self.interval):
            step = min(done + self.interval, self.steps)
            distillation.fit(net, public, islice(forever, step - done), loss, adam)
            now = accuracy(net, public, check)
            if now > best_accuracy:
                best, best_accuracy, best_step = (
                    distillation.with_trained_model(net, server),
                    now,
                    step,
                )
            elif step - best_step >= self.patience:
                break
        return best


def divergence_from(teacher: Tensor) -> distillation.Loss:
    """Return a loss function: the mean KL divergence of the student from the teacher on a batch.

    teacher: the teacher's logits for all public examples, [n, C].
    """
    log_p = F.log_softmax(teacher, -1)

    def loss(student: Tensor, labels: Tensor, numbers: np.ndarray) -> Tensor:
        log_q, target = F.log_softmax(student, -1), log_p[torch.as_tensor(numbers)]
        return F.kl_div(log_q, target, log_target=True, reduction="batchmean")

    return loss


def endless(rng: np.random.Generator, examples: int, size: int) -> Iterator[np.ndarray]:
    while True:
        yield from distillation.minibatches(rng, examples, size, 1)


def accuracy(net: ServerNetwork, public: PublicData, numbers: np.ndarray) -> float:
    """Return the accuracy of the model in `net` in eval mode on the given public examples."""
    with torch.no_grad():
        x, y = public.take(numbers)
        return float(
            (net(net.snapshot() | net.buffers(), x).logits.argmax(-1) == y).double().mean()
        )


class Adam:
    """A `distillation.Update`: Adam with cosine annealing and gradient clipping."""

    def __init__(self, params: Params, lr: float, steps: int, clip: float):
        self.optimizer = torch.optim.Adam(list(params.values()), lr=lr)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.clip = clip

    def __call__(self, params: Params, grads: Params) -> None:
        for name, grad in clipped(grads, self.clip).items():
            params[name].grad = grad
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
