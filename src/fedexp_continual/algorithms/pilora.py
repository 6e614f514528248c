"""PILoRA: new adapters for each task, kept different by a penalty, and prototype classifiers.

The backbone is frozen. Clients train low-rank adapters and one prototype per class; an image is
assigned to the class of the nearest prototype. The server averages the adapters and combines the
prototypes.

H. Guo, F. Zhu, W. Liu, X.-Y. Zhang, C.-L. Liu, "PILoRA: Prototype Guided Incremental LoRA for
Federated Class-Incremental Learning", ECCV 2024. For an example with label y and D features f, let
c_i be the prototype of class i and d_i = sqrt(||f - c_i||^2 / D). A local step in task t minimises
    L = CE(-d / T, y) + lambda_pl d_y + gamma sum_{s<t} sum |A_s A_t^T| + l1 sum |A_t|
over the prototypes of the task's classes and the adapters A_t and B_t, which are new in task t. The
second term pulls features towards the prototype of their class, the third term keeps A_t orthogonal
to the adapters A_s of earlier tasks, and the fourth term keeps A_t sparse. The sums without an
index are over all matrix entries and layers. In training, the model does not use the adapters of
earlier tasks.

The server averages A_t and B_t, weighted by n_k. It combines the clients' prototypes of a class
with the weights softmax(u / 0.2), which are larger for prototypes close to the clients' mean
features. For each client, u is 1 / (sum of the distances between its prototype and the mean
features of all clients that have the class), scaled to the range 0..1 over the clients. If no
client has a class, the prototype is the plain mean. The tested model has A = A_1 + ... + A_t and B
= B_1 + ... + B_t.

The formulas come from the authors' code (Ghy0501/PILoRA, PILoRA-cifar: update.py, utils.py, VLT.py;
PILoRA-tiny/CPN.py); the equation numbers of the paper were not available. The code's values are
lambda_pl = 0.001, gamma = 0.5, l1 = 0.01, T = 1, and Adam with learning rates 2e-3 for prototypes
and 1e-5 for adapters. The code adapts the queries and values in the first block,
`model.lora.targets=[blocks.0.attn.qkv]` with rank 4 and a separate A and B for queries and values;
fedexp uses one A and one B for the whole layer.

Differs from the released code: From the third task on, the code's tested model adds only A_1 and
B_1 to the adapters of the current task and omits the adapters of the tasks in between; fedexp adds
all adapters. In both implementations, the change B A of a layer is a product of sums, which
contains cross terms B_s A_t, s != t, in addition to the products B_s A_s of each task. PILoRA in
fed-mammoth (_models/pilora.py) has these terms too, and also trains with the sums. It is not known
whether the paper includes the cross terms. Mean features are computed with the trained local model,
in eval mode over one epoch, not during training. All learning rates have the same schedule.
Training never stops early. The method requires tasks with new classes.
"""

import torch
from torch import Tensor, nn

from fedexp.algorithms import prototypes
from fedexp.algorithms.base import cross_entropies, first_pass
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    ServerRound,
    TaskStart,
)
from fedexp.core import tree
from fedexp.core.limits import NonNegative, Positive
from fedexp.core.tree import Params, Tree
from fedexp.models import classifier_of
from fedexp_continual.algorithms.adapters import DOWN, NewAdapters, Prototypes, adapters, layers

CENTERS = "classifier.centers"
SOFTNESS = 0.2  # softmax temperature for the prototypes' weights


class PILoRA(NewAdapters):
    temperature: Positive  # temperature T of the distances
    lambda_pl: NonNegative  # weight of the distance to the true class's prototype
    gamma: NonNegative  # weight of the penalty on overlap with the adapters of earlier tasks
    l1: NonNegative  # weight of the sum of |A|
    # learning rate of the adapters, as a multiple of the learning rate of the prototypes
    adapter_rate: NonNegative

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        width = classifier_of(module).in_features
        super().adapt(module, federation).classifier = Prototypes(width, federation.num_classes)
        return module

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return super().server_init(params, federation) | {
            "before": tree.zeros_like(adapters(params))
        }

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        ended = adapters(server["local"])
        before = {name: value + ended[name] for name, value in server["before"].items()}
        earlier = {name: ended[name + DOWN].flatten(1) for name in layers(ended)}
        if "earlier" in server:
            earlier = {
                name: torch.cat([server["earlier"][name], value]) for name, value in earlier.items()
            }
        return super().begin_task(server, start) | {
            "before": before,
            "earlier": earlier,
        }

    def broadcast(self, server: Tree) -> Tree:
        earlier = {"earlier": server["earlier"]} if "earlier" in server else {}
        return super().broadcast(server) | earlier

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        distances = -net(params, batch.x).logits
        own = distances.gather(-1, batch.y[:, None])[:, 0]
        return cross_entropies(-distances / self.temperature, batch.y) + self.lambda_pl * own

    def penalty(self, net: Network, params: Params, ctx: Context) -> Tensor | float:
        now = {name: params[name + DOWN].flatten(1) for name in layers(params)}
        total = self.l1 * torch.stack([value.abs().sum() for value in now.values()]).sum()
        if "earlier" not in ctx.server:
            return total
        overlap = torch.stack(
            [(ctx.server["earlier"][name] @ value.T).abs().sum() for name, value in now.items()]
        )
        return total + self.gamma * overlap.sum()

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Take an optimizer step that scales the adapters' change by `adapter_rate`.

        The prototypes of other tasks do not change.

        """
        moved, memory, loss = super().local_step(net, params, memory, batch, ctx)
        slow = {k: v + self.adapter_rate * (moved[k] - v) for k, v in adapters(params).items()}
        centers = torch.where(ctx.server["new"][:, None] > 0, moved[CENTERS], params[CENTERS])
        return moved | slow | {CENTERS: centers}, memory, loss

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        passed = first_pass(data, ctx)
        found = prototypes.statistics(net, params, passed, params[CENTERS])
        return {"params": params, "mean": found["mean"], "count": found["count"]}, ctx.client

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        local = tree.weighted_mean(messages["params"], round.weights)
        own = messages["params"][CENTERS]
        weights = prototype_weights(own, messages["mean"], messages["count"])
        merged = (weights.T[..., None] * own).sum(0)
        local[CENTERS] = torch.where(server["new"][:, None] > 0, merged, server["local"][CENTERS])
        added = {name: value + server["before"][name] for name, value in adapters(local).items()}
        return server | {"params": local | added, "local": local}


def prototype_weights(own: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """Return the weight of each client's prototype of a class, [C, S]; each row sums to 1.

    own: the clients' prototypes, [S, C, D]. means: the clients' mean features, [S, C, D]. counts:
    number of examples per client and class, [S, C].
    """
    holds = (counts > 0).to(own).T  # [C, S]
    apart = torch.cdist(own.transpose(0, 1), means.transpose(0, 1))  # [C, S, S]
    near = 1 / (apart * holds[:, None]).sum(-1).clamp(min=1e-12)
    low, high = near.amin(-1, keepdim=True), near.amax(-1, keepdim=True)
    shares = ((near - low) / (high - low).clamp(min=1e-12) / SOFTNESS).softmax(-1)
    return torch.where(
        holds.sum(-1, keepdim=True) > 0, shares, torch.full_like(shares, 1 / len(own))
    )
