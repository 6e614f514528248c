"""DualPrompt: all tasks share some prefixes, and each task has its own, selected by a key.

Clients train the shared prefixes, the prefixes of the current task and the head of a frozen
transformer. Prefixes of earlier tasks do not change, which limits forgetting. The server averages
all trained parameters (see prompts.py).

Z. Wang, Z. Zhang, S. Ebrahimi, R. Sun, H. Zhang, C.-Y. Lee, X. Ren, G. Su, V. Perot, J. Dy, T.
Pfister, "DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning", ECCV 2022. The
G-Prompt g is a prefix of the attention in shallow blocks. The E-Prompt e_t of task t is a prefix in
deeper blocks. A prefix p = (p_K, p_V) extends the keys and values of the attention: MSA(h_Q, [p_K;
h_K], [p_V; h_V]). In task t, a local step uses e_t and minimises
    CE + lambda gamma(q(x), k_t),     gamma(q, k) = 1 - cos(q, k),
over g, e_t, the key k_t of task t and the head. The second term pulls k_t towards the queries q(x)
of the images. A test image does not reveal its task: among the tasks s <= t, it uses e_s of the
task whose key is nearest to its query. The head classifies the class token.

The formulas come from the authors' code (google-research/l2p); the equation numbers of the paper
were not available. `general_length` and `task_length` are the numbers of keys in a prefix; a prefix
has equally many keys and values. These are 5 and 20 in the code's configs/imr_dualprompt.py, and 5
and 5 in cifar100_dualprompt.py. In both files, g is in blocks 0 and 1, e_t in blocks 2, 3 and 4,
and lambda = 1. As in the code, keys and values are extended after their projections, and prefixes
are drawn uniformly from [0, 0.01]. The code uses Adam with a learning rate of 0.03 (CIFAR-100) or
0.005 (ImageNet-R) * batch size / 256.

Differs from the released code: e_t starts from new values, not from e_{t-1}. A test image cannot
select the untrained keys of later tasks. Gradients are not clipped. The method requires tasks with
new classes.

Other implementations: GT-RIPL/CODA-Prompt has a key for each block. JH-LEE-KR/dualprompt-pytorch
(prompt.py) and fed-mammoth (_models/dualp.py, _networks/vit_prompt_dual.py) mix keys and values
with the batch dimension in a reshape, so half of a batch gets keys as values and the other half
values as keys. fed-mammoth also omits the term with lambda, so its keys are never trained.
"""

import torch
from torch import Tensor, nn

from fedexp.algorithms.interfaces import Context, Federation
from fedexp.core.errors import require
from fedexp.core.limits import Count, NonNegative
from fedexp.core.tree import Params
from fedexp_continual.algorithms.prompts import Blocks, TaskPrompts
from fedexp_continual.models.prompts import Prompted, cosines, in_use, take_rows, uniform


class DualPrompt(TaskPrompts):
    divided = ("keys", "prompts")

    general_layers: Blocks  # blocks that have the G-Prompt
    general_length: Count  # number of keys, and of values, of the G-Prompt in a block
    task_layers: Blocks  # blocks that have the E-Prompts
    task_length: Count  # number of keys, and of values, of an E-Prompt in a block
    lambda_match: NonNegative  # weight of the distance between a query and the key of its task

    def __post_init__(self) -> None:
        super().__post_init__()
        both = set(self.general_layers) & set(self.task_layers)
        what = "other blocks than algorithm.general_layers"
        require(not both, "algorithm.task_layers", list(self.task_layers), what)

    def prompted(self, module: nn.Module, federation: Federation) -> Prompted:
        general = self.general_layers, self.general_length
        return DualPrompted(
            module, general, (self.task_layers, self.task_length), len(federation.tasks)
        )

    def draw(self, shape: torch.Size) -> Tensor:
        return uniform(*shape)

    def in_training(self, params: Params, ctx: Context) -> Params:
        """Return the parameters with the keys of other tasks set to 0.

        A task whose key is 0 is not selected.

        """
        return params | {"keys": params["keys"] * ctx.server["current"][:, None]}

    def matching_loss(self, query: Tensor, params: Params, ctx: Context) -> Tensor:
        key = ctx.server["current"][None] @ params["keys"]
        return self.lambda_match * (1 - cosines(query, key)[:, 0])


class DualPrompted(Prompted):
    """A vision transformer with prefixes for all tasks and prefixes for each task.

    For each image, a key selects the task whose prefixes are used. A key of zeros is never
    selected.
    """

    def __init__(
        self,
        model: nn.Module,
        general: tuple[tuple[int, ...], int],
        task: tuple[tuple[int, ...], int],
        tasks: int,
    ):
        """Add G-Prompt and E-Prompts, each given as (blocks, number of keys), to a model."""
        (self.general_layers, general_length), (self.task_layers, task_length) = general, task
        super().__init__(model, (*self.general_layers, *self.task_layers), "DualPrompt")
        self.general = nn.Parameter(
            uniform(len(self.general_layers), 2 * general_length, self.width)
        )
        self.prompts = nn.Parameter(
            uniform(tasks, len(self.task_layers), 2 * task_length, self.width)
        )
        self.keys = nn.Parameter(uniform(tasks, self.width))

    def prompted(self, tokens: Tensor, query: Tensor) -> Tensor:
        fit = cosines(query, self.keys).masked_fill(~in_use(self.keys), -torch.inf)
        own = take_rows(fit.argmax(-1), self.prompts)  # [B, blocks, 2 length, D]
        prefixes = dict(zip(self.task_layers, own.unbind(1), strict=True))
        general = self.general[:, None].expand(-1, len(query), -1, -1)
        prefixes |= dict(zip(self.general_layers, general, strict=True))
        return self.encode(tokens, prefixes)[:, 0]
