"""Examples outside the clients' own data: the server's public set (Flashback, FedDF) and FedKA's
shared ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedexp.core.tree import Params
from fedexp.data.text import DropoutKeys
from fedexp.data.types import TextData
from fedexp.engine.base import ClientRuntime, Engine


@dataclass(frozen=True)
class PublicSet:
    """The PublicData of the hooks: training examples that no client holds, never augmented."""

    runtime: ClientRuntime
    numbers: torch.Tensor  # int64 [n], of the training examples
    engine: Engine  # which asks models

    def __len__(self) -> int:
        return len(self.numbers)

    def take(
        self, index: np.ndarray, dropout: np.random.Generator | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, keys = self.numbers[torch.as_tensor(index)].to(self.runtime.device), None
        if dropout is not None and isinstance(self.runtime.data, TextData):
            keys = torch.from_numpy(DropoutKeys().draw(dropout, len(index))).to(self.runtime.device)
        return self.runtime.load_train(chosen, keys)

    def logits(self, models: Sequence[Params]) -> torch.Tensor:
        return torch.stack(self.engine.logits(self.runtime, models, [self.numbers] * len(models)))

    def answers(self, models: Sequence[Params], parts: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return self.engine.logits(
            self.runtime, models, [self.numbers[torch.as_tensor(part)] for part in parts]
        )


def one_of_each(labels: np.ndarray, num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random training example of each class, int64 [C]; -1 for a class that has none
    (FedKA's shared set)."""
    chosen = np.full(num_classes, -1, dtype=np.int64)
    for c in range(num_classes):
        numbers = np.flatnonzero(labels == c)
        if len(numbers):
            chosen[c] = rng.choice(numbers)
    return chosen
