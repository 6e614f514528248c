"""Replay buffers of clients in continual learning."""

from collections import Counter

import numpy as np
import pytest

from fedexp.config.build import build
from fedexp.training.division import divide
from fedexp_continual.data.replay import fill_buffers
from toy_federation import composed

LABELS = np.repeat(np.arange(6), 10)  # ten examples of each of six classes
PARTS = [np.arange(0, 20), np.arange(20, 40), np.arange(40, 60)]  # two classes a task


@pytest.mark.parametrize("policy", ["reservoir", "class_balanced"])
@pytest.mark.parametrize("size", [0, 1, 6, 13, 1000])
def test_buffer_contains_only_examples_of_earlier_tasks(policy, size):
    held = fill_buffers(PARTS, LABELS, size, policy, np.random.default_rng(0))
    assert len(held[0]) == 0
    for task, numbers in enumerate(held):
        earlier = np.concatenate([*PARTS[:task], np.zeros(0, int)])
        assert set(numbers) <= set(earlier)
        assert len(set(numbers)) == len(numbers) <= size
        if policy == "reservoir":
            assert len(numbers) == min(size, len(earlier))


def test_dropped_examples_do_not_return():
    for policy in ("reservoir", "class_balanced"):
        _, second, third = fill_buffers(PARTS, LABELS, 8, policy, np.random.default_rng(1))
        assert set(third) <= set(second) | set(PARTS[1])


def test_class_balanced_equals_hand_calculation():
    """Size 13: after task 1, 13 // 2 = 6 of each class; after task 2, 13 // 4 = 3."""
    _, second, third = fill_buffers(PARTS, LABELS, 13, "class_balanced", np.random.default_rng(0))
    assert Counter(LABELS[second].tolist()) == {0: 6, 1: 6}
    assert Counter(LABELS[third].tolist()) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_reservoir_is_uniform():
    """One of the four examples of two tasks, 4,000 draws: each is kept 1,000 times on average, with
    a standard deviation of sqrt(4000 / 4 * 3 / 4) = 27. With an off-by-one error, an example of the
    first task would be kept 4000 * 3 / 10 times and one of the second task 800 times."""
    parts, rng = [np.arange(2), np.arange(2, 4), np.arange(4, 5)], np.random.default_rng(0)
    draws = [fill_buffers(parts, LABELS, 1, "reservoir", rng)[2] for _ in range(4000)]
    counts = np.bincount(np.concatenate(draws))
    assert counts.sum() == 4000
    assert np.abs(counts - 1000).max() < 4 * 27


def federations(*overrides):
    given = (
        "scenario=class_stream",
        "partition=lda",
        "alpha=5",
        "num_clients=4",
        "rounds=1",
        *overrides,
    )
    _, parts = divide(build(composed(*given)))
    return [part.federation for part in parts]


def test_clients_train_on_their_buffers():
    plain, replayed = federations(), federations("scenario.replay=12")
    assert len(plain) == len(replayed) == 3
    for task, (before, after) in enumerate(zip(plain, replayed, strict=True)):
        for client in range(4):
            own, both = before.parts[client], after.parts[client]
            earlier = set().union(*(plain[t].parts[client] for t in range(task)))
            assert set(own) <= set(both)
            assert set(both) - set(own) <= earlier
            assert len(both) == len(own) + (12 if task else 0)
            assert (
                after.counts[client].tolist()
                == np.bincount(after.labels[both], minlength=10).tolist()
            )
