"""Cache for the outputs of reference models, such as teachers, on the examples of a client.

A reference model runs in eval mode, so its output for an example without augmentation is the same
in every epoch and needs to be computed only once. The last digits may differ from those of a new
computation in another batch, because the rounding of a row in a matrix product may depend on the
other rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fedexp.core.private.torch_internals import in_transform
from fedexp.core.tree import Params
from fedexp.models import Output

# maximum number of cached models; without it, a model that changes in every step would fill the
# cache
MODELS = 4
BYTES = 1 << 28  # limit for one model's outputs


@dataclass(frozen=True)
class ModelOutputs:
    """The cached outputs of one model for the n distinct examples of a client."""

    # the model's parameters, kept alive so that no other tensor gets the id of one of them
    params: tuple[Tensor, ...]
    features: Any  # Tensor [n, D], or None if the model has no features
    logits: Tensor  # [n, C]
    known: np.ndarray  # bool [n]: whether an example's output is stored

    def write(self, rows: Tensor, output: Output) -> None:
        if self.features is not None:
            self.features[rows] = output.features.detach()
        self.logits[rows] = output.logits.detach()
        self.known[rows.numpy()] = True

    def read(self, rows: Tensor) -> Output:
        features: Any = None if self.features is None else self.features[rows]
        return Output(features, self.logits[rows])


class OutputCache:
    """Cache for the outputs of reference models on the examples of one client in one round.

    The cache is used only for the inputs that were last passed to `set_batch`.
    """

    def __init__(self, index: Tensor, examples: int):
        """Create an empty cache.

        index: int64 [S, B], the indices of the examples in each step, with padding.
        examples: the number of examples in all steps, without padding.
        """
        self._index, self._examples = index, examples
        self._models: dict[tuple[tuple[str, int, int], ...], ModelOutputs | None] = {}
        self._x: Tensor | None = None
        self._version = self._step = 0

    def set_batch(self, x: Tensor, step: int) -> None:
        """Set the inputs x [b, ...] of the next step."""
        self._x, self._version, self._step = x, x._version, step

    def output(self, params: Params, x: Tensor, compute: Callable[[], Output]) -> Output:
        """Return the output of a reference model, from the cache or by calling `compute`."""
        if x is not self._x or in_transform() or x._version != self._version:
            return compute()
        if any(value.requires_grad for value in (x, *params.values())):
            return compute()
        key = tuple((name, id(value), value._version) for name, value in params.items())
        rows = self._rows[self._step, : len(x)]
        stored = self._models.get(key)
        if stored is not None and stored.known[rows.numpy()].all():
            return stored.read(rows)
        output = compute()
        if key not in self._models and len(self._models) < MODELS:
            stored = self._models[key] = self._allocate(params, output)
        if stored is not None:
            stored.write(rows, output)
        return output

    @cached_property
    def _rows(self) -> Tensor:
        """Return the position of each example among the client's distinct examples, [S, B]."""
        return self._index.unique(return_inverse=True)[1]

    def _allocate(self, params: Params, output: Output) -> ModelOutputs | None:
        """Allocate storage for the outputs of a model, or return None if they are not cached.

        Outputs are not cached if no example occurs twice, if the outputs need too much memory, or
        if they contain feature maps.
        """
        count = int(self._rows.max()) + 1
        parts = [part for part in (output.features, output.logits) if part is not None]
        size = sum(count * part[0].nbytes for part in parts)
        if count >= self._examples or output.maps or size > BYTES:
            return None
        *features, logits = [part.new_empty(count, *part.shape[1:]) for part in parts]
        known = np.zeros(count, bool)
        return ModelOutputs(
            tuple(params.values()), features[0] if features else None, logits, known
        )
