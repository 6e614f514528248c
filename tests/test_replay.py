"""Replay buffers of clients in continual learning."""

from collections import Counter

import numpy as np
import pytest

from fedexp.config.build import build
from fedexp.core.errors import ConfigError
from fedexp.data.replay import buffers
from fedexp.training.division import divide
from toy_federation import composed

LABELS = np.repeat(np.arange(6), 10)  # ten examples of each of six classes
PARTS = [np.arange(0, 20), np.arange(20, 40), np.arange(40, 60)]  # two classes a task


@pytest.mark.parametrize("policy", ["reservoir", "class_balanced"])
@pytest.mark.parametrize("size", [0, 1, 6, 13, 1000])
def test_a_buffer_holds_examples_of_earlier_tasks_alone(policy, size):
    held = buffers(PARTS, LABELS, size, policy, np.random.default_rng(0))
    assert len(held[0]) == 0
    for task, numbers in enumerate(held):
        earlier = np.concatenate([*PARTS[:task], np.zeros(0, int)])
        assert set(numbers) <= set(earlier)
        assert len(set(numbers)) == len(numbers) <= size
        if policy == "reservoir":
            assert len(numbers) == min(size, len(earlier))


def test_a_buffer_never_gets_back_what_it_gave_up():
    for policy in ("reservoir", "class_balanced"):
        _, second, third = buffers(PARTS, LABELS, 8, policy, np.random.default_rng(1))
        assert set(third) <= set(second) | set(PARTS[1])


def test_class_balanced_by_hand():
    """Size 13: after task 1, 13 // 2 = 6 of each class; after task 2, 13 // 4 = 3."""
    _, second, third = buffers(PARTS, LABELS, 13, "class_balanced", np.random.default_rng(0))
    assert Counter(LABELS[second].tolist()) == {0: 6, 1: 6}
    assert Counter(LABELS[third].tolist()) == {0: 3, 1: 3, 2: 3, 3: 3}


@pytest.mark.slow
def test_a_reservoir_is_uniform():
    """Ten of forty examples, 4,000 draws: each is held 1,000 times in the mean, with a deviation of 27."""
    held = Counter()
    for seed in range(4000):
        held.update(buffers(PARTS, LABELS, 10, "reservoir", np.random.default_rng(seed))[2].tolist())
    counts = np.array([held[number] for number in range(40)])
    assert counts.sum() == 40_000
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)


def federations(*overrides):
    given = ("scenario=class_incremental", "partition=lda", "alpha=5", "num_clients=4", "rounds=1", *overrides)
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
            assert after.counts[client].tolist() == np.bincount(after.labels[both], minlength=10).tolist()


def test_a_buffer_depends_on_the_seed_of_the_partition_alone():
    first, again = federations("scenario.replay=12", "seed=3"), federations("scenario.replay=12", "seed=3")
    other = federations("scenario.replay=12", "seed=4")
    assert [part.tolist() for part in first[2].parts] == [part.tolist() for part in again[2].parts]
    assert [part.tolist() for part in first[2].parts] != [part.tolist() for part in other[2].parts]


@pytest.mark.parametrize(
    ("override", "message"),
    [("scenario.replay=-1", "at least 0"), ("scenario.replay_policy=reservior", "nearest: 'reservoir'")],
)
def test_bad_buffers(override, message):
    with pytest.raises(ConfigError, match=message):
        federations(override)
