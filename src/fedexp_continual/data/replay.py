"""Replay buffers: examples of earlier tasks that a client keeps and continues to train on.

This is rehearsal as in centralised continual learning (`scenario.replay`), but each client has its
own buffer, so no example leaves its client. The buffer for task t contains a selection of the
client's examples of the tasks before t, even of tasks in which the client has not taken part in any
round.

`scenario.replay_policy` selects the examples:

- `reservoir`: every example of the earlier tasks is in the buffer with the same probability. This
  is algorithm R (Vitter, "Random Sampling with a Reservoir", ACM Transactions on Mathematical
  Software 1985), with one pass over the examples of each task.
- `class_balanced`: if C classes have been seen so far, the buffer has size // C examples of each of
  them, or all examples of a class that has fewer. All examples of a class are in the buffer with
  the same probability, whichever task they belong to.
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
    """Return the indices of the examples in one client's buffer at the start of each task.

    The indices are ascending. The buffer is empty at the start of the first task.

    parts: the indices of the client's examples for each task, int [n_t].
    labels: int [N], the labels of all examples.
    size: maximum number of examples in the buffer, at least 0.
    policy: reservoir or class_balanced.
    """
    grow = reservoir if policy == "reservoir" else class_balanced
    held = [np.zeros(0, np.int64), *grow(parts, labels, size, rng)]
    return [np.sort(numbers).astype(np.int64) for numbers in held[: len(parts)]]


def reservoir(
    parts: Sequence[np.ndarray], labels: np.ndarray, size: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield the indices of the examples in the buffer after each task."""
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
    """Yield the indices of the examples in the buffer after each task.

    When the quota of a class shrinks, random examples are removed and never return.
    """
    # examples of each class in random order, so that the first n are a uniform sample
    held: dict[int, np.ndarray] = {}
    seen: dict[int, int] = {}  # number of examples of each class so far
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
    """Draw a uniform sample of at most `quota` examples from all earlier and new examples.

    The sample is in random order. The number of earlier examples in the sample is drawn from the
    hypergeometric distribution.

    old: a uniform sample of the earlier examples in random order. It must contain at least `quota`
    examples, or all earlier examples.
    seen: number of earlier examples.
    new: [n], the new examples in random order.
    """
    count = min(quota, seen + len(new))
    earlier = int(rng.hypergeometric(seen, len(new), count))
    return rng.permutation(np.concatenate([old[:earlier], new[: count - earlier]]))
