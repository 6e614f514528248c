"""DualPrompt: prefixes that all tasks share, and prefixes of each task, chosen by a key.

Z. Wang, Z. Zhang, S. Ebrahimi, R. Sun, H. Zhang, C.-Y. Lee, X. Ren, G. Su, V. Perot, J. Dy, T.
Pfister, "DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning", ECCV 2022. The
G-Prompt g is a prefix of the attention in shallow blocks, the E-Prompt e_t of task t one in deeper
blocks: the attention is MSA(h_Q, [p_K; h_K], [p_V; h_V]). A local step in task t uses e_t and
minimises
    CE + lambda gamma(q(x), k_t),     gamma(q, k) = 1 - cos(q, k),
over g, e_t, its key k_t and the head. A test image uses e_s of the task s <= t whose key is nearest
to its query, so the task is not known in the test. The head classifies the class token.

The server averages all of them (see prompts.py). All clients of a round train on the same task, so
each client trains g, e_t and k_t; prompts and keys of other tasks do not change.

Compared with the authors' code (google-research/l2p), which is the source of the formulas; the
equation numbers of the paper were not available. `general_length` and `task_length` are the number
of keys, and as many values follow; these are 5 and 20 in the code's configs/imr_dualprompt.py, and
5 and 5 in cifar100_dualprompt.py, with blocks 0, 1 and 2, 3, 4 and lambda = 1. Prefixes join keys
and values after their projections, and begin uniform in [0, 0.01], as in the code. Its learning
rate is 0.03 (CIFAR-100) or 0.005 (ImageNet-R) * batch size / 256, with Adam. The code starts e_t
from e_{t-1}, and in the test also considers the untrained keys of later tasks. GT-RIPL/CODA-Prompt
has a key for each block. JH-LEE-KR/dualprompt-pytorch (prompt.py) exchanges the dimensions of
keys/values and images with a reshape, so half of a batch gets key prompts for values, and the other
half value prompts for keys. fed-mammoth (_models/dualp.py, _networks/vit_prompt_dual.py) has this
reshape too, and no term with lambda, so its keys are never trained.

Deviations: e_t starts from new values. Gradients are not clipped. The method requires tasks with
new classes.
"""

import torch
from torch import Tensor, nn

from fedexp.algorithms.interfaces import Context, Federation
from fedexp.algorithms.prompts import Blocks, TaskPrompts
from fedexp.core.errors import require
from fedexp.core.limits import Count, NonNegative
from fedexp.core.tree import Params
from fedexp.models.prompts import Prompted, cosines, in_use, take_rows, uniform


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
        """Return the parameters without the keys of other tasks, which no image can choose."""
        return params | {"keys": params["keys"] * ctx.server["current"][:, None]}

    def matching_loss(self, query: Tensor, params: Params, ctx: Context) -> Tensor:
        key = ctx.server["current"][None] @ params["keys"]
        return self.lambda_match * (1 - cosines(query, key)[:, 0])


class DualPrompted(Prompted):
    """A vision transformer with general prefixes, and prefixes of tasks with keys.

    A task whose key is zero is never chosen.
    """

    def __init__(
        self,
        model: nn.Module,
        general: tuple[tuple[int, ...], int],
        task: tuple[tuple[int, ...], int],
        tasks: int,
    ):
        """Add prompts, given as (blocks, length), to a model for a number of tasks."""
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
