"""FedReg: each local step is corrected so that predictions on generated data change little.

Before training, each client generates images with the received global model. They represent what
the global model knows and what the client must not forget. After each optimizer step, the client
removes the part of its change that would increase the loss on these images. The server averages as
in FedAvg.

C. Xu et al., "Acceleration of Federated Learning with Alleviated Forgetting in Local Training",
ICLR 2022, section 4 and the authors' code. From each batch (x, y) of the first epoch, the client
makes two batches, with the global model f in eval mode:
    pseudo data     x^s: `ascent` steps x <- x + eta_s sign(grad_x CE(f(x), y)),
                    with the soft labels y^s = softmax(f(x^s))
    perturbed data  x^p: the same steps with eta_p = eta_ratio * eta_s, and the labels y.
Step j of each epoch uses the pseudo and perturbed data made from batch j. First, the client takes
an SGD step, with the gradient at a point w' between the local and the global model:
    w' = gamma w + (1 - gamma) w_global,   w <- w - lr grad CE(w'; x, y).
This step has no momentum and no weight decay; any other local.optimizer makes its normal update.
Then the client projects its change delta, with gradients at the midpoint m between both models:
    delta = w - w_global,   m = (w + w_global) / 2
    g_s = grad CE(m; x^s, y^s),   a = max(0, <delta, g_s> / ||g_s||^2)
    g_p = grad CE(m; x^p, y),     b = max(0, <delta - a g_s, g_p> / ||g_p||^2)
    w <- w - a g_s - b g_p.
The paper averages uniformly (weighting=uniform). Generated images remain normalised and are not
clipped, as in the authors' code (Zoesgithub/FedReg, FedUtils/fed/fedreg.py), in which the clamp has
no effect. They do not update a client's running statistics, because that code processes them with a
second copy of the model (`penalty_m`).

Differs from the released code: That code generates images in a separate pass over newly shuffled
and augmented examples, so its pseudo batch j does not come from batch j of the first epoch. It also
modifies the training batch in place; fedexp does not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import FedAvg, first_pass, masked_mean
from fedexp.algorithms.interfaces import Batch, ClientData, Context, Network
from fedexp.core import tree
from fedexp.core.limits import Count, NonNegative, Positive, Share
from fedexp.core.tree import Params, Tree

SMALLEST = 1e-30  # added to denominators, as in the authors' code


class FedReg(FedAvg):
    inputs = ("images",)  # gradients are added to the inputs
    plain_sgd = True

    gamma: Share  # weight of the local model at the point where the gradient is computed
    eta_s: Positive  # step size of the ascent steps for the pseudo data
    eta_ratio: NonNegative  # eta_p / eta_s
    ascent: Count  # number of ascent steps for the pseudo and the perturbed data

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        made = [self.prepare(net, batch, mask, ctx) for batch, mask in first_pass(data, ctx)]
        return tree.stack([pad(one, len(made[0]["y"])) for one in made]) if made else {}

    def prepare(self, net: Network, batch: Batch, mask: Tensor, ctx: Context) -> Tree:
        pseudo, perturbed = self.ascend(net, ctx.server["params"], batch, mask)
        soft = net(ctx.server["params"], pseudo, mask).logits.softmax(-1)
        return {"pseudo": pseudo, "soft": soft, "perturbed": perturbed, "y": batch.y, "mask": mask}

    def ascend(self, net: Network, model: Params, batch: Batch, mask: Tensor) -> tuple[Tensor, ...]:
        """Return the pseudo data and the perturbed data for a batch.

        Both start from the same images, so the gradient of the first step is computed only once.
        """

        def direction(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            return grad(lambda x: F.cross_entropy(net(model, x, mask).logits, y, reduction="sum"))(
                x
            ).sign()

        first, sizes = direction(batch.x, batch.y, mask), (self.eta_s, self.eta_s * self.eta_ratio)
        both, y = torch.cat([batch.x + eta * first for eta in sizes]), torch.cat([batch.y] * 2)
        eta = torch.cat([torch.full_like(batch.x, eta) for eta in sizes])
        for _ in range(self.ascent - 1):
            both = both + eta * direction(both, y, torch.cat([mask] * 2))
        return both.chunk(2)

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        start = ctx.server["params"]
        grads, loss = net.gradient(
            lambda p: cross_entropy(net, p, batch.x, batch.y, batch.mask),
            interpolate(params, start, self.gamma),
        )
        if ctx.local.optimizer != "sgd":
            params, memory = optimizers.step(params, grads, memory, ctx.lr, ctx.local, batch.step)
        else:
            params = {k: params[k] - ctx.lr * grads[k] for k in params}
        return self.project_gradient(net, params, batch.step, ctx), memory, loss

    def project_gradient(self, net: Network, params: Params, step: int, ctx: Context) -> Params:
        """Return the parameters w - a g_s - b g_p (see the module's docstring).

        step: the number of the local step, from 0.

        """
        start = ctx.server["params"]
        number = torch.as_tensor(step, device=ctx.steps.device)
        number = torch.remainder(number, ctx.pass_steps.clamp(min=1)).long()
        made = {k: v.index_select(0, number[None]).squeeze(0) for k, v in ctx.setup.items()}
        middle, delta = interpolate(params, start, 0.5), tree.subtract(params, start)
        for x, y in ((made["pseudo"], made["soft"]), (made["perturbed"], made["y"])):

            def loss(p: Params, x: Tensor = x, y: Tensor = y) -> Tensor:
                return cross_entropy(net, p, x, y, made["mask"])

            grads, _ = net.gradient(loss, middle, moves=False)
            size = (tree.dot(delta, grads) / (tree.dot(grads, grads) + SMALLEST)).clamp(min=0)
            delta = {k: delta[k] - size * grads[k] for k in delta}
        return {k: start[k] + delta[k] for k in delta}


def interpolate(params: Params, start: Params, gamma: float) -> Params:
    return {k: gamma * params[k] + (1 - gamma) * start[k] for k in params}


def cross_entropy(
    net: Network, params: Params, x: Tensor, y: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the mean cross-entropy of a batch; y: labels [B] or class probabilities [B, C]."""
    return masked_mean(F.cross_entropy(net(params, x, mask).logits, y, reduction="none"), mask)


def pad(one: Tree, size: int) -> Tree:
    """Pad a partial batch to `size` rows by repeating its first example with mask 0."""
    missing = size - len(one["y"])
    if not missing:
        return one
    longer = {k: torch.cat([v, v[:1].expand(missing, *v.shape[1:])]) for k, v in one.items()}
    return longer | {"mask": torch.cat([one["mask"], one["mask"].new_zeros(missing)])}
