"""LDA: partitions whose label skew is drawn from a Dirichlet distribution.

FedNTD calls this scheme LDA; MOON and FedKA call it Dir. FedAlign also uses it.
"""

from collections.abc import Sequence

import numpy as np

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Count, Positive, Seed32
from fedexp.data.partition import Assigned, Partitioner


def draw_sizes(
    class_sizes: np.ndarray, num_clients: int, alpha: float, balance: bool, rng: np.random.Generator
) -> np.ndarray:
    """Draw how many examples of each class each client gets, int64 [C, K].

    For each class c with n_c examples, proportions q ~ Dir_K(alpha) are drawn, and the class is cut
    at floor(n_c * cumsum(q)). If `balance` is true, q_k is set to 0 for clients that already have
    at least N/K examples, and q is normalised again before the cut.

    If all proportions of a class are 0, the result is 0 everywhere, so that the draw is rejected.
    This happens only if alpha is so small that q underflows.
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
    """Return how many examples of a class each client gets, int64 [K].

    The last client also gets the examples that remain after rounding down. If all proportions are
    0 or nan, the last client gets all examples, as in the released code. numpy's legacy generator
    draws nan if alpha is so small that all proportions underflow.

    q: [K], proportions of the clients. They are normalised to a sum of 1.
    """
    shares = q / q.sum() if q.sum() > 0 else np.zeros_like(q)
    cuts = np.floor(examples * np.cumsum(shares)).astype(np.int64)
    cuts[-1] = examples
    return np.diff(cuts, prepend=0)


class LDA(Partitioner):
    """Dirichlet partition with a balancing cap and a minimum client size.

    See FedNTD, appendix B.5 (p_c ~ Dir_K(alpha)). The cap and the minimum are used in the released
    code of FedNTD, MOON and FedAlign, but are not mentioned in their papers. The sizes are drawn
    again until every client has at least `min_size` examples, at most `max_draws` times. Examples
    are shuffled only after a draw has been accepted. This does not change the distribution, because
    shuffling is independent of the sizes.

    With `numpy_seed`, each client gets the same number of examples of each class as in the released
    code after `np.random.seed(numpy_seed)`. If the examples of the data set are also in the same
    order, the clients get the same examples. PFLlib has the same draw, and then holds out a part of
    each client's examples with the same generator (`test_per_client`).
    """

    alpha: Positive  # concentration; a smaller value gives more heterogeneous clients
    min_size: Count  # minimum number of examples per client
    balance: bool  # the cap: a client that has at least N/K examples gets no further examples
    max_draws: Count
    numpy_seed: Seed32 | None = None  # seed as in the released code; None: use seeds.partition

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        most = len(labels) // num_clients
        words = f"at most {most}, the average number of training examples per client"
        require(self.min_size <= most, "min_size", self.min_size, words)
        members = [np.flatnonzero(labels == c) for c in range(num_classes)]
        class_sizes = np.array([len(numbers) for numbers in members])
        orders: list[np.ndarray] = []
        largest = 0
        for draws in range(1, self.max_draws + 1):
            if self.numpy_seed is None:
                sizes = draw_sizes(class_sizes, num_clients, self.alpha, self.balance, rng)
            else:
                sizes, orders = self._draw_released(members, num_clients, rng)
            smallest = int(sizes.sum(0).min())
            if smallest >= self.min_size:
                orders = orders or [rng.permutation(numbers) for numbers in members]
                return divide(orders, sizes), {"draws": draws}
            largest = max(largest, smallest)
        raise ConfigError(
            f"partition=dirichlet alpha={self.alpha:g} num_clients={num_clients}: none of"
            f" {self.max_draws} draws gave every client at least min_size={self.min_size} examples;"
            f" in the best draw, the smallest client had {largest}. Use a smaller min_size, a"
            " larger alpha or fewer clients"
        )

    def _draw_released(
        self, members: Sequence[np.ndarray], num_clients: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Draw the sizes, and shuffle each class, in the order of the released code.

        members: the examples of each class.
        rng: a legacy generator of numpy.

        Returns how many examples of each class each client gets, [C, K], and the shuffled examples
        of each class.
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
    """Return each client's examples.

    orders: the examples of each class, in the order in which they are given to the clients.
    sizes: [C, K], the number of examples of each class that each client gets.
    """
    edges = np.cumsum(sizes, axis=1)[:, :-1]
    piles = [np.split(order, row) for order, row in zip(orders, edges, strict=True)]
    return [np.concatenate(parts) for parts in zip(*piles, strict=True)]
