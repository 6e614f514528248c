"""Code shared by the methods that train separate low-rank adapters for each task (PILoRA, LoRM).

The server keeps two models. The clients train a model with the head and the adapters of the current
task. The tested model contains the adapters of all tasks so far.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.algorithms.interfaces import Federation, TaskStart
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp_continual.algorithms.classes import NewClasses
from fedexp_continual.models.lora import LowRank

DOWN, UP = ".down.weight", ".up.weight"  # suffixes of the names of A and B (see models.lora)


def adapters(params: Params) -> Params:
    """Return the adapter matrices A and B of all layers that have adapters."""
    return {name: value for name, value in params.items() if name.endswith((DOWN, UP))}


def layers(params: Params) -> list[str]:
    """Return the sorted names of the layers that have adapters."""
    return sorted(name.removesuffix(DOWN) for name in params if name.endswith(DOWN))


class NewAdapters(NewClasses):
    """Base class for methods that start each task with new adapters.

    The matrices A of new adapters are initialised like the weights of torch's linear layers. The
    matrices B are initialised with zeros.
    """

    own_step = "its server builds the tested model from the adapters of all tasks"
    fresh_optimizer = "each task starts with new adapters"
    inputs = ("images",)
    needs_features = True
    needs_head = True

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        """Check that the model has adapters with trained A and B, and return it unchanged."""
        name, found = (
            type(self).__name__,
            [part for part in module.modules() if isinstance(part, LowRank)],
        )
        if not found:
            raise ConfigError(
                f"model.lora.rank: {name} needs low-rank adapters; use model=timm_lora, such as"
                " model.name=vit_tiny_patch16_224 model.lora.rank=4"
            )
        if not all(part.down.weight.requires_grad for part in found):
            raise ConfigError(f"model.lora.freeze_a=true: must be false, because {name} trains A")
        return module

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return super().server_init(params, federation) | {"local": params}

    def broadcast(self, server: Tree) -> Tree:
        return {"params": server["local"], "new": server["new"]}

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        """Return the server's state with newly initialised adapters in the clients' model."""
        server, rng = super().begin_task(server, start), start.rng("rehearsal")
        fresh = {
            k: draw_initial(v, rng) if k.endswith(DOWN) else torch.zeros_like(v)
            for k, v in server["local"].items()
        }
        return server | {"local": server["local"] | adapters(fresh)}


def draw_initial(like: Tensor, rng: np.random.Generator) -> Tensor:
    """Return a randomly initialised adapter matrix A with the shape of `like`.

    Its entries are drawn uniformly from [-b, b], where b = 1 / sqrt(fan-in).
    """
    bound = 1 / math.sqrt(like[0].numel())
    return torch.from_numpy(rng.uniform(-bound, bound, tuple(like.shape))).to(like)


class Prototypes(nn.Module):
    """Head that predicts the class whose prototype is nearest to the features.

    The logits [B, C] are the negative distances -sqrt(||f - c||^2 / D) between features f [D] and
    prototypes c [D].
    """

    def __init__(self, width: int, num_classes: int):
        super().__init__()
        self.centers = nn.Parameter(0.1 * torch.randn(num_classes, width))

    def forward(self, features: Tensor) -> Tensor:
        squares = (features**2).sum(-1, keepdim=True) + (self.centers**2).sum(-1)
        apart = squares - 2 * F.linear(features, self.centers)
        return -(apart / features.shape[-1]).clamp(min=1e-12).sqrt()
