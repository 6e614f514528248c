"""Outputs of references such as teachers on a client's examples, kept for its next passes over
them.

A reference is in eval mode, so that its output for an example that is not augmented is the same in
every epoch: with E epochs, one pass of E is enough. A product of matrices may round a row by the
rows beside it, so that an output from another batch can differ in its last digits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from fedexp.core.private.of_torch import in_transform
from fedexp.core.tree import Params
from fedexp.models import Output

# whose outputs are kept in a round; one that changes in every step must not fill the memory
MODELS = 4
BYTES = 1 << 28  # for those of one model


@dataclass(frozen=True)
class OfOne:
    """The outputs of one model."""

    # its parameters, so that no other tensor can take their place in memory
    held: tuple[Tensor, ...]
    output: Output  # features [n, D], None where a model has none, and logits [n, C]
    known: np.ndarray  # bool [n]: whose outputs have been written

    def write(self, rows: Tensor, output: Output) -> None:
        for room, part in zip(self.output[:2], output[:2], strict=True):
            if room is not None:
                room[rows] = part.detach()
        self.known[rows.numpy()] = True

    def read(self, rows: Tensor) -> Output:
        features, logits, _ = self.output
        return Output(features if features is None else features[rows], logits[rows])


class Kept:
    """Outputs on the examples of one client in one round, for the batch that was last shown."""

    def __init__(self, index: Tensor, examples: int):
        """index: int64 [S, B] numbers of the examples in each step, with padding; examples: of all
        steps, without."""
        self._index, self._examples = index, examples
        self._models: dict[tuple[tuple[str, int, int], ...], OfOne | None] = {}
        self._x: Tensor | None = None
        self._version = self._step = 0

    def show(self, x: Tensor, step: int) -> None:
        """Tell that the inputs x [b, ...] of a step come next."""
        self._x, self._version, self._step = x, x._version, step

    def of(self, params: Params, x: Tensor, compute: Callable[[], Output]) -> Output:
        """Return what `compute` gives with the parameters of a reference, or what it gave
        before."""
        if x is not self._x or in_transform() or x._version != self._version:
            return compute()
        if any(value.requires_grad for value in (x, *params.values())):
            return compute()
        key = tuple((name, id(value), value._version) for name, value in params.items())
        rows = self._rows[self._step, : len(x)]
        kept = self._models.get(key)
        if kept is not None and kept.known[rows.numpy()].all():
            return kept.read(rows)
        output = compute()
        if key not in self._models and len(self._models) < MODELS:
            kept = self._models[key] = self._room(params, output)
        if kept is not None:
            kept.write(rows, output)
        return output

    @cached_property
    def _rows(self) -> Tensor:
        """Return the place of each example among the client's different ones, [S, B]."""
        return self._index.unique(return_inverse=True)[1]

    def _room(self, params: Params, output: Output) -> OfOne | None:
        """Return room for the outputs of a model; None where no example comes again, or where they
        take too much or are more than rows."""
        count = int(self._rows.max()) + 1
        parts = [part for part in output[:2] if part is not None]
        size = sum(count * part[0].numel() * part.element_size() for part in parts)
        if count >= self._examples or output.maps or size > BYTES:
            return None
        features, logits = (
            part if part is None else part.new_empty(count, *part.shape[1:]) for part in output[:2]
        )
        return OfOne(tuple(params.values()), Output(features, logits), np.zeros(count, bool))
