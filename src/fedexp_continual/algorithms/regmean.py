"""RegMean: merged linear layers approximate the clients' layers on the clients' inputs.

Clients train as in FedAvg and also send Gram matrices of the inputs of each linear layer. From
these matrices, the server computes the merged weights in closed form.

X. Jin, X. Ren, D. Preotiuc-Pietro, P. Cheng, "Dataless Knowledge Fusion by Merging Weights of
Language Models", ICLR 2023. X_k are a linear layer's inputs for all examples of client k, and G_k
is X_k^T X_k with its off-diagonal entries multiplied by `off_diagonal`. With the layer's weights
W_k [m, n], the server solves
    min_W sum_k ||X_k W^T - X_k W_k^T||^2     W = M + (sum_k (W_k - M) G_k) (sum_k G_k)^+
where M is the mean of the W_k, weighted by p_k as in FedAvg. All layers of type nn.Linear with
trained weights are merged. All other parameters, including biases, are averaged. G_k has n^2
float64 entries for a layer with n inputs and counts as traffic.

Differs from the released code (bloomberg/dataless-model-merging, src/model_merge/avg_merger.py):
That code merges models once, after their training, with Gram matrices of 1,000 examples and, for
DeBERTa, off_diagonal=0.1. The paper's formula has M = 0. It gives the same W if sum_k G_k is
invertible. If an input is always 0, for example after a dead ReLU, the paper's formula sets its
weights to 0, and they stay 0; here, these weights are averaged. Layers whose inputs are not
observed are also averaged. An example is the projection in PyTorch's nn.MultiheadAttention, which
is never called.

As in the code of LoRM (aimagelab/fed-mammoth, _models/regmean.py), the server merges in every
round. LoRM's code has off_diagonal=0.5 as its default and merges the layers `qkv`, `proj`, `mlp`
and `head` of a vision transformer. It computes G_k without augmentation, and its loss includes only
the classes of the task. Here, G_k is computed over the augmented batches of the first epoch, and
the loss includes all classes, as in FedAvg.
"""

import copy
from collections.abc import Mapping
from typing import ClassVar, Self

from torch import nn

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import (
    ClientData,
    Context,
    Federation,
    Network,
    ServerRound,
)
from fedexp.core import tree
from fedexp.core.limits import Share
from fedexp.core.tree import Params, Tree
from fedexp_continual.algorithms.grams import damp, gram_matrices, merge_down, watch_inputs


class RegMean(FedAvg):
    needs_inputs = True
    own_step = "its server merges linear layers in closed form"
    hint = (
        "RegMean gives large weights to inputs that are almost always 0, such as those after a"
        " ReLU; use algorithm.off_diagonal=0, which averages each input's weights"
    )

    # number of inputs of each merged layer; set by `fitted`
    widths: ClassVar[Mapping[str, int]] = {}

    # factor for the off-diagonal entries of a Gram matrix; 1: no change, 0: only the diagonal
    off_diagonal: Share

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        return watch_inputs(module, linear_layers(module))

    def fitted(self, module: nn.Module) -> Self:
        made = copy.copy(self)
        object.__setattr__(made, "widths", linear_layers(module))
        return made

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        grams = gram_matrices(net, params, data, ctx, self.widths)
        return {"params": params, "grams": grams}, ctx.client

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        parts = messages["params"]
        params = tree.weighted_mean(parts, round.weights)
        for layer, grams in messages["grams"].items():
            name = f"{layer}.weight"
            moved = merge_down(parts[name] - params[name], damp(grams, self.off_diagonal))
            params[name] = params[name] + moved
        return server | {"params": params}


def linear_layers(module: nn.Module) -> dict[str, int]:
    """Return the number of inputs of each linear layer whose weights are trained."""
    layers = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    return {name: part.in_features for name, part in layers.items() if part.weight.requires_grad}
