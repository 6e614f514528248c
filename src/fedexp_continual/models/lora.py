"""Low-rank adapters for linear layers and convolutions.

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022), equation 3.

The output of an adapted layer is h = W x + (alpha / r) B A x. The weights W are frozen. A [r, in]
and B [out, r] are trained, where r is the rank; B is initialised with zeros. Linear layers and
convolutions can be adapted. For a convolution, A is a convolution with r output channels and the
same kernel size, stride and padding as the original convolution, and B is a 1 x 1 convolution.

The initial values are the same as in the library peft with `init_lora_weights=True`.
"""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from torch import Tensor, nn

from fedexp.core.errors import ConfigError, nearest, require
from fedexp.core.limits import Checked, CountFrom0
from fedexp.models.own import OwnModel
from fedexp.models.pretrained import Timm, Torchvision

Layer = nn.Linear | nn.Conv2d  # layers that can be adapted


class LoRA(Checked, prefix="model.lora."):
    """Options for low-rank adapters.

    Only the adapters and the head are trained; all other parameters are frozen.
    """

    rank: CountFrom0 = 0  # r; 0: no adapters
    alpha: float | None = None  # numerator of the scale alpha / r; None: the scale is 1
    # suffixes of the names of the layers to adapt; (): all linear layers except the head
    targets: tuple[str, ...] = ()
    # whether to train only B, so that averaging B over clients averages the products B A (FFA-LoRA)
    freeze_a: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.alpha is None or (math.isfinite(self.alpha) and self.alpha > 0)
        require(good, "model.lora.alpha", self.alpha, "greater than 0, or null")

    def adapt(self, network: nn.Module, head: str | None) -> None:
        """Freeze all parameters of a network except its head, and insert adapters in place.

        head: name of the head.

        Raises ConfigError if `head` is None, or if a target is not a layer that can be adapted.
        """
        if head is None:
            raise ConfigError(
                "model.lora.rank: with adapters, the head is also trained, so its name is needed;"
                " set model.head"
            )
        for name, parameter in network.named_parameters():
            if not name.startswith(f"{head}."):
                parameter.requires_grad_(False)
        scale = 1.0 if self.alpha is None else self.alpha / self.rank
        for name in select_layers(network, self.targets, head):
            parent, _, own = name.rpartition(".")
            layer = network.get_submodule(name)
            assert isinstance(layer, Layer)
            adapter = LowRank(layer, self.rank, scale)
            adapter.down.weight.requires_grad_(not self.freeze_a)
            setattr(network.get_submodule(parent), own, adapter)


def select_layers(network: nn.Module, targets: Sequence[str], head: str) -> list[str]:
    """Return the names of the layers that get adapters.

    targets: suffixes of layer names. If empty, all linear layers except the head are selected.

    Raises ConfigError if a target matches no layer, or a layer that cannot be adapted.
    """
    layers = {n: m for n, m in network.named_modules() if isinstance(m, Layer) and n != head}
    unsuitable = {name for name in layers if not is_adaptable(network, name)}
    if not targets:
        found = [n for n, m in layers.items() if isinstance(m, nn.Linear) and n not in unsuitable]
        if not found:
            raise ConfigError(
                "model.lora.targets=[]: the network has no linear layer except its head; set"
                " model.lora.targets to names of convolutions"
            )
        return found
    found = []
    for target in targets:
        matching = [name for name in layers if f".{name}".endswith(f".{target}")]
        if not matching:
            endings = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
            raise ConfigError(
                f"model.lora.targets={target}: no linear layer or convolution has this name"
                f"{nearest(target, layers)}; names end in: {endings}"
            )
        if wrong := sorted(unsuitable.intersection(matching)):
            raise ConfigError(
                f"model.lora.targets={target}: {wrong[0]} cannot have an adapter, because it is a"
                " grouped convolution or a part of nn.MultiheadAttention"
            )
        found += [name for name in matching if name not in found]
    return found


def is_adaptable(network: nn.Module, name: str) -> bool:
    """Return whether the layer with this name can have an adapter.

    An adapter inside nn.MultiheadAttention would have no effect, because that module reads the
    weights of its projection and does not call the layer. Grouped convolutions are not supported.
    """
    parent, layer = network.get_submodule(name.rpartition(".")[0]), network.get_submodule(name)
    return not isinstance(parent, nn.MultiheadAttention) and getattr(layer, "groups", 1) == 1


class Adapted(OwnModel):
    """Base class of models that may have low-rank adapters.

    It comes after a class that has other defaults than `OwnModel`, as in `Mine(Other, Adapted)`.
    """

    lora: LoRA = field(default_factory=LoRA)

    def adjust(self, network: nn.Module, head: str | None) -> None:
        super().adjust(network, head)
        if self.lora.rank:
            self.lora.adapt(network, head)


class TimmLoRA(Timm, Adapted):
    """`model=timm_lora`."""


class TorchvisionLoRA(Torchvision, Adapted):
    """`model=torchvision_lora`."""


class LowRank(nn.Module):
    """A linear layer or convolution with a low-rank adapter: W x + scale * B A x."""

    def __init__(self, base: Layer, rank: int, scale: float) -> None:
        super().__init__()
        self.base: Layer = base
        self.scale = scale
        self.down: Layer
        self.up: Layer
        if isinstance(base, nn.Conv2d):
            places: Any = {"kernel_size": base.kernel_size, "stride": base.stride}
            places |= {"padding": base.padding, "dilation": base.dilation}
            places |= {"padding_mode": base.padding_mode}
            self.down = nn.Conv2d(base.in_channels, rank, bias=False, **places)
            self.up = nn.Conv2d(rank, base.out_channels, 1, bias=False)
        else:
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))  # as in torch's nn.Linear
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.scale * self.down(x))
