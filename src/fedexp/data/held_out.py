"""Training examples that no client trains on: the public set and the validation set."""

import numpy as np

from fedexp.core.limits import Checked, ShareBelow1


class Public(Checked, prefix="public."):
    """The server's public set (config node `public`).

    Its examples are removed from the training data before the partition.
    """

    fraction: ShareBelow1
    balanced: bool

    def split(self, labels: np.ndarray, num_classes: int, rng: np.random.Generator) -> np.ndarray:
        """Draw floor(fraction * N) public examples and return their indices, ascending.

        If `balanced` is true, `draw_balanced` draws the examples; otherwise, they are drawn
        uniformly.

        labels: int [N].
        """
        total = int(self.fraction * len(labels) + 1e-9)
        if not self.balanced:
            return np.sort(rng.choice(len(labels), total, replace=False))
        return draw_balanced(labels, num_classes, total, rng)


def draw_balanced(
    labels: np.ndarray, num_classes: int, total: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw `total` examples, equally many of each class, and return their indices, ascending.

    The numbers per class differ by at most one. If a class has too few examples, additional
    examples are drawn from the other classes.

    labels: int [N].
    """
    piles = [rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)]
    # Each turn takes one example of each class, in random order of the classes.
    turns = np.concatenate([np.arange(len(pile)) for pile in piles])
    order = np.lexsort((rng.random(len(turns)), turns))
    return np.sort(np.concatenate(piles)[order[:total]])


class Validation(Checked, prefix="validation."):
    """The validation set (config node `validation`): training examples that no client trains on."""

    fraction: ShareBelow1
    per_client: bool

    def choose(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw floor(fraction * count) different numbers from 0 to count - 1, ascending."""
        return np.sort(rng.choice(count, int(self.fraction * count + 1e-9), replace=False))
