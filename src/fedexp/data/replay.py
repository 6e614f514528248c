"""A client's replay buffer: examples of earlier tasks that it goes on training on
(`scenario.replay`).

Rehearsal as in centralised continual learning, on every client for itself; no example leaves its
client. A buffer of task t holds what the client chose among its examples of the tasks before t,
whether or not it took part in a round.
    reservoir       every example seen so far is in the buffer with the same probability: algorithm
    R (Vitter, "Random
                    Sampling with a Reservoir", ACM Transactions on Mathematical Software 1985), one
                    pass a task
    class_balanced  of each class seen so far the same number, size // classes, or all where a class
    has fewer; every
                    example of a class with the same probability, whichever of the tasks it came
                    with
"""

from collections.abc import Iterator, Sequence

import numpy as np


def buffers(
    parts: Sequence[np.ndarray],
    labels: np.ndarray,
    size: int,
    policy: str,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Return what one client's buffer holds when each task begins: example numbers, ascending;
    empty for the first.

    parts: its examples of each task, int [n_t]; labels int [N] of all examples; size: examples, at
    least 0.
    """
    grow = reservoir if policy == "reservoir" else class_balanced
    held = [np.zeros(0, np.int64), *grow(parts, labels, size, rng)]
    return [np.sort(numbers).astype(np.int64) for numbers in held[: len(parts)]]


def reservoir(
    parts: Sequence[np.ndarray], labels: np.ndarray, size: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield the buffer after each task."""
    held: list[int] = []
    seen = 0
    for part in parts:
        for number in rng.permutation(part):
            seen += 1
            if len(held) < size:
                held.append(int(number))
            elif (place := int(rng.integers(seen))) < size:
                held[place] = int(number)
        yield np.array(held, dtype=np.int64)


def class_balanced(
    parts: Sequence[np.ndarray], labels: np.ndarray, size: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield the buffer after each task. A class that loses room loses examples at random, and gets
    none back."""
    held: dict[int, np.ndarray] = {}  # in random order: the first ones are a uniform sample too
    seen: dict[int, int] = {}  # examples of each class so far
    for part in parts:
        shuffled = rng.permutation(part)
        fresh = {int(c): shuffled[labels[shuffled] == c] for c in np.unique(labels[part])}
        quota = size // max(len(held | fresh), 1)
        held = {c: numbers[:quota] for c, numbers in held.items()}
        for c, numbers in fresh.items():
            held[c] = (
                joined(held[c], seen[c], numbers, quota, rng) if c in held else numbers[:quota]
            )
            seen[c] = seen.get(c, 0) + len(numbers)
        yield np.concatenate([*held.values(), shuffled[:0]])


def joined(
    old: np.ndarray, seen: int, new: np.ndarray, quota: int, rng: np.random.Generator
) -> np.ndarray:
    """Return a uniform sample of at most `quota` of `seen` earlier examples and the new ones [n],
    in random order.

    old: a uniform sample of the earlier ones, all or at least `quota`, in random order, as the new
    ones are. How many of the earlier ones a uniform sample has is hypergeometric; which ones does
    not matter.
    """
    count = min(quota, seen + len(new))
    earlier = int(rng.hypergeometric(seen, len(new), count))
    return rng.permutation(np.concatenate([old[:earlier], new[: count - earlier]]))
