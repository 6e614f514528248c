"""Models whose initial weights are equal on every CPU, for the golden values.

PyTorch's vectorised kernels draw other float32 numbers on a CPU without AVX2, so these models
replace the weights by numbers from numpy, which come from integers by one exact multiplication.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fedexp.models.cnn import CNN
from fedexp.models.own import OwnModel
from fedexp.models.textcnn import TextCNN


class Drawn:
    """A mixin before the class of a model: it draws the weights after they have been built."""

    def build(self, shape: Any, num_classes: int) -> nn.Module:
        module, rng = super().build(shape, num_classes), np.random.default_rng(0)  # type: ignore[misc]
        for values in module.parameters():
            # 1 / sqrt(inputs) for weights as for biases, like PyTorch's default
            bound = max(values[0].numel(), 4) ** -0.5
            drawn = (rng.random(tuple(values.shape)) - 0.5) * 2 * bound
            values.data.copy_(torch.from_numpy(drawn))
        return module


class DrawnCNN(Drawn, CNN):
    pass


class DrawnTextCNN(Drawn, TextCNN):
    pass


class DrawnAdapted(Drawn, OwnModel):
    """Two hidden linear layers with low-rank adapters, and a head."""

    vectorises: ClassVar[bool] = True

    def network(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        first = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 5), nn.Tanh())
        return nn.Sequential(
            first, nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, num_classes)
        )


class DrawnTransformer(Drawn, OwnModel):
    """A vision transformer with three blocks, and patches of 3 x 3 pixels."""

    vectorises: ClassVar[bool] = True

    def network(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        return TransformerModule(shape, num_classes, 4)


class Recorded(Drawn, OwnModel):
    """A linear model that keeps its inputs: pairs (whether in training, x) in `seen`."""

    vectorises: ClassVar[bool] = False
    seen: ClassVar[list[tuple[bool, torch.Tensor]]] = []

    def network(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        return RecordedModule(int(np.prod(shape)), num_classes)


class RecordedModule(nn.Module):
    def __init__(self, inputs: int, num_classes: int):
        super().__init__()
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Recorded.seen.append((self.training, x.detach().clone()))
        return self.fc(x.flatten(1))


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
