"""LDA: label skew from a Dirichlet distribution.

FedNTD calls it LDA, MOON and FedKA call it Dir, and FedAlign uses it as well.
"""

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.limits import Count, Positive, Seed32
from fedexp.data.partition import Assigned, Partitioner

_PROBES = 100  # number of draws for each setting that an error message suggests


def draw_sizes(
    class_sizes: np.ndarray, num_clients: int, alpha: float, balance: bool, rng: np.random.Generator
) -> np.ndarray:
    """Return one draw of how many examples of each class each client gets, int64 [C, K].

    For each class in order, q ~ Dir_K(alpha) is drawn, and the class is cut at floor(n_c *
    cumsum(q)). With `balance`, q_k is first set to 0 for clients that already hold N/K examples or
    more, and q is renormalised.

    All sizes are zero if a class has its whole mass on full clients, which happens only if q
    underflows at a tiny alpha. Such a draw meets no minimum.
    """
    sizes = np.zeros((len(class_sizes), num_clients), dtype=np.int64)
    held = np.zeros(num_clients, dtype=np.int64)
    cap = class_sizes.sum() / num_clients
    for c, q in enumerate(rng.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))):
        if not class_sizes[c]:
            continue
        if balance:
            q = q * (held < cap)
        total = q.sum()
        if not total > 0:
            return np.zeros_like(sizes)
        cuts = np.floor(class_sizes[c] * np.cumsum(q / total)).astype(np.int64)
        cuts[-1] = class_sizes[c]  # the last client gets the remaining examples
        sizes[c] = np.diff(cuts, prepend=0)
        held += sizes[c]
    return sizes


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
    balance: bool  # the cap: a client that holds N/K examples gets no more
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
        if self.min_size * num_clients > len(labels):
            raise ConfigError(
                f"min_size={self.min_size}: {num_clients} clients of at least {self.min_size}"
                f" examples need {self.min_size * num_clients} of them, the training set has"
                f" {len(labels)}; use min_size={len(labels) // num_clients} or less"
            )
        class_sizes = np.bincount(labels, minlength=num_classes)
        seed = self.numpy_seed
        released = None if seed is None else np.random.RandomState(seed)
        smallest = []
        for draws in range(1, self.max_draws + 1):
            if released is None:
                sizes = draw_sizes(class_sizes, num_clients, self.alpha, self.balance, rng)
                held = sizes.sum(0)
            else:
                held, piles = self._as_released(labels, num_clients, released)
            smallest.append(int(held.min()))
            if smallest[-1] >= self.min_size:
                piles = _deal(labels, sizes, rng) if released is None else piles
                clients = zip(*piles, strict=True)
                return [np.concatenate(client) for client in clients], {"draws": draws}
        raise ConfigError(self._failure(np.array(smallest), class_sizes, num_clients))

    def _as_released(
        self, labels: np.ndarray, num_clients: int, rng: np.random.RandomState
    ) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Shuffle each class and draw its proportions in turn, with one of numpy's legacy
        generators.

        Return the number of examples per client [K], and each class's examples for each client.
        """
        held, piles = np.zeros(num_clients, dtype=np.int64), []
        for label in np.unique(labels):
            shuffled = np.flatnonzero(labels == label)
            rng.shuffle(shuffled)
            q = rng.dirichlet(np.repeat(self.alpha, num_clients))
            q = q * (held < len(labels) / num_clients) if self.balance else q
            with np.errstate(invalid="ignore"):
                # 0 / 0 if all mass is on full clients: the last client gets the class
                shares = np.nan_to_num(q / q.sum())
            cuts = (np.cumsum(shares) * len(shuffled)).astype(np.int64)[:-1]
            piles.append(np.split(shuffled, cuts))
            held += [len(part) for part in piles[-1]]
        return held, piles

    def _failure(self, smallest: np.ndarray, class_sizes: np.ndarray, num_clients: int) -> str:
        """Return a message with the sizes that were drawn, and settings that are likely to work."""

        def share(alpha: float, clients: int) -> float:
            rng = np.random.default_rng(0)
            draws = [
                draw_sizes(class_sizes, clients, alpha, self.balance, rng) for _ in range(_PROBES)
            ]
            return float(np.mean([sizes.sum(0).min() >= self.min_size for sizes in draws]))

        advice = []
        met = {m: float((smallest >= m).mean()) for m in range(1, self.min_size)}
        likely = [m for m, p in met.items() if p >= 0.05] or [m for m, p in met.items() if p > 0][
            :1
        ]
        if likely:
            advice.append(f"min_size={likely[-1]} ({100 * met[likely[-1]]:.2g} % of the draws)")
        for factor in (2, 4, 8, 16, 32, 64):
            if (p := share(self.alpha * factor, num_clients)) >= 0.05:
                advice.append(f"alpha={self.alpha * factor:g} ({100 * p:.2g} %)")
                break
        clients = num_clients // 2
        while clients > 1 and (p := share(self.alpha, clients)) < 0.05:
            clients //= 2
        if clients > 1:
            advice.append(f"num_clients={clients} ({100 * p:.2g} %)")
        return (
            f"partition=lda alpha={self.alpha:g} num_clients={num_clients}: no draw out of"
            f" {self.max_draws} gave every client min_size={self.min_size} examples; the largest"
            f" minimum seen was {smallest.max()}. Would work:"
            f" {' or '.join(advice) or 'a larger alpha, fewer clients'}"
        )


def _deal(
    labels: np.ndarray, sizes: np.ndarray, rng: np.random.Generator
) -> list[list[np.ndarray]]:
    """Shuffle each class and cut it into the given sizes [C, K]."""
    return [
        np.split(rng.permutation(np.flatnonzero(labels == c)), np.cumsum(row)[:-1])
        for c, row in enumerate(sizes)
    ]
