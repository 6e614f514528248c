"""GLFC: balanced losses of old and new classes, and relations distilled from the best old model.

J. Dong et al., "Federated Class-Incremental Learning", CVPR 2022. z are the logits and y is the
one-hot label. Old classes are those of all earlier tasks. A batch contains new examples and kept
old ones:
    w_i  = g_i / mean of g over those of its kind (old or new) in the batch,
           g_i = 1 - sigmoid(z_i[label])
    L_GC = mean_i w_i BCE(z_i, y_i)              class-aware gradient compensation
    L_RD = mean_i BCE(z_i, y'_i)                 class-semantic relation distillation
    L    = lambda_gc L_GC + lambda_rd L_RD
y' is y with the entries of the old classes replaced by the old model's sigmoid(z_old). BCE is the
mean over classes. In task 1, L = L_GC with w = 1.

Each client keeps `memory` examples, the same number for each of its old classes, selected by
herding: each step adds the example that brings the mean of the kept examples closest to the class
mean, for features scaled to length 1.

The old model is selected as follows. In the first round of a task, each client of the cohort sends
a prototype of each of its new classes, the image whose feature is closest to the class mean. The
proxy server tests the global model on these prototypes after each round of the task. The best
model, or the last of equally good ones, is the old model of the next task.

Checked against the authors' code (conditionWang/FCIL: GLFC.py, ProxyServer.py): both losses,
herding, and the selection of prototypes. The authors' values are 2000 examples, both weights 0.5,
and SGD with lr 2.0, a rate that the mean over classes requires. The text of the paper was not
available, so the equations are those of the code.

Simplified: Prototypes are sent unchanged. In the code, 50 steps of gradient descent on their loss
modify them first, and clients send the gradient of a LeNet for each. The proxy server reconstructs
the prototype from the gradient with 250 iterations of L-BFGS and keeps the last 20 images. This
hides the prototypes from the server and costs far more than the training. Since prototypes only
rank global models, the ranking here is that of a perfect reconstruction.

Other deviations: The code keeps the best accuracy so far when a task begins; here it is reset,
because it belongs to other classes. As for all methods here, the start of a task is known; a client
of the code infers it when the entropy of the model's outputs has increased by 1.2. In the code,
clients join with each task, which is a different setting. The model has all C outputs from the
start, and future classes are negatives, so that untrained outputs do not win in a test over all C
classes. BCE is the sum over all C divided by the number n of classes so far: outputs of these
classes have the code's gradients, and those of future classes add to the features' gradients and to
the loss, which starts at C / n times the code's. No example is kept twice. Weights are n_k
including kept examples, not equal. Prototypes are chosen from images as clients train on them,
augmented if the data are (in the code, without augmentation). Instead of the code's learning rate
steps, use the options of `local`, such as local.lr_decay.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import first_pass, masked_mean
from fedexp.algorithms.exemplars import Exemplars, Kept
from fedexp.algorithms.families import ServerTraining
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Features,
    Federation,
    Needs,
    Network,
    ServerNetwork,
    ServerRound,
)
from fedexp.algorithms.prototypes import one_hot
from fedexp.core.limits import Count, NonNegative
from fedexp.core.tree import Params, Tree


class GLFC(Exemplars, ServerTraining):
    inputs = ("images",)  # images are sent as prototypes
    hint = (
        "its losses are means over classes: the more there are, the larger local.lr may be (the"
        " authors: 2.0)"
    )

    memory: Count  # number of examples that a client keeps, over all its old classes
    lambda_gc: NonNegative
    lambda_rd: NonNegative
    compensation: bool  # False: w = 1
    # True: the old model is the best one on the prototypes; False: the last one of the task
    proxy: bool

    @property
    def needs(self) -> Needs:
        return Needs(
            server_state="old and best model, prototypes" if self.proxy else "old model",
            down=1.0,
            small="C numbers down"
            + ("; a prototype per class up in a task's first round" if self.proxy else ""),
            data="kept examples of old tasks (clients)",
            teachers=1,
            work="a forward pass of all clients at the end of a task"
            + (", two in a task's first round" if self.proxy else ""),
            server_work="tests of models on prototypes" if self.proxy else "",
        )

    def begin_task(self, server: Tree, initial: Params, federation: Federation) -> Tree:
        old = server["best"] if self.proxy else server["params"] | server["buffers"]
        lasting = {k: v for k, v in server.items() if k not in ("best", "score", "prototypes")}
        return super().begin_task(lasting, initial, federation) | {"old": old}

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
        """Return what one client keeps: the first examples of each old class, and the same number
        of each class of `part`."""
        old = [before[labels[before] == c] for c in dict.fromkeys(labels[before].tolist())]
        new = [part[labels[part] == c] for c in np.unique(labels[part])]
        each = self.memory // max(len(old) + len(new), 1)
        chosen = [numbers[herding(features(numbers), each)] for numbers in new]
        return np.concatenate([numbers[:each] for numbers in [*old, *chosen]] or [before])

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        """Return one of the client's examples, for the shape of its images."""
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
        """Return a prototype of each new class, [C, ...], and a mask of the classes that have one,
        [C].

        The prototype is the image, among those of one pass, whose feature is closest to the class
        mean.
        """
        new, batch_size = ctx.server["new"], ctx.local.batch_size
        total: Tensor | float = 0.0
        count = torch.zeros_like(new)
        for batch, mask in first_pass(data, ctx, ctx.local.epochs):
            is_of = one_hot(batch.y, new) * mask[:, None] * new
            total = total + is_of.T @ F.normalize(net(params, batch.x, mask).features)
            count = count + is_of.sum(0)
        mean = total / count.clamp(min=1)[:, None]
        shortest, images = (
            torch.full_like(new, torch.inf),
            data.take(ctx.plan["one"].repeat(len(new)))[0],
        )
        for batch, mask in first_pass(data, ctx, ctx.local.epochs):
            features = F.normalize(net(params, batch.x, mask).features)
            apart = (features - mean.index_select(0, batch.y)).norm(dim=1)
            # Two examples of a class are equally far from their mean; the first one counts,
            # whatever the rounding.
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
    """Return w [B] for g = `missing` [B].

    is_old: [B], 1 for an example of an old class, 0 for one of a new class.
    """
    present = torch.ones_like(is_old) if mask is None else mask.to(is_old.dtype)
    old, new = (masked_mean(missing, present * kind) for kind in (is_old, 1 - is_old))
    return missing / torch.where(is_old > 0, old, new).clamp(min=torch.finfo(missing.dtype).tiny)


def herding(features: Tensor, count: int) -> np.ndarray:
    """Return the positions of at most `count` examples, [m], in the order of selection.

    features: [n, D].
    """
    unit = F.normalize(features.double()).cpu().numpy()
    mean, total = unit.mean(0), np.zeros(unit.shape[1])
    chosen: list[int] = []
    for number in range(1, min(count, len(unit)) + 1):
        apart = np.linalg.norm(mean - (total + unit) / number, axis=1)
        apart[chosen] = np.inf
        # Ties go to the first example: two examples are equally far from their mean except for
        # rounding, which differs between engines.
        chosen.append(int(np.flatnonzero(apart <= apart.min() + 1e-6)[0]))
        total += unit[chosen[-1]]
    return np.array(chosen, dtype=np.int64)
