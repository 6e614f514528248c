"""Training examples that no client has: the server's public set and the validation set."""

import numpy as np

from fedexp.core.limits import Checked, ShareBelow1


class Public(Checked, prefix="public."):
    """The server's public set (config node `public`), split off the training data before they are
    partitioned."""

    fraction: ShareBelow1
    balanced: bool

    def split(self, labels: np.ndarray, num_classes: int, rng: np.random.Generator) -> np.ndarray:
        """Return the numbers of the public examples, ascending: floor(fraction * N) of labels [N],
        at random or, balanced, as `of_each_class`."""
        total = int(self.fraction * len(labels) + 1e-9)
        if not self.balanced:
            return np.sort(rng.choice(len(labels), total, replace=False))
        return of_each_class(labels, num_classes, total, rng)


def of_each_class(
    labels: np.ndarray, num_classes: int, total: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the numbers of `total` of the examples with labels [N], ascending: of each class as
    many as of the others, up to one, and where a class is too small, the others make up for it."""
    piles = [rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)]
    # Deal one of each class after the other; the order of the classes within a turn is random.
    turns = np.concatenate([np.arange(len(pile)) for pile in piles])
    order = np.lexsort((rng.random(len(turns)), turns))
    return np.sort(np.concatenate(piles)[order[:total]])


class Validation(Checked, prefix="validation."):
    """The validation set (config node `validation`): training examples that nobody trains on."""

    fraction: ShareBelow1
    per_client: bool

    def choose(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return floor(fraction * count) of the numbers 0 to count - 1, drawn at random,
        ascending."""
        return np.sort(rng.choice(count, int(self.fraction * count + 1e-9), replace=False))


NONE_HELD_OUT = Validation(fraction=0.0, per_client=False)
