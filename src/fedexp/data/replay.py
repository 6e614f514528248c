"""A client's replay buffer: examples of earlier tasks that it goes on training on (`scenario.replay`).

Rehearsal as in centralised continual learning, on every client for itself; no example leaves its client. A buffer of
task t holds what the client chose among its examples of the tasks before t, whether or not it took part in a round.
    reservoir       every example seen so far is in the buffer with the same probability: algorithm R (Vitter, "Random
                    Sampling with a Reservoir", ACM Transactions on Mathematical Software 1985), one pass a task
    class_balanced  of each class seen so far the same number, size // classes, or all where a class has fewer
"""

from collections.abc import Iterator, Sequence

import numpy as np

POLICIES = ("reservoir", "class_balanced")


def buffers(
    parts: Sequence[np.ndarray], labels: np.ndarray, size: int, policy: str, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return what one client's buffer holds when each task begins: example numbers, ascending; empty for the first.

    parts: its examples of each task, int [n_t]; labels int [N] of all examples; size: examples, at least 0.
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
    """Yield the buffer after each task. A class that loses room loses its last examples, and gets none back."""
    held: dict[int, np.ndarray] = {}
    for part in parts:
        shuffled = rng.permutation(part)
        fresh = {int(c): shuffled[labels[shuffled] == c] for c in np.unique(labels[part])}
        merged = {c: np.concatenate([held.get(c, shuffled[:0]), fresh.get(c, shuffled[:0])]) for c in held | fresh}
        quota = size // max(len(merged), 1)
        held = {c: numbers[:quota] for c, numbers in merged.items()}
        yield np.concatenate([*held.values(), shuffled[:0]])
