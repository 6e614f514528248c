"""Partitions: properties, the LDA routine against a literal transcription, files, messages."""

import json
import math
import operator
import random
import re
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toy_federation
from fedexp.algorithms.base import FedAvg
from fedexp.config.build import build
from fedexp.config.settings import Seeds
from fedexp.core.errors import ConfigError
from fedexp.core.storage import load_npz, save_npz
from fedexp.data.held_out import Public, Validation
from fedexp.data.partition import IID, Natural, Partitioner, Sharding, Shards
from fedexp.data.partition_file import File
from fedexp.data.partition_lda import LDA
from fedexp.data.partitioned import Partition
from fedexp.training.division import divide, make_task_partition
from toy_federation import composed

SEEDS = st.integers(0, 2**32)
few = settings(max_examples=40, deadline=None)


def rng(seed=0):
    return np.random.default_rng(seed)


def balanced(classes=10, per_class=50, seed=0):
    return rng(seed).permutation(np.repeat(np.arange(classes), per_class))


def lda(alpha=0.5, min_size=1, balance=True, max_draws=2000):
    return LDA(alpha=alpha, min_size=min_size, balance=balance, max_draws=max_draws)


def split(
    partitioner: Partitioner,
    labels: object,
    clients: int,
    generator: object = 0,
    owners: np.ndarray | None = None,
    test_fraction: float = 0.0,
) -> Partition:
    """Deal examples to the clients. generator: a seed, or an object in place of a generator."""
    labels = np.asarray(labels)
    source = rng(generator) if isinstance(generator, int) else generator
    dealt = partitioner.deal(labels, clients, source, owners, test_fraction=test_fraction)
    classes = int(labels.max()) + 1
    test = np.sort(np.concatenate(dealt.test))
    return Partition.build(dealt.parts, labels, classes, dealt.info, test=test)


def of_task(partitioner, labels, clients, owners=None, public=0.0, test=0.0, key=()) -> Partition:
    """Divide the examples of one task, with a public set that is not balanced."""
    labels = np.asarray(labels)
    classes = int(labels.max()) + 1
    data = SimpleNamespace(
        y_train=torch.from_numpy(labels), owners=owners, num_classes=classes, domains=()
    )
    task = SimpleNamespace(train=np.arange(len(labels)), classes=tuple(range(classes)))
    built = SimpleNamespace(
        seeds=SimpleNamespace(partition=3),
        settings=SimpleNamespace(num_clients=clients, test_per_client=test),
        algorithm=FedAvg(),
        partition=partitioner,
        public=Public(fraction=public, balanced=False),
        validation=Validation(fraction=0.0, per_client=False),
    )
    return make_task_partition(built, data, task, key)


class Global(Partitioner):
    """A user's partition that calls NumPy's global generator."""

    def assign(self, labels, num_classes, num_clients, rng, owners):
        drawn = np.random.permutation(len(labels))  # noqa: NPY002
        return np.array_split(drawn, num_clients), {}


def test_numbers_from_global_generators_differ_in_each_task():
    labels = balanced()
    first, again, second, third = (
        of_task(Global(), labels, 5, key=key).parts for key in ((), (), (1,), (2,))
    )
    assert all(map(np.array_equal, first, again))
    for one, other in ((first, second), (first, third), (second, third)):
        assert not np.array_equal(one[0], other[0])


def check(partition: Partition, labels: np.ndarray, clients: int, covers: bool):
    """Check with plain loops what every partition must satisfy."""
    seen: set[int] = set()
    for k, part in enumerate(partition.parts):
        assert part.dtype == np.int64
        assert len(part) >= 1
        assert list(part) == sorted(set(part.tolist()))
        assert not seen & set(part.tolist())
        seen |= set(part.tolist())
        for c in range(partition.counts.shape[1]):
            assert partition.counts[k, c] == sum(labels[i] == c for i in part)
    assert len(partition.parts) == clients
    assert seen <= set(range(len(labels)))
    assert not covers or len(seen) == len(labels)
    assert list(partition.sizes) == [len(part) for part in partition.parts]


# ------------------------------------------------------------------ properties
@few
@given(st.integers(1, 30), st.integers(30, 200), SEEDS)
def test_iid_gives_equal_disjoint_parts(clients, examples, seed):
    labels = rng(seed).integers(0, 5, examples)
    partition = split(IID(), labels, clients, seed)
    check(partition, labels, clients, covers=examples % clients == 0)
    assert set(partition.sizes) == {examples // clients}


PAIRS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]  # of four examples


