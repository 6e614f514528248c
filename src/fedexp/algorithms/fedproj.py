"""FedProj: local gradients are projected so that they do not undo what the ensemble knows.

The server distils the ensemble of local models on public examples. It sends the ensemble's outputs
on these examples to the clients, as an episodic memory. A client removes from each gradient the
component that would increase the distillation loss on the memory.

A. Chunduru, M. Morafah, M. Morafah, V. P. Chellapandi, A. Li, "Avoid Forgetting by Preserving
Global Knowledge Gradients in Federated Learning with Non-IID Data", arXiv 2505.20485 (2025); a
later version is "Towards Preventing Global Knowledge Forgetting in Federated Learning with Non-IID
Data" (OpenReview lhTWPh3Tjm). After a round with the local models w_k,
    z(x) = mean_k f_{w_k}(x)                                    ensemble on public examples x
    w <- sum_k p_k w_k, then min_w T^2 KL(softmax(z / T) || softmax(f_w / T))           server
The memory of the next round is a random subset of the public examples x, with z(x). A local step
computes the gradient g of the loss on a mini-batch, and, on a batch of the memory, the gradient
    m = grad_w KL(softmax(z / T) || softmax(f_w / T)).
The optimizer receives the solution of min_v ||v - g||^2 with the constraint <v, m> >= 0,
    v = g - min(0, <g, m>) / ||m||^2 * m,
which is the closed form of A-GEM (Chaudhry et al., ICLR 2019) for a single constraint. The first
`warmup` rounds have no projection; the first round never has one, because there is no memory yet.

The paper's abstract and introduction and a review of it were available, but not the section with
the equations, so the numbers of the equations are not known. The abstract states that the memory
holds the average logits of the ensemble on unlabelled public examples, and that it regulates each
local step. The formulas, and everything else that is not listed below, are those of the authors'
code (Abhijit4-debug/FedProj_Neurips, src/benchmarks/main_fedproj.py and
src/client/client_fedproj.py): Teachers run in eval mode. The student and the model on the memory
run in train mode, so that the memory's batches also update running statistics. The server uses Adam
without weight decay. Weight decay and momentum of the clients apply after the projection.

Differs from the paper: Public examples are a part of the training data (public.fraction), not of
another data set.

Differs from the released code: The code projects only in rounds 11 to 90 of 100 (`warmup` would be
10); in its variants, a client is exempt with probability 0.7 (fedproj3) or 0.3 (texts). The code
rounds the memory's inputs and logits towards zero to integers, does not project if ||m||^2 is at
most 1e-6, adds 1e-8 to ||m||^2, and limits the factor of m to 10. Its term
gamma ||w - sum_k p_k w_k||^2 compares the parameters with themselves and is always 0. The variant
fedproj3 adds a squared distance of features with the weight gamma2; it is not implemented. Here,
the server shuffles the memory once per round, and each client reads it cyclically from a random
position; in the code, each client shuffles it again for each pass.
"""

from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms import distillation, optimizers
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.distillation import kl_divergence
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    ServerNetwork,
    ServerRound,
)
from fedexp.core import tree
from fedexp.core.limits import Count, Limit, Positive
from fedexp.core.tree import Params, Tree

SMALLEST = 1e-30  # added to the denominator of the projection
LEAST = 2  # smallest number of examples that batch norm can normalise
Examples = Annotated[int, Limit(f"at least {LEAST}", lambda value: value >= LEAST)]


def project(grads: Params, past: Params) -> Params:
    """Return the gradients without the component that increases the loss on the memory.

    past: the gradient m of the loss on the memory. If <g, m> >= 0, the gradients g are unchanged.
    """
    factor = tree.dot(grads, past).clamp(max=0) / (tree.dot(past, past) + SMALLEST)
    return {k: grads[k] - factor * past[k] for k in grads}


class FedProj(FedAvg):
    # Texts are not supported, because the memory has no dropout keys, which texts need in training.
    inputs = ("images",)
    sends = ("params", "episodic")

    tau: Positive  # temperature T
    lr: Positive  # learning rate of Adam on the server
    batch_size: Count  # examples of the public set per step on the server
    epochs_on_server: Count  # passes over the public set
    memory: Examples | None  # public examples in the memory, drawn in each round; None: all
    memory_batch: Examples  # examples of the memory per local step
    warmup: Count  # rounds without projection

    @property
    def needs_public(self) -> int:  # type: ignore[override]
        return self.memory or LEAST

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "rounds": next(iter(params.values())).new_zeros(())}

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        return {"start": rng.integers(2**31)}

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        if "episodic" not in ctx.server:
            return {}
        return {"x": data.take(ctx.server["episodic"]["numbers"])[0]}

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        if "episodic" not in ctx.server:
            return super().local_step(net, params, memory, batch, ctx)
        x, teacher = self.recall(batch.step, ctx)

        def forgetting(p: Params) -> Tensor:
            return kl_divergence(teacher, net(p, x).logits, self.tau).mean()

        grads, loss = net.gradient(lambda p: self.objective(net, p, batch, ctx), params)
        past, _ = net.gradient(forgetting, params)
        grads = self.transform_grads(project(grads, past), params, batch, ctx)
        params, memory = optimizers.step(params, grads, memory, ctx.lr, ctx.local, batch.step)
        return params, memory, loss

    def recall(self, step: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return a batch of the memory: the inputs and the ensemble's logits, [B, C].

        step: the number of the local step, from 0.
        """
        logits = ctx.server["episodic"]["logits"]
        size = min(self.memory_batch, len(logits))
        places = torch.arange(size, device=logits.device) + ctx.plan["start"] + step * size
        chosen = torch.remainder(places, len(logits))
        return ctx.setup["x"][chosen], logits[chosen]

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        public = round.public
        assert public is not None
        models = distillation.local_models(messages, round.buffers)
        ensemble = public.logits(models).mean(0)

        def loss(student: Tensor, labels: Tensor, numbers: np.ndarray) -> Tensor:
            teacher = ensemble[torch.as_tensor(numbers, device=ensemble.device)]
            return self.tau**2 * kl_divergence(teacher, student, self.tau).mean()

        # the server's optimizer starts anew in each round, whatever the clients keep
        adam = replace(round.local, optimizer="adam", weight_decay=0.0, keep_optimizer=False)
        batches = distillation.minibatches(
            round.rng, len(public), self.batch_size, self.epochs_on_server
        )
        trained = distillation.distil(net, server, public, batches, loss, adam, self.lr)
        trained["rounds"] = server["rounds"] + 1
        if trained["rounds"] < self.warmup:
            return trained
        chosen = torch.from_numpy(round.rng.permutation(len(public))[: self.memory])
        numbers = public.numbers[chosen].to(ensemble.device)
        episodic = {"numbers": numbers, "logits": ensemble[chosen.to(ensemble.device)]}
        return trained | {"episodic": episodic}
