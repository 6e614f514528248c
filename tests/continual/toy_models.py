"""Small models with low-rank adapters, and small vision transformers."""

from dataclasses import field
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from drawn_models import Drawn
from fedexp.models.own import OwnModel
from fedexp_continual.models import lora
from fedexp_continual.models.lora import LoRA


class Adapted(lora.Adapted):
    """A network of two hidden linear layers with low-rank adapters, and a head."""

    vectorises: ClassVar[bool] = True
    head: str | None = "2"
    lora: LoRA = field(default_factory=lambda: LoRA(rank=2))

    def network(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        inputs = int(np.prod(shape))
        hidden = [
            nn.Sequential(nn.Flatten(), nn.Linear(inputs, 5), nn.Tanh()),
            nn.Sequential(nn.Linear(5, 6), nn.Tanh()),
        ]
        return nn.Sequential(*hidden, nn.Linear(6, num_classes))


class AdaptedNormed(Adapted):
    """Also with batch norm on the pixels."""

    def network(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        network = super().network(shape, num_classes)
        network[0].insert(0, nn.BatchNorm2d(shape[0]))
        return network


class TinyTransformer(OwnModel):
    """A vision transformer with three blocks, and patches of 3 x 3 pixels."""

    vectorises: ClassVar[bool] = True
    head: str | None = "head"
    width: int = 4

    def network(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        return TransformerModule(shape, num_classes, self.width)


class AdaptedTransformer(TinyTransformer, lora.Adapted):
    pass


class DrawnAdapted(Drawn, Adapted):
    pass


class DrawnTransformer(Drawn, TinyTransformer):
    pass


class TransformerModule(nn.Module):
    """A network with timm's parts, in their plainest form."""

    def __init__(self, shape: tuple[int, int, int], num_classes: int, width: int):
        super().__init__()
        self.patch_embed = PatchEmbedding(shape[0], width)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        patches = (shape[1] // 3) * (shape[2] // 3)
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, patches + 1, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width) for _ in range(3)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embed(x)
        start = self.cls_token.expand(len(x), -1, -1)
        tokens = torch.cat([start, patches], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class PatchEmbedding(nn.Module):
    def __init__(self, channels: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, 3, stride=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TransformerBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), TwoHeads(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 6), nn.GELU(), nn.Linear(6, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TwoHeads(nn.Module):
    """Attention with two heads, computed one after the other."""

    num_heads = 2

    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, outputs = x.shape[-1] // 2, []
        q, k, v = self.qkv(x).split(x.shape[-1], -1)
        for part in (slice(None, half), slice(half, None)):
            scores = q[..., part] @ k[..., part].transpose(1, 2) / half**0.5
            outputs.append(scores.softmax(-1) @ v[..., part])
        return self.proj(torch.cat(outputs, -1))