@pytest.mark.parametrize(
    ("partitioner", "labels", "possible"),
    [
        # a shard is a class
        (Shards(shards_per_client=1, sort_by_label=True), [0, 0, 1, 1], [(0, 1), (2, 3)]),
        # cut from a random order in a class
        (Shards(shards_per_client=1, sort_by_label=True), [0, 0, 0, 0], PAIRS),
        (Shards(shards_per_client=1, sort_by_label=False), [0, 1, 2, 3], PAIRS),
        # one of two contiguous blocks of a class
        (Sharding(shards_per_client=1), [0, 0, 0, 0], [(0, 1), (2, 3)]),
        (Sharding(shards_per_client=1), [0, 0, 1, 1], [(0, 1), (2, 3)]),  # one of two classes
        (IID(), [0, 1, 2, 3], PAIRS),
    ],
)
def test_all_partitions_are_equally_likely(partitioner, labels, possible):
    """Two clients share four examples. Over 180 seeds, the first client gets each possible half
    about equally often.
    """
    halves = [tuple(split(partitioner, labels, 2, seed).parts[0].tolist()) for seed in range(180)]
    assert set(halves) == set(possible)
    # Of 180 deals 30 are expected of each of six halves, with a standard deviation of 5; of two
    # halves 90, with 6.7.
    assert all(abs(halves.count(half) - 180 / len(possible)) <= 20 for half in possible)


@few
@given(st.integers(1, 12), SEEDS)
def test_natural_clients_are_whole_owners(clients, seed):
    # ids need not be consecutive
    owners = rng(seed).permutation(np.repeat(np.arange(12) * 7, np.arange(1, 13)))
    labels = rng(seed + 1).integers(0, 3, len(owners))
    partition = split(Natural(), labels, clients, seed, owners)
    check(partition, labels, clients, covers=clients == 12)
    for part in partition.parts:
        (owner,) = set(owners[part])
        assert len(part) == (owners == owner).sum()


