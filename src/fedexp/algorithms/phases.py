"""Local training in two phases: first the classifier, then the body (FedPAC, FedRep)."""

import torch

from fedexp.algorithms import heads, optimizers
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Batch, Context, Network
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.limits import Count
from fedexp.core.tree import Params, Tree


class HeadThenBody(FedAvg):
    """Base class of methods that train first the classifier, then the body.

    The phases take `head_epochs` and `local.epochs` epochs.

    """

    must_train = heads.HEAD
    fresh_optimizer = "its clients train the classifier and the body in separate phases"

    head_epochs: Count  # number of epochs in which only the classifier is trained

    def epochs(self, local: LocalTraining) -> float:
        return self.head_epochs + super().epochs(local)

    def rate_of_head(self, ctx: Context) -> float:
        """Return the learning rate of the first phase."""
        return ctx.lr

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, torch.Tensor]:
        """Take a step on the classifier in the first phase, and on the body in the second phase.

        The values and the optimizer state of all other parameters do not change.
        """
        head_steps = ctx.pass_steps * self.head_epochs
        grads, loss = net.gradient(lambda p: self.objective(net, p, batch, ctx), params)
        step = torch.as_tensor(batch.step, device=head_steps.device)
        head_phase, one = step < head_steps, torch.ones_like(head_steps)
        lr = torch.where(head_phase, self.rate_of_head(ctx) * one, ctx.lr * one)
        number = torch.where(head_phase, step * one, step - head_steps)
        stepped, remembered = optimizers.step(params, grads, memory, lr, ctx.local, number)

        def select(new: Params, old: Params) -> Params:
            return {
                k: torch.where(head_phase if k in heads.HEAD else ~head_phase, new[k], old[k])
                for k in old
            }

        return select(stepped, params), {k: select(remembered[k], memory[k]) for k in memory}, loss
