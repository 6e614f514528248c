"""LDA: label skew from a Dirichlet distribution.

FedNTD calls it LDA, MOON and FedKA call it Dir, and FedAlign uses it as well.
"""

from collections.abc import Sequence

import numpy as np

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Count, Positive, Seed32
from fedexp.data.partition import Assigned, Partitioner


def draw_sizes(
    class_sizes: np.ndarray, num_clients: int, alpha: float, balance: bool, rng: np.random.Generator
) -> np.ndarray:
    """Return one draw of how many examples of each class each client gets, int64 [C, K].

    For each class in order, q ~ Dir_K(alpha) is drawn, and the class is cut at floor(n_c *
    cumsum(q)). With `balance`, q_k is first set to 0 for clients that already have N/K examples or
    more, and q is renormalised.

    All sizes are zero if a class has its whole mass on full clients, which happens only if q
    underflows at a tiny alpha. Such a draw meets no minimum.
    """
    sizes = np.zeros((len(class_sizes), num_clients), dtype=np.int64)
    cap = class_sizes.sum() / num_clients if balance else np.inf
    for c, q in enumerate(rng.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))):
        if not class_sizes[c]:
            continue
        q = q * (sizes.sum(0) < cap)
        if not q.sum() > 0:
            return np.zeros_like(sizes)
        sizes[c] = cut_class(class_sizes[c], q)
    return sizes


def cut_class(examples: int, q: np.ndarray) -> np.ndarray:
    """Return each client's number of a class's examples for the proportions q [K], int64 [K].

    The last client gets the remaining examples, which are all of them if all proportions are 0.
    """
    shares = q / q.sum() if q.sum() > 0 else q
    cuts = np.floor(examples * np.cumsum(shares)).astype(np.int64)
    cuts[-1] = examples
    return np.diff(cuts, prepend=0)


class LDA(Partitioner):
    """Dirichlet partition with a balancing cap and a smallest client size, by rejection sampling.

    See FedNTD appendix B.5 (p_c ~ Dir_K(alpha)). The cap and the minimum are in the code of FedNTD,
    MOON and FedAlign, but not in their papers. The whole draw is repeated at most `max_draws`
    times, until every client has `min_size` examples. Examples are shuffled only once, for the
    accepted draw: shuffles are independent of the sizes, so the distribution is the same.

    With `numpy_seed`, the draw is the same as in that code after `np.random.seed(numpy_seed)`: each
    client gets the same number of examples of each class and, if the data set has the same order,
    the same examples.
    """

    alpha: Positive  # concentration; smaller is more heterogeneous
    min_size: Count  # smallest n_k
    balance: bool  # the cap: a client with N/K examples gets no more
    max_draws: Count
    numpy_seed: Seed32 | None = None  # seed of the released code's draw; None: use seeds.partition

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        most = len(labels) // num_clients
        words = f"at most {most}, the training examples per client"
        require(self.min_size <= most, "min_size", self.min_size, words)
        members = [np.flatnonzero(labels == c) for c in range(num_classes)]
        class_sizes = np.array([len(numbers) for numbers in members])
        orders: list[np.ndarray] = []
        largest = 0
        legacy = None if self.numpy_seed is None else np.random.RandomState(self.numpy_seed)
        for draws in range(1, self.max_draws + 1):
            if legacy is None:
                sizes = draw_sizes(class_sizes, num_clients, self.alpha, self.balance, rng)
            else:
                sizes, orders = self._draw_released(members, num_clients, legacy)
            smallest = int(sizes.sum(0).min())
            if smallest >= self.min_size:
                orders = orders or [rng.permutation(numbers) for numbers in members]
                return divide(orders, sizes), {"draws": draws}
            largest = max(largest, smallest)
        raise ConfigError(
            f"partition=dirichlet alpha={self.alpha:g} num_clients={num_clients}: none of"
            f" {self.max_draws} draws gave every client min_size={self.min_size} examples; the"
            f" largest minimum was {largest}. Use a smaller min_size, a larger alpha or fewer"
            " clients"
        )

    def _draw_released(
        self, members: Sequence[np.ndarray], num_clients: int, rng: np.random.RandomState
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Shuffle each class and draw its proportions in turn, with one of numpy's legacy
        generators.

        members: each class's examples.

        Return the number of examples of each class per client [C, K], and each class's examples
        in shuffled order.
        """
        sizes = np.zeros((len(members), num_clients), dtype=np.int64)
        cap = sum(map(len, members)) / num_clients if self.balance else np.inf
        orders = [numbers.copy() for numbers in members]
        for c, order in enumerate(orders):
            if len(order):
                rng.shuffle(order)
                q = rng.dirichlet(np.repeat(self.alpha, num_clients))
                sizes[c] = cut_class(len(order), q * (sizes.sum(0) < cap))
        return sizes, orders


def divide(orders: Sequence[np.ndarray], sizes: np.ndarray) -> list[np.ndarray]:
    """Return each client's examples: those of each class are cut, in order, into sizes [C, K]."""
    edges = np.cumsum(sizes, axis=1)[:, :-1]
    piles = [np.split(order, row) for order, row in zip(orders, edges, strict=True)]
    return [np.concatenate(parts) for parts in zip(*piles, strict=True)]
