"""Code shared by the methods whose clients keep examples of old tasks and train on them again.

When a task begins, each client chooses examples of the previous task by the features that the
global model computes for them. These examples are kept: from then on, they are mixed with the new
examples in batches, augmented in the same way, and included in n_k. The server's state stores the
indices of the kept examples as a table [K, n], padded with -1, so that a run can be resumed. The
table is not sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.base import masked_mean
from fedexp.algorithms.interfaces import Federation, TaskStart
from fedexp.core.tree import Tree
from fedexp_continual.algorithms.classes import NewClasses

# maps the indices of examples [n] to their features [n, D]
Features = Callable[[np.ndarray], Tensor]
Kept = Sequence[np.ndarray]  # indices of the examples that each client keeps


class Exemplars(NewClasses, ABC):
    """Base class for methods whose clients keep examples of old tasks."""

    needs_features = True

    @abstractmethod
    def choose(
        self,
        kept: Kept,
        own: Kept,
        features: Features,
        federation: Federation,
        rng: np.random.Generator,
    ) -> list[np.ndarray]:
        """Return the indices of the examples that each client keeps from now on.

        kept: the examples that each client has kept so far. own: each client's examples of the
            previous task. federation: describes the clients' data in the previous task.
        """

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        server, before = super().begin_task(server, start), start.before
        own = [
            part[np.isin(before.labels[part], before.tasks[before.task])] for part in before.parts
        ]
        features = partial(start.features, server["params"] | server["buffers"])
        held, rng = numbers_in(server, start.federation), start.rng("kept examples")
        kept = self.choose(held, own, features, before, rng)
        return server | {"kept": table(kept, server["new"].device)}

    def training_data(self, server: Tree, federation: Federation) -> Federation:
        """Return the federation in which the parts include the kept examples."""
        if "kept" not in server:
            return federation
        pairs = zip(federation.parts, numbers_in(server, federation), strict=True)
        parts = tuple(np.union1d(part, kept) for part, kept in pairs)
        counts = np.stack(
            [
                np.bincount(federation.labels[part], minlength=federation.num_classes)
                for part in parts
            ]
        )
        return replace(federation, parts=parts, counts=counts.astype(federation.counts.dtype))


def table(kept: Kept, device: torch.device) -> torch.Tensor:
    """Return each client's example indices as a table, int64 [K, n], padded with -1."""
    columns = list(zip_longest(*kept, fillvalue=-1))
    rows = np.array(columns, dtype=np.int64).reshape(len(columns), len(kept)).T
    return torch.from_numpy(rows.copy()).to(device)


def numbers_in(server: Tree, federation: Federation) -> list[np.ndarray]:
    """Return the indices of the examples that each client keeps.

    In the first task, the clients keep no examples.
    """
    if "kept" not in server:
        return [np.zeros(0, np.int64)] * federation.num_clients
    return [row[row >= 0] for row in server["kept"].cpu().numpy()]


def means_of_old_and_new(
    values: Tensor, is_old: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the means of the values [B] of examples of old and of new classes, or 0 without any.

    is_old: [B], 1 for an example of an old class and 0 for an example of a new class. mask: as in
    `masked_mean`.
    """
    present = torch.ones_like(is_old) if mask is None else mask.to(is_old.dtype)
    return masked_mean(values, present * is_old), masked_mean(values, present * (1 - is_old))