def literal_lda(labels, clients, scheme, generator):
    """Compute LDA one number at a time. Examples are shuffled only for the accepted draw."""
    members = [np.flatnonzero(labels == c) for c in range(labels.max() + 1)]
    parts = [[]] * clients
    while min(map(len, parts)) < scheme.min_size:
        parts, cuts = [[] for _ in range(clients)], []
        for own in members:
            q = generator.dirichlet([scheme.alpha] * clients)
            for k in range(clients):
                q[k] *= not scheme.balance or len(parts[k]) < len(labels) / clients
            shares, cut = q / q.sum(), [0]
            for k in range(clients - 1):
                cut.append(math.floor(len(own) * sum(shares[: k + 1])))
            cuts.append([*cut, len(own)])
            for k, part in enumerate(parts):
                part.extend(own[cuts[-1][k] : cuts[-1][k + 1]])
    orders = [generator.permutation(own) for own in members]
    pairs = list(zip(orders, cuts, strict=True))
    return [sorted(i for o, cut in pairs for i in o[cut[k] : cut[k + 1]]) for k in range(clients)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("balance", [True, False])
def test_lda_equals_the_literal_routine(balance, seed):
    """Of 24 examples of each of six classes, the smallest client needs at least 12."""
    labels, scheme = balanced(classes=6, per_class=24, seed=seed), lda(0.6, 12, balance)
    parts = split(scheme, labels, 5, seed).parts
    assert [part.tolist() for part in parts] == literal_lda(labels, 5, scheme, rng(seed))


def released_lda(labels, alpha, clients, seed):
    """Compute FedNTD's code in plain steps with numpy's global generator: shuffle each class, then
    draw its proportions.
    """
    np.random.seed(seed)  # noqa: NPY002
    while True:
        held = [[] for _ in range(clients)]
        for c in range(labels.max() + 1):
            indices = np.where(labels == c)[0]
            np.random.shuffle(indices)  # noqa: NPY002
            q = np.random.dirichlet(np.repeat(alpha, clients))  # noqa: NPY002
            q = np.array(
                [
                    share * (len(own) < len(labels) / clients)
                    for share, own in zip(q, held, strict=True)
                ]
            )
            with np.errstate(invalid="ignore"):  # if alpha is tiny, all q may be 0 or nan
                cuts = (np.cumsum(q / q.sum()) * len(indices)).astype(int)[:-1]
            held = [
                own + new.tolist() for own, new in zip(held, np.split(indices, cuts), strict=True)
            ]
        if min(map(len, held)) >= 10:
            return held


def released_sharding(labels, shards_per_client, clients, seed):
    """Compute FedNTD's code in plain steps: Python's generator shuffles a table of classes,
    numpy's draws shards.
    """
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    classes = labels.max() + 1
    count, shards = shards_per_client * clients // classes, {}
    for c in range(classes):
        indices = np.where(labels == c)[0].tolist()
        size = len(indices) // count
        shards[c] = [indices[i * size : (i + 1) * size] for i in range(count)]
        for i, index in enumerate(indices[count * size :]):
            shards[c][i].append(index)
    table = list(range(classes)) * count
    random.shuffle(table)
    parts = []
    for client in range(clients):
        own = table[client * shards_per_client : (client + 1) * shards_per_client]
        drawn = []
        for c in own:
            position = np.random.choice(len(shards[c]), replace=False)  # noqa: NPY002
            drawn.append(shards[c].pop(position))
        parts.append(np.concatenate(drawn))
    return parts


@pytest.mark.parametrize("seed", [19940817, 3])
def test_numpy_seed_equals_released_code(seed):
    """Each client gets the same examples as in the released code. The run's seed has no effect."""
    labels = balanced(classes=10, per_class=200, seed=1)
    options = {"alpha": 0.3, "min_size": 10, "balance": True, "max_draws": 2000}
    for scheme, slow in (
        (partial(LDA, **options), released_lda(labels, 0.3, 20, seed)),
        (partial(Sharding, shards_per_client=3), released_sharding(labels, 3, 20, seed)),
    ):
        partition = split(scheme(numpy_seed=seed), labels, 20)
        assert [set(part) for part in partition.parts] == [set(part) for part in slow]
        assert partition.hash == split(scheme(numpy_seed=seed), labels, 20, 1).hash
        assert partition.hash != split(scheme(numpy_seed=seed + 1), labels, 20).hash
        assert partition.info["numpy_seed"] == seed
        check(partition, labels, 20, covers=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_tiny_alpha_equals_released_code(seed):
    """All proportions of a class can underflow. numpy's legacy generator then draws nan."""
    labels = balanced(classes=10, per_class=100)
    scheme = LDA(alpha=1e-3, min_size=10, balance=True, max_draws=2000, numpy_seed=seed)
    slow = released_lda(labels, 1e-3, 2, seed)
    assert [part.tolist() for part in split(scheme, labels, 2).parts] == list(map(sorted, slow))


def pfllib_split(parts, share):
    """Compute PFLlib's split in plain steps: scikit-learn's train_test_split permutes the
    positions with numpy's global generator, tests on the first and trains on the next.
    """
    train, test = [], []
    for part in parts:
        size = int(np.floor(share * len(part)))
        order = np.random.permutation(len(part))  # noqa: NPY002
        test += [part[i] for i in order[: len(part) - size]]
        train.append([part[i] for i in order[len(part) - size :]])
    return train, test


def test_fedka_has_the_clients_of_pfllib():
    """The paper's clients 0 and 3, and the counts that its text gives: "nearly 5000" images of
    client 0, "close to 1000" of class 3 and "only about 10" of class 1. 6,000 images of each of ten
    classes, numpy seed 1."""
    labels = balanced(classes=10, per_class=6000, seed=4)
    scheme = LDA(alpha=0.1, min_size=40, balance=True, max_draws=2000, numpy_seed=1)
    partition = split(scheme, labels, 10, test_fraction=0.25)
    assert (len(partition.test), partition.sizes.sum()) == (15_003, 44_997)
    client = partition.counts[0]
    assert (client.sum(), client[3], client[1]) == (4852, 957, 16)
    counts = split(scheme, labels, 10).counts[3]  # before the test images are held out
    assert {c: n for c, n in enumerate(counts) if n} == {1: 34, 2: 4146, 4: 24, 7: 1, 8: 4423}


@pytest.mark.parametrize("seed", [1, 7])
def test_numpy_seed_also_draws_the_test_set_of_pfllib(seed):
    labels = balanced(classes=10, per_class=200, seed=1)
    train, test = pfllib_split(released_lda(labels, 0.3, 20, seed), 0.75)
    scheme = LDA(alpha=0.3, min_size=10, balance=True, max_draws=2000, numpy_seed=seed)
    partition = split(scheme, labels, 20, test_fraction=0.25)
    assert [part.tolist() for part in partition.parts] == list(map(sorted, train))
    assert partition.test.tolist() == sorted(test)
    assert partition.counts.sum() == sum(map(len, train))
    assert partition.info["test_counts"] == np.bincount(labels[sorted(test)]).tolist()


def test_test_examples_are_held_out(tmp_path):
    """Also with a public set, whose examples are removed before the partition."""
    partition = of_task(IID(), balanced(4, 50), 5, public=0.015, test=0.25)
    held = [*partition.parts, partition.test, partition.public]
    # (200 - 3) // 5 = 39 examples of each client, of which it keeps floor(0.75 * 39) = 29
    assert list(map(len, held)) == [29] * 5 + [50, 3]
    assert len(np.unique(np.concatenate(held))) == 198
    assert partition.info["unused"] == 2
    partition.save(tmp_path / "partition.npz", "abcd")
    assert (Partition.load(tmp_path / "partition.npz").test == partition.test).all()
    message = r"test_per_client=0.25: client 0 has 1 example, so it would have no training examples"
    with pytest.raises(ConfigError, match=message):
        split(IID(), balanced(2, 2), 4, test_fraction=0.25)


class Fixed:
    """A generator with given proportions that does not shuffle."""

    def __init__(self, q):
        self.q = np.array(q)

    def dirichlet(self, alpha, size):
        assert self.q.shape == (size, len(alpha))
        return self.q

    def permutation(self, indices):
        return indices


def test_lda_balance_equals_hand_calculation():
    # 3 classes of 10, 2 clients: N/K = 15. Class 0: q = (0.8, 0.2) -> cut at 8: 8 and 2. Class 1: q
    # = (0.75, 0.25) -> cut at 7: 7 and 3; they hold 15 and 5. Class 2: client 0 holds 15, which is
    # not < 15, so q = (0, 1): 0 and 10.
    q = [[0.8, 0.2], [0.75, 0.25], [0.5, 0.5]]
    labels = np.repeat([0, 1, 2], 10)
    capped = split(lda(balance=True, min_size=15), labels, 2, Fixed(q))
    assert capped.counts.tolist() == [[8, 7, 0], [2, 3, 10]]
    assert capped.parts[0].tolist() == [*range(8), *range(10, 17)]
    uncapped = split(lda(balance=False), labels, 2, Fixed(q))
    assert uncapped.counts.tolist() == [[8, 7, 5], [2, 3, 5]]


def test_lda_repeats_draws_without_mass():
    # after class 0 client 0 holds 10 >= N/K = 10; class 1 then has q = (1, 0): nothing is left to
    # share
    with pytest.raises(ConfigError, match="min_size"):
        split(lda(max_draws=3), np.repeat([0, 1], 10), 2, Fixed([[1.0, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize("numpy_seed", [None, 3])
def test_lda_draws_at_most_max_draws_times(numpy_seed):
    labels = balanced(4, 10)

    def draws(most):
        scheme = LDA(alpha=0.15, min_size=8, balance=True, max_draws=most, numpy_seed=numpy_seed)
        return split(scheme, labels, 4).info["draws"]

    needed = draws(200)
    assert needed >= 3
    assert draws(needed) == needed
    with pytest.raises(
        ConfigError, match=f"none of {needed - 1} draws gave every client at least min_size=8"
    ):
        draws(needed - 1)


def test_lda_skips_an_absent_class():
    labels = np.repeat([0, 2, 3], 20)
    partition = split(lda(alpha=5.0), labels, 3)
    check(partition, labels, 3, covers=True)
    assert partition.counts.sum(0).tolist() == [20, 0, 20, 20]


# ------------------------------------------------------------------ files
SCHEME = lda(0.5, 5)


def scheme_split():
    return split(SCHEME, balanced(), 10)


def test_saved_partition_is_loaded_unchanged_and_damage_is_rejected(tmp_path):
    partition, path = scheme_split(), tmp_path / "partition.npz"
    with pytest.raises(ConfigError, match=r"partition\.npz"):
        Partition.load(path)
    partition.save(path, classes=[f"class {c}" for c in range(10)])
    loaded = Partition.load(path)
    assert [a.tolist() for a in loaded.parts] == [a.tolist() for a in partition.parts]
    assert (loaded.counts == partition.counts).all()
    assert (loaded.hash, loaded.info) == (partition.hash, partition.info)
    assert loaded.info.items() >= asdict(SCHEME).items()  # the settings
    arrays = load_npz(path)
    assert arrays["classes"].tolist() == [f"class {c}" for c in range(10)]
    assert list(tmp_path.iterdir()) == [path]  # no temporary file left
    arrays["indices"][:2] = arrays["indices"][:2][::-1]
    for changed, message in ((arrays, "damaged"), ({"x": np.zeros(2)}, "not a partition")):
        save_npz(path, **changed)
        with pytest.raises(ConfigError, match=message):
            Partition.load(path)


# ------------------------------------------------------------------ partition=file
def read(path, clients, examples=10):
    return split(File(path=str(path)), np.arange(examples) % 2, clients)


def test_partition_is_read_from_every_file_format(tmp_path):
    (tmp_path / "object.json").write_text('{"1": [5, 4], "0": [9, 0, 3]}')
    (tmp_path / "list.json").write_text("[[9, 0, 3], [5, 4]]")
    unsigned = np.array([9, 0, 3], dtype=np.uint8)
    np.savez(tmp_path / "arrays.npz", **{"0": unsigned, "1": np.array([5, 4])})
    for path in tmp_path.iterdir():
        assert [part.tolist() for part in read(path, 2).parts] == [[0, 3, 9], [4, 5]]
    scheme_split().save(tmp_path / "run.npz", classes=())
    again = split(File(path=str(tmp_path / "run.npz")), balanced(), 10)
    assert again.hash == scheme_split().hash
    assert (again.counts == scheme_split().counts).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0, 1], [1, 2]]", "gives example 1 to clients 0 and 1"),
        ("[[0, 1], [2, 2]]", "gives example 2 to client 1 twice"),
        ("[[0, 1], [2, 10]]", "gives client 1 example 10; example indices must be from 0 to 9"),
        ("[[0], []]", "gives client 1 an array of float64 with shape [0]"),
        ("[[0], [true, 2]]", "gives client 1 true or false"),
        ('[[0], ["1"]]', "gives client 1 an array of <U1 with shape [1]"),
        ("[[0], [[1], 2]]", "must give a list of example indices for each client"),
        ('{"0": [0], "2": [1]}', "the clients must be named 0 to 1"),
        ('{"0": [0], "1": [1], "1": [2]}', "cannot be read (1 appears twice)"),
        ("3", "must be a JSON object"),
        ({"0": [0], "1": np.array([{}], dtype=object)}, "cannot be read"),
        ({"indices": [0, 1], "sizes": [1, 2]}, "is not a partition written by fedexp"),
    ],
)
def test_wrong_partition_file_is_rejected(content, message, tmp_path):
    path = tmp_path / ("p.npz" if isinstance(content, dict) else "p.json")
    if isinstance(content, dict):
        np.savez(path, **{key: np.asarray(value) for key, value in content.items()})
    else:
        path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read(path, 2)
    assert str(path) in str(caught.value)


def test_missing_partition_file_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"set partition\.path="):
        File(path=None)
    with pytest.raises(ConfigError, match="this file does not exist"):
        read(tmp_path / "none.json", 2)
    with pytest.raises(ConfigError, match=r"p\.csv: must be a \.npz or \.json file"):
        read(tmp_path / "p.csv", 2)


# ------------------------------------------------------------------ messages
@pytest.mark.parametrize(
    ("partitioner", "clients", "message"),
    [
        (IID(), 501, "num_clients=501: must be at most 500, the number of training examples"),
        (IID(), 0, "num_clients=0: must be at least 1"),
        (lda(min_size=51), 10, "min_size=51: must be at most 50"),
        (Natural(), 10, "natural clients, such as dataset=femnist"),
        (Sharding(shards_per_client=60), 10, "only 50 examples, but must be cut into 60 shards"),
        (Sharding(shards_per_client=3), 8, "num_clients=8 is a multiple of the 10 classes"),
        (Shards(shards_per_client=51, sort_by_label=True), 10, "at most 50, so that each shard"),
    ],
)
def test_impossible_settings_are_rejected(partitioner, clients, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        split(partitioner, balanced(), clients)


def test_more_clients_than_owners_are_rejected():
    with pytest.raises(ConfigError, match="num_clients=6: must be at most 5"):
        split(Natural(), balanced(), 6, 0, np.arange(500) // 100)


# --- the public set


def public(labels, fraction, balanced, seed=0):
    return Public(fraction=fraction, balanced=balanced).split(labels, labels.max() + 1, rng(seed))


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    fraction=st.floats(0, 0.99),
    seed=st.integers(0, 9),
)
def test_balanced_public_set_has_equal_class_sizes(sizes, fraction, seed):
    """The set has floor(f N) examples. Class sizes differ by at most one unless a class is used
    up.
    """
    labels = rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    chosen = public(labels, fraction, True, seed)
    assert len(chosen) == len(set(chosen.tolist())) == int(fraction * len(labels) + 1e-9)
    assert (np.diff(chosen) > 0).all()
    counts = np.bincount(labels[chosen], minlength=len(sizes))
    left = counts[counts < sizes]
    assert not len(left) or counts.max() - left.min() <= 1


def test_data_draws_depend_only_on_the_partition_seed():
    held_out = Validation(fraction=0.25, per_client=True)
    options = {"public": 0.15, "surrogate": 0.3, "validation": held_out}

    def draw(partition, others=0):
        seeds = Seeds(partition=partition, sampling=others, training=others)
        made = toy_federation.make_simulation(
            sizes=(4, 4, 5, 6), seeds=seeds, seed=others, **options
        )
        stage, validation = made.stages[0], made.runtime.data.validation
        own = stage.federation
        every = [*own.parts, own.shared, stage.partition.public, validation, *own.surrogate]
        return [np.asarray(numbers).tolist() for numbers in every]

    first = draw(0)
    assert all(first)
    assert draw(0, others=1) == first
    assert all(map(operator.ne, draw(1), first))


def test_partition_file_counts_surrogate_examples(tmp_path):
    """The partition.npz of a run with surrogate and public examples gives every client the same
    examples again, since its indices count all training examples. A file that gives a client a
    withheld example is rejected.
    """
    chosen = [
        "surrogate.fraction=0.2",
        "surrogate.total_shards=4",
        "num_clients=3",
        "public.fraction=0.1",
    ]
    data, (division,) = divide(build(composed("dataset=digits", "partition=iid", *chosen)))
    before, path = division.partition, tmp_path / "partition.npz"
    before.save(path, data.classes)
    from_file = ["dataset=digits", "partition=file", *chosen]
    _, (division,) = divide(build(composed(*from_file, f"partition.path={path}")))
    after = division.partition
    assert len(division.federation.unlabelled) > 200
    assert all(np.array_equal(a, b) for a, b in zip(before.parts, after.parts, strict=True))
    assert np.array_equal(before.public, after.public)
    assert np.array_equal(before.counts, after.counts)
    assert before.info["public_counts"] == after.info["public_counts"]
    parts = [part.tolist() for part in before.parts]
    withheld = int(division.federation.unlabelled[7])
    path = tmp_path / "partition.json"
    path.write_text(json.dumps([parts[0], [*parts[1], withheld], parts[2]]))
    built = build(composed(*from_file, f"partition.path={path}"))
    with pytest.raises(
        ConfigError, match=f"client 1 has example {withheld}, which is a surrogate example"
    ):
        divide(built)


def test_natural_clients_can_be_the_largest():
    owners = np.repeat([0, 1, 2, 3], [3, 6, 2, 6])
    partition = split(Natural(choice="largest"), np.zeros(17, dtype=int), 2, 0, owners)
    assert [part.tolist() for part in partition.parts] == [list(range(3, 9)), list(range(11, 17))]


@pytest.mark.parametrize("choice", ["random", "largest"])
def test_public_set_comes_from_participating_writers(choice):
    owners = np.repeat(np.arange(10), 20)
    owners[:5] = 9  # the largest writer
    labels = np.arange(200) % 4
    partition = of_task(Natural(choice=choice), labels, 3, owners, public=0.1)
    writers = {int(owners[part[0]]) for part in partition.parts}
    assert len(writers) == 3
    assert set(owners[partition.public].tolist()) <= writers
    assert len(partition.public) == int(0.1 * np.isin(owners, list(writers)).sum())
    for part in partition.parts:
        assert len(set(owners[part].tolist())) == 1
    without = of_task(Natural(choice=choice), labels, 3, owners)
    assert writers == {int(owners[part[0]]) for part in without.parts}
