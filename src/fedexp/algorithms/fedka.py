"""FedKA: a penalty keeps a client's outputs close to the global model's on a few anchor examples.

The anchors are examples of classes that are rare or missing on the client. The penalty keeps
clients from forgetting these classes. The server averages as in FedAvg.

J. Chen, J. Zhu, Q. Zheng, "Towards Fast and Stable Federated Learning: Confronting Heterogeneity
via Knowledge Anchor", MM 2023, Definitions 1-2, Eq. (2)-(3), Algorithm 1. A class is missing,
non-dominant or dominant if its share p^c of the client's examples is 0, below `dominance`, or at
least `dominance`, respectively. In each round, the set T of anchors contains one of the client's
examples of each non-dominant class, and the shared example of each missing class. Anchors are not
augmented. If there are more than `max_anchors`, a random subset is used. The loss of a mini-batch
is
    L = CE + beta * (1 / |T|) * sum_{x in T} sum_{c not dominant} (f_global(x)^c - f_w(x)^c)^2.
With `reduction=sum`, the penalty is divided by the number of anchors, as shown; with
`reduction=mean`, it is also divided by the number of classes in the inner sum. With
`norm=per_anchor`, the inner sum is replaced by its square root, the L2 norm of an anchor's row of
differences; with `norm=matrix`, the penalty is beta times the L2 norm of all anchors' rows
together, without a division. The gradient of a norm at 0 is 0; differences within the
rounding errors of the logits count as 0. The penalty is 0 if
the set T is empty or if all classes are dominant. The shared set contains one training example per
class, drawn with the partition's seed; the client that owns the example also keeps it.

The paper chooses `beta` from 0.5, 0.1, 0.01 and 0.001, but does not publish the choice. The
penalty's curvature is about 1,000 to 10,000 times beta, and SGD with lr 0.01 and momentum 0.9 is
stable up to 2 (1 + 0.9) / 0.01 = 380. Values of 0.1 and above diverge or nearly diverge, and with
0.01 a run with one local epoch diverged, so the default is 0.001; sweep=fedka_search compares
values. The value of `dominance` is not published either; null means 0.5 / C, the proportion at
which the paper's Fig. 3 shows sudden forgetting.

`anchors` selects the classes that have anchors: both, non_dominant or missing. The last two values
are the paper's ablations N and M, in which the inner sum is still over all classes that are not
dominant. `selection` determines which example of a non-dominant class is used: random, hard (the
largest cross-entropy of the global model) or proficient (the smallest).

The paper does not specify the following. Anchors go through the network together with the
mini-batch, so that batch norm sees one batch. The teacher's outputs are computed in eval mode. If
there are fewer anchors than slots, the remaining slots repeat anchors (or, without any anchor,
examples of the client). The repeated examples have weight 0 and are ignored by batch norm.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.base import FedAvg, cross_entropies, masked_mean
from fedexp.algorithms.interfaces import Batch, ClientData, Context, Federation, Network
from fedexp.core.errors import require
from fedexp.core.limits import Count, NonNegative, PositiveShare
from fedexp.core.tree import Params, Tree

ROUNDING = 100.0  # rounding errors of the logits, in units of their precision


class FedKA(FedAvg):
    # Texts are not supported, because anchors have no dropout keys, which texts need in training.
    inputs = ("images",)

    # weight of the anchors; 0 is FedAvg, but anchors are still part of batch norm's batches
    beta: NonNegative
    dominance: PositiveShare | None  # smallest share of a dominant class; None: 0.5 / C
    max_anchors: Count
    anchors: Literal["both", "non_dominant", "missing"]
    selection: Literal["random", "hard", "proficient"]
    reduction: Literal["sum", "mean"]  # over the logits of classes that are not dominant
    # squared: Eq. (3); per_anchor: the norm of each anchor's differences; matrix: of all anchors'
    norm: Literal["squared", "per_anchor", "matrix"] = "squared"

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.norm == "squared" or self.reduction == "sum"
        words = f"sum with algorithm.norm={self.norm}; mean only divides squared differences"
        require(good, "algorithm.reduction", self.reduction, words)

    def threshold(self, federation: Federation) -> float:
        return 0.5 / federation.num_classes if self.dominance is None else self.dominance

    def classes(
        self, federation: Federation, client: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return masks bool [C] of the client's missing, non-dominant and dominant classes."""
        share = federation.counts[client] / federation.counts[client].sum()
        dominant = share >= self.threshold(federation)
        return share == 0, (share > 0) & ~dominant, dominant

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        missing, rare, dominant = self.classes(federation, client)
        part = federation.parts[client]
        own = {
            c: part[federation.labels[part] == c]
            for c in np.flatnonzero(rare)
            if self.anchors != "missing"
        }
        shared = [
            c
            for c in np.flatnonzero(missing)
            if self.anchors != "non_dominant" and federation.shared[c] >= 0
        ]
        chosen = rng.permutation(np.array([*own, *shared], dtype=np.int64))[: self.max_anchors]
        slots, width = min(self.max_anchors, federation.num_classes), self.width(federation)
        numbers = np.full((slots, width), part[0])
        candidate = np.zeros((slots, width))
        for i in range(slots):
            if not len(chosen):
                numbers[i] = part[i % len(part)]
                continue
            c = chosen[i % len(chosen)]
            options = rng.permutation(own[c])[:width] if c in own else federation.shared[[c]]
            numbers[i], numbers[i, : len(options)] = options[0], options
            candidate[i, : len(options)] = 1
        valid = (np.arange(slots) < len(chosen)).astype(np.float64)
        return {
            "numbers": numbers,
            "candidate": candidate,
            "valid": valid,
            "columns": (~dominant).astype(np.float64),
        }

    def width(self, federation: Federation) -> int:
        """Return the number of candidates per class among which `selection` chooses.

        This is the largest number of examples that a non-dominant class can have.
        """
        if self.selection == "random" or self.anchors == "missing":
            return 1
        return max(int(self.threshold(federation) * federation.largest), 1)

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        numbers = ctx.plan["numbers"]
        slots, width = numbers.shape
        x, y = data.take(numbers.flatten())
        logits = net(ctx.server["params"], x, self.rows_that_count(ctx)).logits
        if width == 1:
            return {"x": x, "z": logits}
        hardness = cross_entropies(logits, y).view(slots, width)
        low = torch.finfo(hardness.dtype).min
        score = torch.where(
            ctx.plan["candidate"] > 0, hardness if self.selection == "hard" else -hardness, low
        )
        index = score.argmax(-1) + width * torch.arange(slots, device=score.device)
        return {"x": x.index_select(0, index), "z": logits.index_select(0, index)}

    def rows_that_count(self, ctx: Context) -> Tensor:
        """Return a mask [slots * width] of the candidates that are included in batch statistics.

        Candidates that only fill slots are excluded. If there are no other candidates, all are
        included; their outputs are not used.
        """
        counts = (ctx.plan["candidate"] * ctx.plan["valid"][:, None]).flatten().to(ctx.steps.dtype)
        return torch.where(counts.sum() > 0, counts, torch.ones_like(counts))

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        anchors, rows = ctx.setup["x"], len(batch.y)
        columns, valid = (ctx.plan[k].to(ctx.steps.dtype) for k in ("columns", "valid"))
        mask = valid.new_ones(rows) if batch.mask is None else batch.mask
        logits = net(params, torch.cat([batch.x, anchors]), torch.cat([mask, valid])).logits
        loss = masked_mean(cross_entropies(logits[:rows], batch.y), batch.mask)
        return loss + self.beta * self.distance(ctx.setup["z"], logits[rows:], columns, valid)

    def distance(self, z: Tensor, logits: Tensor, columns: Tensor, valid: Tensor) -> Tensor:
        """Return the distance between the outputs of both models on the anchors, a scalar.

        z, logits: [slots, C], the outputs of the global and of the local model. columns: [C], 1 for
        classes that are not dominant. valid: [slots], 1 for anchors.
        """
        difference = z - logits
        if self.norm != "squared":
            # The gradient of a norm does not shrink with the differences. Before the first step,
            # it would be the direction of rounding errors.
            noise = ROUNDING * torch.finfo(z.dtype).eps * (1 + z.abs())
            difference = torch.where(difference.abs() > noise, difference, 0) * columns
        if self.norm == "matrix":
            return torch.linalg.vector_norm(difference * valid[:, None])
        if self.norm == "per_anchor":  # vector_norm, because a square root has no gradient at 0
            return masked_mean(torch.linalg.vector_norm(difference, dim=-1), valid)
        apart = (difference**2 * columns).sum(-1)
        if self.reduction == "mean":
            apart = apart / columns.sum().clamp(min=1)
        return masked_mean(apart, valid)
