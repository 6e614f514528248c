"""L2P: each image selects the prompts with the nearest keys from a pool.

The prompts are tokens that a frozen vision transformer processes together with the image. Clients
train the prompts, their keys and the head. The server averages the whole pool (see prompts.py). A
prompt that only some clients selected moves only by their share of the weights, and a prompt that
no client selected does not change.

Z. Wang, Z. Zhang, C.-Y. Lee, H. Zhang, R. Sun, X. Ren, G. Su, V. Perot, J. Dy, T. Pfister,
"Learning to Prompt for Continual Learning", CVPR 2022. The pool has M prompts P_m of L tokens, each
with a key k_m (Eq. 1). An image with query q(x) selects the N prompts with the smallest distances
gamma(q(x), k_m) = 1 - cos(q(x), k_m) (Eq. 3). Their tokens precede the image's tokens in the first
block (Eq. 2). The head classifies the mean of the network's outputs for the prompts' tokens. A
local step minimises (Eq. 5)
    CE + lambda sum_{m selected} gamma(q(x), k_m)
over prompts, keys and head. Only the second term trains the keys, because the selection has no
gradient.

As in the authors' code (google-research/l2p), prompts have no position embedding, and prompts and
keys are drawn uniformly from [0, 0.01]. The code's configs/cifar100_l2p.py has M = 10, N = 4, L =
10 and lambda = 1, and uses Adam with learning rate 0.03 * batch size / 256.

Differs from the released code: Each image selects its own prompts, as in Eq. 3. In that code, all
images of a batch use the N prompts that most of them select, also in tests, so the prediction for a
test image depends on other images. Gradients are not clipped; the code clips them at norm 1. The
penalty for frequent prompts (Eq. 4) is not implemented; the authors' configurations do not use it
either. The method requires tasks with new classes.

Other implementations: JH-LEE-KR/l2p-pytorch uses N = 5, L = 5 and lambda = 0.1, with the learning
rate, clipping and selection of the authors' code. fed-mammoth (aimagelab/fed-mammoth,
_models/l2p.py and _networks/vit_prompt_l2p.py) selects prompts for each image. It has no term with
lambda, so its keys are never trained, and it classifies the mean over the class token and the
prompts. Both implementations give prompts position embeddings and draw prompts from [-1, 1].
"""

import torch
from torch import Tensor, nn

from fedexp.algorithms.interfaces import Context, Federation
from fedexp.core.errors import require
from fedexp.core.limits import Count, NonNegative
from fedexp.core.tree import Params
from fedexp_continual.algorithms.prompts import Prompting
from fedexp_continual.models.prompts import Prompted, cosines, take_rows, uniform


class L2P(Prompting):
    pool: Count  # number M of prompts in the pool
    selected: Count  # number N of prompts that an image selects
    length: Count  # number L of tokens of a prompt
    lambda_pull: NonNegative  # weight of the distances between queries and selected keys

    def __post_init__(self) -> None:
        super().__post_init__()
        most = f"at most algorithm.pool={self.pool}"
        require(self.selected <= self.pool, "algorithm.selected", self.selected, most)

    def prompted(self, module: nn.Module, federation: Federation) -> Prompted:
        return PromptPool(module, self.pool, self.selected, self.length)

    def matching_loss(self, query: Tensor, params: Params, ctx: Context) -> Tensor:
        nearest = cosines(query, params["keys"]).topk(self.selected).values
        return self.lambda_pull * (1 - nearest).sum(-1)


class PromptPool(Prompted):
    """A vision transformer with a pool of token prompts."""

    def __init__(self, model: nn.Module, pool: int, selected: int, length: int):
        super().__init__(model, (), "L2P")
        self.selected = selected
        self.prompts = nn.Parameter(uniform(pool, length, self.width))
        self.keys = nn.Parameter(uniform(pool, self.width))

    def prompted(self, tokens: Tensor, query: Tensor) -> Tensor:
        rows = cosines(query, self.keys).topk(self.selected).indices
        prompts = take_rows(rows, self.prompts).flatten(1, 2)
        encoded = self.encode(torch.cat([prompts, tokens], 1))
        return encoded[:, : prompts.shape[1]].mean(1)
