"""LoRM: the server merges adapters in closed form so that they approximate the clients' layers.

The backbone is frozen. Each task starts with new low-rank adapters B A. In each round, the clients
train the head and only one of the two matrices, and send Gram matrices of the layers' inputs. With
one matrix fixed, the server can compute the best merge of the other one from these Gram matrices.

R. Salami, P. Buzzega, M. Mosconi, J. Bonato, L. Sabetta, S. Calderara, "Closed-form Merging of
Parameter-Efficient Modules for Federated Continual Learning", ICLR 2025. Clients train all B_k in
the first, third, ... round of a task, and all A_k in the other rounds, with CE over the classes of
the task. X_k are a layer's inputs for all examples of client k, and G_k is X_k^T X_k with its
off-diagonal entries multiplied by `off_diagonal`. The server finds the matrix whose outputs are
closest to those of all clients:
    min_B sum_k ||B A X_k - B_k A X_k||^2     B = (sum_k B_k A G_k) A^T (A (sum_k G_k) A^T)^+
    min_A sum_k ||B A X_k - B A_k X_k||^2     A = (sum_k A_k G_k) (sum_k G_k)^+
The weights of the head are merged in the same way, W = (sum_k W_k G_k) (sum_k G_k)^+; its bias is
the mean weighted by n_k. In training, adapters of earlier tasks are not used. From the second task
on, the tested model is the backbone plus a change that merges the adapters of the tasks s = 1..t:
    (sum_s B_s A_s G_s) (sum_s G_s)^+,     G_s = sum_k G_k.

The formulas come from the authors' code (aimagelab/fed-mammoth, _models/lorm.py and regmean.py);
the equation numbers of the paper were not available. The code uses `alpha_regmean` (off_diagonal in
fedexp) = 0.5, rank 16 on all linear layers of the blocks, and AdamW with learning rate 3e-4 and
weight decay (`wd_reg`) 0.1 on the parameters that a round trains: local.optimizer=adamw
local.lr=0.0003 algorithm.weight_decay=0.1. `a_rate` and `b_rate` are the code's `lr_A` and `lr_B`
divided by the head's learning rate; both are 1 by default, as in the code. For the published
results, the commands in the code's README use wd_reg=0 in every setting, off_diagonal 0 for the
adapters and 0.5 or 0.3 for the head, ranks from 1 to 32, and other learning rates;
sweep=lorm_table1 has them.

Differs from the released code: G_s sums over the clients in the last round of task s. In the
authors' code, all clients compute their G_k once more at the end of a task, and the change within a
task is a plain mean. G_k is computed with the trained local model; in the authors' code, from the
second task on, it is computed with this mean. The batches of the first epoch, over which G_k is
computed, are augmented; in the authors' code, they are not. All inverses are pseudo-inverses,
including the inverse for the head. The head's rows for other tasks do not change. Only linear
layers are merged. The Gram matrices count as traffic; for a layer with n inputs, each has n^2
float64 entries. The method requires tasks with new classes.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.algorithms.base import cross_entropies
from fedexp.algorithms.heads import BIAS, HEAD, WEIGHT
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
from fedexp.core.errors import ConfigError
from fedexp.core.limits import NonNegative, NonNegativeOrNone, Share
from fedexp.core.tree import Params, Tree
from fedexp_continual.algorithms.adapters import DOWN, UP, NewAdapters, adapters, layers
from fedexp_continual.algorithms.classes import logits_of_members
from fedexp_continual.algorithms.grams import damp, gram_matrices, invert, merge_down, watch_inputs
from fedexp_continual.models.lora import LowRank

CHANGE = ".change"  # suffix of the names of the layers' merged changes


class LoRM(NewAdapters):
    must_train = HEAD
    needs_inputs = True

    # factor for the off-diagonal entries of a Gram matrix; 1: no change, 0: only the diagonal
    off_diagonal: Share
    head_off_diagonal: Share | None = None  # this factor for the head; None: off_diagonal
    # learning rates of A and B, as multiples of the head's learning rate
    a_rate: NonNegative = 1.0
    b_rate: NonNegative = 1.0
    # weight decay of the parameters that a round trains; None: local.weight_decay
    weight_decay: NonNegativeOrNone = None

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        module = super().adapt(module, federation)
        for name, layer in list(module.named_modules()):
            if isinstance(layer, LowRank):
                parent, _, own = name.rpartition(".")
                setattr(module.get_submodule(parent), own, Changed(layer))
        return watch_inputs(module, input_widths(dict(module.named_parameters())))

    def server_init(self, params: Params, federation: Federation) -> Tree:
        local = {name: value for name, value in params.items() if not name.endswith(CHANGE)}
        change, inputs = {}, {}
        for name in layers(local):
            up, down = local[name + UP], local[name + DOWN]
            change[name] = up.new_zeros(len(up), down.shape[1])
            inputs[name] = down.new_zeros(down.shape[1], down.shape[1], dtype=torch.float64)
        return super().server_init(local, federation) | {
            "params": local | {name + CHANGE: value for name, value in change.items()},
            "trains_b": next(iter(local.values())).new_ones(()),
            # sum of B_s A_s G_s over the completed tasks
            "products": {name: value.double() for name, value in change.items()},
            "grams": inputs,  # sum of G_s over the completed tasks
            "latest": inputs,  # sum of the last round's G_k
        }

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        products, grams = self.sum_over_tasks(server, server["local"], server["latest"])
        begun = super().begin_task(server, start)
        first = torch.ones_like(server["trains_b"])
        none = tree.zeros_like(server["latest"])  # so that no G is added twice
        begun |= {"products": products, "grams": grams, "latest": none}
        return begun | {"trains_b": first}

    def sum_over_tasks(self, server: Tree, local: Params, latest: Params) -> tuple[Params, Params]:
        """Return the sums of B_s A_s G_s and of G_s over the tasks so far, for each layer.

        local: the clients' model, with B_t and A_t of the current task. latest: G_t of each layer.

        """
        products = {
            name: old + (local[name + UP] @ local[name + DOWN]).double() @ latest[name]
            for name, old in server["products"].items()
        }
        return products, tree.add(server["grams"], latest)

    def broadcast(self, server: Tree) -> Tree:
        return super().broadcast(server) | {"trains_b": server["trains_b"]}

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        logits = logits_of_members(net(params, batch.x).logits, ctx.server["new"])
        return cross_entropies(logits, batch.y)

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Take an optimizer step on the head and on the matrices that are trained in this round."""
        if self.weight_decay is not None:
            ctx = replace(ctx, local=replace(ctx.local, weight_decay=self.weight_decay))
        moved, memory, loss = super().local_step(net, params, memory, batch, ctx)
        trains_b = ctx.server["trains_b"] > 0
        for k, v in adapters(params).items():
            is_b = k.endswith(UP)
            stepped = torch.lerp(v, moved[k], self.b_rate if is_b else self.a_rate)
            moved[k] = torch.where(trains_b == is_b, stepped, v)
        return moved, memory, loss

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        grams = gram_matrices(net, params, data, ctx, input_widths(params))
        return {"params": params, "grams": grams}, ctx.client

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        parts, before, found = messages["params"], server["local"], messages["grams"]
        grams = {name: damp(value, self.factor(name)) for name, value in found.items()}
        local = tree.weighted_mean(parts, round.weights)
        for name in layers(before):
            up, down = name + UP, name + DOWN
            if server["trains_b"] > 0:
                local[down] = before[down]
                local[up] = merge_up(parts[up], before[down], grams[name])
            else:
                local[up], local[down] = before[up], merge_down(parts[down], grams[name])
        current = server["new"] > 0
        weight = merge_down(parts[WEIGHT], grams["classifier"])
        local[WEIGHT] = torch.where(current[:, None], weight, before[WEIGHT])
        local[BIAS] = torch.where(current, local[BIAS], before[BIAS])
        latest = {name: grams[name].sum(0) for name in layers(before)}
        return server | {
            "params": self.merge_tasks(server, local, latest, first=round.federation.task == 0),
            "local": local,
            "latest": latest,
            "trains_b": 1 - server["trains_b"],
        }

    def factor(self, layer: str) -> float:
        """Return the factor for the off-diagonal entries of the Gram matrix of a layer."""
        own = self.head_off_diagonal if layer == "classifier" else None
        return self.off_diagonal if own is None else own

    def merge_tasks(self, server: Tree, local: Params, latest: Params, first: bool) -> Params:
        """Return the tested model: the backbone with the change merged over all tasks.

        local, latest: as in `sum_over_tasks`. first: whether the current task is task 1.
        """
        products, grams = self.sum_over_tasks(server, local, latest)
        tested = dict(local)
        for name, product in products.items():
            whole = local[name + UP] @ local[name + DOWN]
            merged = whole if first else product @ invert(grams[name])
            tested[name + CHANGE] = merged.to(whole)
            tested[name + UP] = torch.zeros_like(local[name + UP])
        return tested


