"""Replay buffers of a client: examples from earlier tasks that it keeps training on.

This is rehearsal as in centralised continual learning (`scenario.replay`), but separately on every
client; no example leaves its client. The buffer for task t contains examples that the client chose
from its examples of the tasks before t, whether or not it took part in a round.

Policies:

- `reservoir`: every example seen so far is in the buffer with the same probability. This is
  algorithm R (Vitter, "Random Sampling with a Reservoir", ACM Transactions on Mathematical Software
  1985), with one pass per task.
- `class_balanced`: the buffer has size // classes examples of each class seen so far, or all of
  them if the class has fewer. Every example of a class is in the buffer with the same probability,
  whichever task it came with.
"""

from collections.abc import Iterator, Sequence

import numpy as np


def fill_buffers(
    parts: Sequence[np.ndarray],
    labels: np.ndarray,
    size: int,
    policy: str,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Return the contents of one client's buffer at the start of each task, as ascending indices.

    The first buffer is empty.

    parts: the client's examples of each task, int [n_t].
    labels: int [N], of all examples.
    size: largest number of examples in the buffer, at least 0.
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
    """Yield the buffer after each task.

    A class whose quota shrinks loses random examples and never regains them.
    """
    held: dict[int, np.ndarray] = {}  # in random order, so that the first n are a uniform sample
    seen: dict[int, int] = {}  # examples of each class so far
    for part in parts:
        shuffled = rng.permutation(part)
        fresh = {int(c): shuffled[labels[shuffled] == c] for c in np.unique(labels[part])}
        quota = size // max(len(held | fresh), 1)
        held = {c: numbers[:quota] for c, numbers in held.items()}
        for c, numbers in fresh.items():
            held[c] = (
                merge_samples(held[c], seen[c], numbers, quota, rng)
                if c in held
                else numbers[:quota]
            )
            seen[c] = seen.get(c, 0) + len(numbers)
        yield np.concatenate([*held.values(), shuffled[:0]])


def merge_samples(
    old: np.ndarray, seen: int, new: np.ndarray, quota: int, rng: np.random.Generator
) -> np.ndarray:
    """Return a uniform sample of at most `quota` examples from `seen` earlier and all new examples.

    The sample is in random order. The number of earlier examples in a uniform sample follows a
    hypergeometric distribution.

    old: a uniform sample of the earlier examples in random order, with all or at least `quota` of
    them.
    new: the new examples [n], in random order.
    """
    count = min(quota, seen + len(new))
    earlier = int(rng.hypergeometric(seen, len(new), count))
    return rng.permutation(np.concatenate([old[:earlier], new[: count - earlier]]))
