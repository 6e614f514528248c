"""A class-conditional normalising flow: an invertible map from features to standard normal noise.

The flow consists of affine coupling layers (L. Dinh et al., "Density Estimation Using Real NVP",
ICLR 2017), as in AF-FCL's code. Each layer scales and shifts the second half b of its input by
values that depend on the first half a and on the class c, a one-hot vector:
    b <- b * s + m,   s = sigmoid(r + 2) + 0.001,   (m, r) = net(a, c),
where net has a linear layer, two residual blocks gated by c, and a linear layer, with leaky ReLUs.
The input is reversed before the first two layers and rotated by a quarter of its entries before the
last two. AF-FCL's code draws a random permutation instead; a fixed order needs no state besides the
parameters.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedexp.core.tree import Params

LAYERS, REVERSED, BLOCKS = 4, 2, 2
# initial weights of a block's last layer, so that the block starts close to the identity
SMALL = 1e-3


class Block(nn.Module):
    def __init__(self, hidden: int, classes: int):
        super().__init__()
        self.first, self.second, self.gate = (
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(classes, hidden),
        )
        for parameter in self.second.parameters():
            nn.init.uniform_(parameter, -SMALL, SMALL)

    def forward(self, h: Tensor, given: Tensor) -> Tensor:
        inner = self.second(F.leaky_relu(self.first(F.leaky_relu(h))))
        return h + inner * self.gate(given).sigmoid()


class Coupling(nn.Module):
    def __init__(self, width: int, classes: int, hidden: int):
        super().__init__()
        self.first = nn.Linear(width // 2 + classes, hidden)
        self.blocks = nn.ModuleList(Block(hidden, classes) for _ in range(BLOCKS))
        self.last = nn.Linear(hidden, 2 * (width - width // 2))

    def forward(self, a: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shift m and the scale s, [n, D - D // 2] each, for inputs a [n, D // 2].

        given: the classes as one-hot rows [n, C].

        """
        h = self.first(torch.cat([a, given], -1))
        for block in self.blocks:
            h = block(h, given)
        shift, rate = self.last(h).chunk(2, -1)
        return shift, (rate + 2).sigmoid() + 1e-3


class Flow(nn.Module):
    def __init__(self, width: int, classes: int, hidden: int):
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(Coupling(width, classes, hidden) for _ in range(LAYERS))

    def forward(self, x: Tensor, given: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """Return the noise [n, D] for features x [n, D], and the log-determinant of the map, [n].

        If `inverse` is true, x is noise, and the features are returned instead. given: the classes
        as one-hot rows [n, C].
        """
        half, change = self.width // 2, x.new_zeros(len(x))
        steps = list(enumerate(self.layers))
        for number, layer in reversed(steps) if inverse else steps:
            x = x if inverse else self.rotate(x, number, 1)
            a, b = x[:, :half], x[:, half:]
            shift, scale = layer(a, given)
            x = torch.cat([a, (b - shift) / scale if inverse else b * scale + shift], -1)
            change = change + scale.log().sum(-1) * (-1 if inverse else 1)
            x = self.rotate(x, number, -1) if inverse else x
        return x, change

    def rotate(self, x: Tensor, layer: int, direction: int) -> Tensor:
        return x.flip(-1) if layer < REVERSED else x.roll(direction * (self.width // 4), -1)


@dataclass(frozen=True)
class Density:
    """The probability density of a flow with given parameters."""

    flow: Flow
    params: Params

    def log_density(self, features: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log p(features | class) [n], noise [n, D]).

        given: the classes as one-hot rows [n, C].
        """
        noise, change = functional_call(self.flow, self.params, (features, given, False))
        normal = -0.5 * noise.square().sum(-1) - 0.5 * noise.shape[-1] * math.log(2 * math.pi)
        return normal + change, noise

    def features(self, noise: Tensor, given: Tensor) -> Tensor:
        """Return the features [n, D] that the flow generates from noise [n, D].

        given: the classes as one-hot rows [n, C].

        """
        return functional_call(self.flow, self.params, (noise, given, True))[0]
