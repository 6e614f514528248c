"""Training examples that are given to no client: the server's public set and the validation set."""

import numpy as np

from fedexp.core.limits import Checked, ShareBelow1


class Public(Checked, prefix="public."):
    """The server's public set (config node `public`), split off before the training data are
    partitioned.
    """

    fraction: ShareBelow1
    balanced: bool

    def split(self, labels: np.ndarray, num_classes: int, rng: np.random.Generator) -> np.ndarray:
        """Return the indices of floor(fraction * N) public examples, ascending.

        They are drawn at random, or by `draw_balanced` if `balanced` is set.

        labels: int [N].
        """
        total = int(self.fraction * len(labels) + 1e-9)
        if not self.balanced:
            return np.sort(rng.choice(len(labels), total, replace=False))
        return draw_balanced(labels, num_classes, total, rng)


def draw_balanced(
    labels: np.ndarray, num_classes: int, total: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the indices of `total` examples, ascending, with equally many of each class.

    The numbers per class differ by at most one. If a class is too small, the others have more.

    labels: int [N].
    """
    piles = [rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)]
    # Take one example of each class in turn; the order of the classes within a turn is random.
    turns = np.concatenate([np.arange(len(pile)) for pile in piles])
    order = np.lexsort((rng.random(len(turns)), turns))
    return np.sort(np.concatenate(piles)[order[:total]])


class Validation(Checked, prefix="validation."):
    """The validation set (config node `validation`): training examples that no client trains on."""

    fraction: ShareBelow1
    per_client: bool

    def choose(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return floor(fraction * count) random numbers from 0 to count - 1, ascending."""
        return np.sort(rng.choice(count, int(self.fraction * count + 1e-9), replace=False))


NO_VALIDATION = Validation(fraction=0.0, per_client=False)