def input_widths(params: Params) -> dict[str, int]:
    """Return the number of inputs of each layer with adapters and of the head."""
    widths = {name: params[name + DOWN].shape[1] for name in layers(params)}
    return widths | {"classifier": params[WEIGHT].shape[1]}


def merge_up(parts: Tensor, down: Tensor, grams: Tensor) -> Tensor:
    """Return the matrix B [m, r] merged from the clients' matrices B_k.

    `merge_down` is applied to the outputs of A, which are the inputs of B. parts: the matrices B_k,
    [S, m, r]. down: A, [r, n]. grams: the Gram matrices G_k of the inputs of A, [S, n, n].
    """
    return merge_down(parts, down.double() @ grams.double() @ down.double().T)


class Changed(LowRank):
    """A linear layer with an adapter B A, plus the change merged over earlier tasks.

    It adds scale * (B A + change) x to the output of the frozen layer.
    """

    def __init__(self, layer: LowRank):
        nn.Module.__init__(self)
        if not isinstance(layer.base, nn.Linear):
            raise ConfigError(
                "model.lora.targets: LoRM requires linear layers, but one of these is a convolution"
            )
        self.base, self.down, self.up, self.scale = layer.base, layer.down, layer.up, layer.scale
        self.change = nn.Parameter(torch.zeros_like(layer.base.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(x, self.change)
