"""GLFC: losses balanced between old and new classes, and distillation from the best old model.

Each client keeps a few examples of its old classes and trains on them together with the new
examples. A weighted loss compensates for the imbalance between old and new classes, and a second
loss distils an old model. The server averages the models. Acting as the paper's proxy server, it
also selects the old model, by testing each global model on prototypes from the clients.

J. Dong et al., "Federated Class-Incremental Learning", CVPR 2022. z_i are the logits of example i
of a batch, and y_i is its one-hot label. Old classes are the classes of all earlier tasks; the
other classes so far are new. The loss is the sum of two terms:
    L    = lambda_gc L_GC + lambda_rd L_RD
    L_GC = mean_i w_i BCE(z_i, y_i)              class-aware gradient compensation
    L_RD = mean_i BCE(z_i, y'_i)                 class-semantic relation distillation
    w_i  = g_i / mean of g over the examples of the batch in the same group (old or new),
           g_i = 1 - sigmoid(z_i[label])
An example has a large weight w_i if the model recognises it less well than others of its group. The
targets y'_i are y_i with the entries of the old classes replaced by sigmoid(z_old), where z_old are
the logits of the old model. BCE is averaged over the n classes so far. In task 1, L = L_GC with w =
1.

Each client keeps `memory` examples, the same number for each of its old classes. They are selected
by herding: each step adds the example that brings the mean feature of the kept examples closest to
the mean feature of the class. Features are scaled to length 1.

In the first round of a task, each client of the cohort sends a prototype of each of its new
classes: the image whose feature is closest to the class mean. The server tests the global model on
these prototypes after each round of the task. The most accurate model becomes the old model of the
next task. If several models are equally accurate, the last of them is used.

Checked against the authors' code (conditionWang/FCIL: GLFC.py, ProxyServer.py): both losses,
herding, and the selection of prototypes. The authors keep 2000 examples, set both weights to 0.5,
and use SGD with lr 2.0. Such a high rate is necessary because the loss is a mean over classes. The
text of the paper was not available, so the equations come from the code.

Differs from the released code in the prototypes: In fedexp, clients send them unchanged. In the
authors' code, clients first modify each prototype by 50 steps of gradient descent on its loss and
then send a LeNet's gradient on it. The proxy server reconstructs the prototype from the gradient
with 250 iterations of L-BFGS and keeps the last 20 images. This procedure hides the prototypes from
the server and costs far more than the training. Prototypes are used only to rank global models, so
fedexp's ranking equals the ranking with a perfect reconstruction.

Differs from the released code in the tasks: At the start of a task, the authors' code keeps the
best accuracy so far; fedexp resets it, because it was measured on other classes. In fedexp, clients
know when a task starts; in the authors' code, a client infers the start when the entropy of the
model's outputs increases by 1.2. In the authors' code, new clients join with each task, which is a
different setting.

Differs from the released code in the training: The model has all C outputs from the start, and
future classes are negatives, so that untrained outputs are not predicted in a test over all C
classes. BCE sums over all C outputs but divides by n, so the outputs of the n classes so far have
the same gradients as in the authors' code. The outputs of future classes add to the gradients of
the features and to the loss, which starts at C / n times its value in the authors' code. No example
is kept twice. The server weights clients by n_k, including kept examples, not equally. Prototypes
are selected from augmented training images; in the authors' code, from images without augmentation.
The learning rate steps of the authors' code are replaced by the options of `local`, such as
local.lr_decay.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import first_pass, masked_mean
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
from fedexp.algorithms.prototypes import one_hot
from fedexp.core.limits import Count, NonNegative
from fedexp.core.tree import Params, Tree
from fedexp_continual.algorithms.exemplars import Exemplars, Features, Kept, means_of_old_and_new


class GLFC(Exemplars):
    inputs = ("images",)  # clients send images as prototypes
    hint = (
        "its losses are averaged over the classes: use a larger local.lr for more classes (the"
        " authors use 2.0)"
    )

    memory: Count  # number of examples that a client keeps in total for its old classes
    lambda_gc: NonNegative
    lambda_rd: NonNegative
    compensation: bool  # False: w = 1
    # True: the old model is the task's best model on the prototypes; False: the task's last model
    proxy: bool

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        last = server["params"] | server["buffers"]
        # without a message in the whole task, no model was tested on prototypes
        old = server.get("best", last) if self.proxy else last
        lasting = {k: v for k, v in server.items() if k not in ("best", "score", "prototypes")}
        return super().begin_task(lasting, start) | {"old": old}

    def broadcast(self, server: Tree) -> Tree:
        sent = {k: server[k] for k in ("params", "new", "known", "old") if k in server}
        asks = self.proxy and "prototypes" not in server
        return sent | ({"asks": torch.zeros_like(server["new"][0])} if asks else {})

    def choose(
        self,
        kept: Kept,
        own: Kept,
        features: Features,
        federation: Federation,
        rng: np.random.Generator,
    ) -> list[np.ndarray]:
        return [
            self.keep(before, part, features, federation.labels)
            for before, part in zip(kept, own, strict=True)
        ]

    def keep(
        self, before: np.ndarray, part: np.ndarray, features: Features, labels: np.ndarray
    ) -> np.ndarray:
        """Return the indices of the examples that a client keeps, the same number of each class.

        before: the examples kept so far, in the order of selection; the first ones of each class
        are kept. part: the client's examples of the last task; herding selects from these examples.
        """
        old = [before[labels[before] == c] for c in dict.fromkeys(labels[before].tolist())]
        new = [part[labels[part] == c] for c in np.unique(labels[part])]
        each = self.memory // max(len(old) + len(new), 1)
        chosen = [numbers[herding(features(numbers), each)] for numbers in new]
        return np.concatenate([numbers[:each] for numbers in [*old, *chosen]] or [before])

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        """Return the index of an example of the client; all images have the shape of this one."""
        return {"one": federation.parts[client][:1]} if self.proxy else {}

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        logits, server = net(params, batch.x).logits, ctx.server
        known = server.get("known", torch.zeros_like(server["new"]))
        seen = (known + server["new"]).sum()
        label = one_hot(batch.y, known)

        def mean_over_classes(target: Tensor) -> Tensor:
            return (
                F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1) / seen
            )

        learning = mean_over_classes(label)
        if "old" not in server:
            return masked_mean(learning, batch.mask)
        if self.compensation:
            missing = 1 - logits.detach().sigmoid().gather(-1, batch.y[:, None])[:, 0]
            learning = learning * compensation(missing, known.index_select(0, batch.y), batch.mask)
        answers = net(server["old"], batch.x).logits.detach().sigmoid()
        distilling = mean_over_classes(torch.where(known > 0, answers, label))
        return masked_mean(self.lambda_gc * learning + self.lambda_rd * distilling, batch.mask)

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        if "asks" not in ctx.server:
            return {"params": params}, ctx.client
        return {"params": params, "prototypes": self.prototypes(net, params, data, ctx)}, ctx.client

    def prototypes(self, net: Network, params: Params, data: ClientData, ctx: Context) -> Tree:
        """Return a prototype of each new class, [C, ...], and a mask [C] of classes that have one.

        A prototype is the image of the first epoch whose feature is closest to the class mean.
        """
        new, batch_size = ctx.server["new"], ctx.local.batch_size
        total: Tensor | float = 0.0
        count = torch.zeros_like(new)
        for batch, mask in first_pass(data, ctx):
            is_of = one_hot(batch.y, new) * mask[:, None] * new
            total = total + is_of.T @ F.normalize(net(params, batch.x, mask).features)
            count = count + is_of.sum(0)
        mean = total / count.clamp(min=1)[:, None]
        shortest, images = (
            torch.full_like(new, torch.inf),
            data.take(ctx.plan["one"].repeat(len(new)))[0],
        )
        for batch, mask in first_pass(data, ctx):
            features = F.normalize(net(params, batch.x, mask).features)
            apart = (features - mean.index_select(0, batch.y)).norm(dim=1)
            # If a class has two examples, both are equally far from their mean. Rounding must not
            # decide between them, so the first one is chosen.
            place = batch.step * batch_size + torch.arange(len(batch.y), device=new.device)
            apart = apart.round(decimals=4) + 1e-9 * place
            is_of = one_hot(batch.y, new) * mask[:, None] * new
            nearest, row = torch.where(is_of > 0, apart[:, None], torch.inf).min(0)
            found = batch.x.index_select(0, row)
            closer = (nearest < shortest).reshape(-1, *[1] * (found.dim() - 1))
            images = torch.where(closer, found, images)
            shortest = torch.minimum(shortest, nearest)
        return {"x": images, "is_there": (count > 0).to(new.dtype)}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        server = super().aggregate(server, messages, round)
        if "prototypes" not in messages:
            return server
        sent = messages["prototypes"]
        labels = torch.arange(sent["is_there"].shape[1], device=sent["x"].device).repeat(
            len(sent["x"])
        )
        there = sent["is_there"].flatten() > 0
        prototypes = {"x": sent["x"].flatten(0, 1)[there], "y": labels[there]}
        return server | {"prototypes": prototypes}

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        if not self.proxy:
            return server
        model, prototypes = server["params"] | server["buffers"], server["prototypes"]
        with torch.no_grad():
            right = net(model, prototypes["x"]).logits.argmax(-1) == prototypes["y"]
        score = right.to(server["new"].dtype).mean()
        if "score" in server and score < server["score"]:
            return server
        return server | {"best": model, "score": score}


def compensation(missing: Tensor, is_old: Tensor, mask: Tensor | None) -> Tensor:
    """Return the weights w [B] of the examples in the loss L_GC.

    missing: g, [B]. is_old: [B], 1 for an example of an old class and 0 for an example of a new
    class. mask: [B], 0 for padding.
    """
    old, new = means_of_old_and_new(missing, is_old, mask)
    return missing / torch.where(is_old > 0, old, new).clamp(min=torch.finfo(missing.dtype).tiny)


def herding(features: Tensor, count: int) -> np.ndarray:
    """Return the positions [m] of at most `count` examples, in the order of selection by herding.

    features: the features of all examples, [n, D].
    """
    unit = F.normalize(features.double()).cpu().numpy()
    mean, total = unit.mean(0), np.zeros(unit.shape[1])
    chosen: list[int] = []
    for number in range(1, min(count, len(unit)) + 1):
        apart = np.linalg.norm(mean - (total + unit) / number, axis=1)
        apart[chosen] = np.inf
        # On a tie, take the first example. Two examples are equally far from their mean, except for
        # rounding, which differs between engines.
        chosen.append(int(np.flatnonzero(apart <= apart.min() + 1e-6)[0]))
        total += unit[chosen[-1]]
    return np.array(chosen, dtype=np.int64)
