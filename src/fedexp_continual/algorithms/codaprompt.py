"""CODA-Prompt: prefixes of a frozen transformer are weighted sums of prompt components.

The weights depend on the image. Clients train only the components of the current task and the head,
so that earlier tasks are not overwritten. The server averages the components and the head.

J. S. Smith, L. Karlinsky, V. Gutta, P. Cascante-Bonilla, D. Kim, A. Arbelle, R. Panda, R. Feris, Z.
Kira, "CODA-Prompt: COntinual Decomposed Attention-based Prompting for Rehearsal-Free Continual
Learning", CVPR 2023. Each block has M components P_m, keys K_m and attention vectors A_m. The
prefix for an image with query q(x) is
    p = sum_m alpha_m P_m,     alpha_m = cos(q(x) * A_m, K_m)
where * is the elementwise product. The first half of p is prepended to the keys of the attention,
and the second half to its values. Each of the T tasks has M / T components. A local step in task t
trains the head and the components of task t. Components of earlier tasks are used without a change,
and components of later tasks are not used. The loss is
    CE + lambda sum_blocks (o(P) + o(K) + o(A)),     o(B) = mean (B B^T - I)^2,
where the rows of B are the components, keys or attention vectors of the tasks up to t. The term o
keeps these rows orthogonal. The head classifies the class token. For the server, see prompts.py.

The formulas come from the authors' code (GT-RIPL/CODA-Prompt, models/zoo.py, learners/prompt.py).
The equation numbers of the paper were not available. The authors use M = 100, prefixes of length 8
in blocks 0 to 4, and lambda = 0.1, with Adam, learning rate 0.001 on a cosine, and batches of 128
(experiments/cifar-100.sh, configs/cifar-100_prompt.yaml). The first version of their code
multiplies o by 1e-6. A later version initialises the components of a task by Gram-Schmidt when the
task begins, and uses lambda = 0 for ImageNet-R. fed-mammoth (_models/codap.py) has this later
initialisation and drops o.

Differs from the released code: The components of a task start orthonormal to each other, but not to
those of earlier tasks. If T does not divide M, tasks get different numbers of components; in the
authors' code, the remainder is unused. The method requires tasks with new classes.
"""

import torch
from torch import Tensor, nn

from fedexp.algorithms.interfaces import Context, Federation, Network
from fedexp.core.errors import require
from fedexp.core.limits import Count, NonNegative
from fedexp.core.tree import Params
from fedexp_continual.algorithms.prompts import Blocks, TaskPrompts
from fedexp_continual.models.prompts import Prompted, in_use

SMALL = 1e-24  # smallest squared norm of q(x) * A_m


class CODAPrompt(TaskPrompts):
    divided = ("keys", "attention", "prompts")

    layers: Blocks  # blocks that have prefixes
    components: Count  # number M of components of all tasks
    length: Count  # number of keys and values of a prefix, together
    ortho: NonNegative  # weight of the orthogonality loss

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.length % 2 == 0, "algorithm.length", self.length, "an even number")

    def prompted(self, module: nn.Module, federation: Federation) -> Prompted:
        tasks = len(federation.tasks)
        what = f"at least the number of tasks, {tasks}"
        require(self.components >= tasks, "algorithm.components", self.components, what)
        return Decomposed(module, self.layers, self.components, self.length)

    def draw(self, shape: torch.Size) -> Tensor:
        return orthogonal(*shape)

    def penalty(self, net: Network, params: Params, ctx: Context) -> Tensor:
        total = torch.stack([ortho_loss(params[name]) for name in self.divided]).sum()
        return self.ortho * total


def ortho_loss(rows: Tensor) -> Tensor:
    """Return the orthogonality loss of rows [M, blocks, ...].

    The loss is the sum over blocks of mean (B B^T - I)^2. Rows of zeros belong to later tasks and
    are ignored.
    """
    used = in_use(rows).to(rows)
    vectors = rows.transpose(0, 1).flatten(2)  # [blocks, M, entries]
    apart = vectors @ vectors.mT - torch.diag_embed(used)
    return apart.square().sum() / used.sum() ** 2


class Decomposed(Prompted):
    """A vision transformer with prefixes that are weighted sums of components."""

    def __init__(self, model: nn.Module, layers: tuple[int, ...], components: int, length: int):
        super().__init__(model, layers, "CODA-Prompt")
        self.layers = layers
        self.prompts = nn.Parameter(orthogonal(components, len(layers), length, self.width))
        self.keys = nn.Parameter(orthogonal(components, len(layers), self.width))
        self.attention = nn.Parameter(orthogonal(components, len(layers), self.width))

    def prompted(self, tokens: Tensor, query: Tensor) -> Tensor:
        prefixes = torch.einsum("bml,mlpd->lbpd", self.weights(query), self.prompts)
        return self.encode(tokens, dict(zip(self.layers, prefixes, strict=True)))[:, 0]

    def weights(self, query: Tensor) -> Tensor:
        """Return the weights alpha [B, M, blocks] of queries [B, D]."""
        # einsum sums over D, so that the large tensor q(x) * A_m [B, M, blocks, D] is never stored
        keys = nn.functional.normalize(self.keys, dim=-1)
        products = torch.einsum("bd,mld->bml", query, self.attention * keys)
        squares = torch.einsum("bd,mld->bml", query**2, self.attention**2)
        return products / squares.clamp(min=SMALL).sqrt()


def orthogonal(rows: int, blocks: int, *shape: int) -> Tensor:
    """Return values [rows, blocks, *shape] whose rows are orthonormal in each block.

    If there are more rows than entries, the columns are orthonormal instead.
    """
    each = [nn.init.orthogonal_(torch.empty(rows, *shape)) for _ in range(blocks)]
    return torch.stack(each, 1)
