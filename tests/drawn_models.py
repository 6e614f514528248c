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
        module: nn.Module = super().build(shape, num_classes)  # type: ignore[misc]
        rng = np.random.default_rng(0)
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
