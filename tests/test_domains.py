"""Data sets of several domains: reading, the partition by domain, and measures by domain."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedexp
from fedexp.config.build import build
from fedexp.core.errors import ConfigError
from fedexp.data.domains import DomainFolder, Domains
from fedexp.data.held_out import Validation
from fedexp.data.partition_lda import LDA
from fedexp.metrics.domains import ByDomain
from fedexp.metrics.record import Record
from fedexp.rundir.reader import RunDirectory
from fedexp.testing import ENGINES, record
from fedexp.training.division import divide
from quick_runs import SMALL
from test_mapped import domains as domainnet  # noqa: F401  a fixture
from test_personal_test import answers
from toy_federation import NOISE, Noise, composed, make_simulation, play

COUNTS = {"art": 10, "photo": 15, "sketch": 20}  # images of each of three classes
RUN = [each for each in SMALL if not each.startswith("num_clients")]
FOLDER = ["dataset=domain_folder", "dataset.root=pacs"]
GIVEN = [*FOLDER, "partition=domains", "num_clients=6", "min_size=2"]


@pytest.fixture
def pacs(here):
    """Three domains with three classes; the grey level of an image is its domain and class."""
    for domain, (name, many) in enumerate(COUNTS.items()):
        for label, each in enumerate(("dog", "elephant", "guitar")):
            folder = here / "pacs" / name / each
            folder.mkdir(parents=True)
            for i in range(many):
                pixels = np.full((8, 8, 3), 100 * domain + 20 * label, np.uint8)
                pixels[0, 0] = i
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return here / "pacs"


# --- reading


@pytest.mark.parametrize("named", [[], ["dataset.domains=[sketch,art]"]])
def test_examples_have_their_domains(pacs, named):
    """A fifth of each class of each domain is the test set."""
    data = build(composed(*FOLDER, *named)).dataset.load()
    names = ("sketch", "art") if named else ("art", "photo", "sketch")
    assert data.domains == names
    assert data.classes == ("dog", "elephant", "guitar")
    parts = {
        "train": (data.x_train, data.y_train, data.train_domains, 0.8),
        "test": (data.x_test, data.y_test, data.test_domains, 0.2),
    }
    for x, y, found, share in parts.values():
        for domain, name in enumerate(names):
            for label in range(3):
                chosen = (found == domain) & (y.numpy() == label)
                assert chosen.sum() == share * COUNTS[name]
                level = 100 * [*COUNTS].index(name) + 20 * label
                assert (x[torch.from_numpy(chosen)][:, 4, 4] == level).all()
    again = build(composed(*FOLDER, *named)).dataset.load()  # from the cache
    assert again.checksum == data.checksum
    assert (again.train_domains == data.train_domains).all()


def test_wrong_folders_are_named(pacs):
    (pacs / "photo" / "dog").rename(pacs / "photo" / "wolf")
    with pytest.raises(ConfigError, match=r"art and photo must have the same classes.* dog, wolf"):
        build(composed(*FOLDER)).dataset.load()
    with pytest.raises(ConfigError, match=r"cartoon: must be one of art, ph.*\(nearest: 'art'\)"):
        build(composed(*FOLDER, "dataset.domains=[art,cartoon]")).dataset.load()
    with pytest.raises(ConfigError, match="has 0 folders, but each domain needs one"):
        build(composed("dataset=domain_folder", "dataset.root=none")).dataset.load()
    with pytest.raises(ConfigError, match=r"dataset\.domains=.*different names"):
        build(composed(*FOLDER, "dataset.domains=[art,art]"))


def test_domains_of_domainnet_are_read_from_its_lists(domainnet):  # noqa: F811
    """Domain d has 2 + d training images and one test image of each of two classes."""
    options = ["dataset=domainnet_domains", "dataset.size=8", f"data_dir='{domainnet}'"]
    data = build(composed(*options, "dataset.domains=[real,clipart]")).dataset.load()
    assert data.domains == ("real", "clipart")
    assert data.train_domains.tolist() == [0] * 6 + [1] * 4
    assert data.test_domains.tolist() == [0, 0, 1, 1]
    assert data.x_train[:, 4, 4, 0].tolist() == [50] * 6 + [0] * 4
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


# --- the partition


def domains(alpha=0.5, clients=None):
    return Domains(alpha=alpha, min_size=2, balance=True, max_draws=1000, clients=clients)


@pytest.mark.parametrize("clients", [None, (1, 2, 6)])
def test_each_client_has_one_domain_divided_as_by_lda(clients):
    rng = np.random.default_rng(0)
    labels, owners = rng.integers(0, 4, 300), rng.integers(0, 3, 300)
    dealt = domains(clients=clients).deal(labels, 9, np.random.default_rng(5), owners)
    each = clients or (3, 3, 3)
    assert dealt.info["domains"] == [0] * each[0] + [1] * each[1] + [2] * each[2]
    assert sorted(np.concatenate(dealt.parts)) == list(range(300))
    for part, domain in zip(dealt.parts, dealt.info["domains"], strict=True):
        assert (owners[part] == domain).all()
    lda = LDA(alpha=0.5, min_size=2, balance=True, max_draws=1000)
    first = np.flatnonzero(owners == 0)
    alone = lda.deal(labels[first], each[0], np.random.default_rng(5), num_classes=4)
    for part, own in zip(dealt.parts, alone.parts, strict=False):
        assert part.tolist() == first[own].tolist()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*GIVEN, "num_clients=7"], "num_clients=7: must be a multiple of the 3 domains, or set"),
        ([*GIVEN, "partition.clients=[2,2]"], "partition.clients=[2, 2]: must be 3 numbers"),
        ([*GIVEN, "partition.clients=[2,2,1]"], "with the sum num_clients=6"),
        ([*GIVEN, "partition.clients=[2,4,0]"], "must be a non-empty list of positive integers"),
        ([*GIVEN, "min_size=20"], "min_size=20: must be at most"),
        (["partition=domains"], "this data set has no domains; use dataset=domain_folder"),
    ],
)
def test_impossible_partitions_are_named(pacs, overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        divide(build(composed(*overrides)))


# --- the measures


def test_measures_of_domains_equal_hand_calculation():
    """The example of docs/metrics.md. The initial model (1.0) does not count for forgetting, and
    the third domain has no test examples."""
    history = Record(np.ones((2, 4)), domains=Record(np.ones((2, 3))))
    for number, row in enumerate([[1.0, 1.0, np.nan], [0.8, 0.2, np.nan], [0.5, 0.4, np.nan]]):
        history.add(number, np.zeros(4))
        history.domains.add(number, np.array(row))
    expected = {
        "domain_accuracy": 0.45,
        "domain_accuracy_worst": 0.4,
        "domain_forgetting": 0.05,
        "domain_round_forgetting": 0.15,
    }
    assert ByDomain().round_values(history) == pytest.approx(expected)
    assert ByDomain().summary(history) == pytest.approx(expected)
    # round 3: (0.1 + 0.4) / 2 = 0.25; the mean over the rounds 2 and 3 is 0.2
    history.add(3, np.zeros(4))
    history.domains.add(3, np.array([0.4, 0.0, np.nan]))
    assert ByDomain().round_values(history)["domain_round_forgetting"] == pytest.approx(0.25)
    assert ByDomain().summary(history)["domain_round_forgetting"] == pytest.approx(0.2)
    first = ByDomain().round_values(history.upto(1))
    assert first["domain_accuracy"] == pytest.approx(0.5)
    assert np.isnan(first["domain_forgetting"])


class TwoDomains(Noise):
    """Noise whose even images are of domain `a`, and the others of domain `b`."""

    has_domains = True

    def read(self):
        made = super().read()
        numbers = {f"{k}_domains": np.arange(len(made[f"y_{k}"])) % 2 for k in ("train", "test")}
        return made | numbers | {"domains": np.array(["a", "b"])}


def of_domains(**changes):
    return make_simulation(dataset=TwoDomains(**NOISE), **changes)


def slow_accuracies(simulation, model):
    """Return the accuracy on the domain of every second test image, one image at a time."""
    labels, found = answers(simulation, model)
    return [float((labels == found)[d::2].mean()) for d in (0, 1)]


@pytest.mark.parametrize("engine", ENGINES)
def test_accuracies_on_domains_equal_slow_loop(engine):
    simulation = replace(of_domains(), engine=ENGINES[engine])
    for rounds in (1, 2):
        state = play(simulation, rounds)
        found = state.records["plain"].domains
        slow = slow_accuracies(simulation, state.server["params"])
        np.testing.assert_allclose(found.class_accuracy[-1], slow, rtol=0, atol=1e-12)
    assert found.rounds == (1, 2)
    parts = simulation.stages[0].federation.parts
    assert found.counts.tolist() == [[int((p % 2 == d).sum()) for d in (0, 1)] for p in parts]


def test_held_out_examples_keep_their_domains():
    """Both the test set and the validation set of the clients are training examples."""
    held_out = Validation(fraction=0.25, per_client=True)
    simulation = of_domains(
        sizes=(8, 8, 8, 8), test_per_client=0.25, validation=held_out, evaluate_on="both"
    )
    data = simulation.runtime.data
    assert data.test_domains.tolist() == (simulation.stages[0].partition.test % 2).tolist()
    validated = simulation.runtime.tested_on("validation").data
    assert validated.test_domains.tolist() == (data.validation % 2).tolist()
    records = play(simulation, 1).records
    for view, each in records.items():
        many = np.bincount(simulation.runtime.tested_on(view).data.test_domains)
        weighted = (each.domains.class_accuracy[-1] * many).sum() / many.sum()
        assert weighted == pytest.approx(each.accuracy[-1], abs=1e-12)


def test_resumed_run_has_the_same_domain_accuracies(tmp_path):
    whole = record(of_domains(rounds=4, eval_interval=2), tmp_path / "whole")
    record(of_domains(rounds=2, eval_interval=2), tmp_path / "parts")
    resumed = record(of_domains(rounds=4, eval_interval=2), tmp_path / "parts", resume=True)
    expected, found = (vars(each.records["plain"].domains) for each in (whole, resumed))
    np.testing.assert_equal(found, expected)
    assert len(found["class_accuracy"]) == 3
    texts = [(tmp_path / p / "domain_accuracy.csv").read_text() for p in ("whole", "parts")]
    assert texts[0] == texts[1]


def test_run_by_domain_writes_table_and_heat_map(here, pacs):
    """From a folder with three domains; F by domain follows from the table."""
    options = [*RUN, *GIVEN, "rounds=3", "figures=true", "test_per_client=0.25", "evaluate=own"]
    run = fedexp.run(options, directory=here / "run")
    table = pd.read_csv(here / "run" / "domain_accuracy.csv")
    wide = table.pivot(index="round", columns="domain", values="accuracy")
    assert wide.shape == (4, 3)
    drops = wide.loc[1:2].max() - wide.loc[3]
    assert run.summary["domain_forgetting"] == pytest.approx(drops.mean(), abs=1e-12)
    assert run.summary["domain_accuracy"] == pytest.approx(wide.loc[3].mean(), abs=1e-12)
    assert run.summary["domain_accuracy_worst"] == wide.loc[3].min()
    assert (here / "run" / "figures" / "domain_accuracy.png").exists()
    directory = RunDirectory(here / "run")
    assert directory.domain_names == ["art", "photo", "sketch"]
    restored = directory.record().domains
    np.testing.assert_equal(restored.matrix, wide.to_numpy())
    # each client's own test is of its domain, which its two clients together cover
    own = pd.read_csv(here / "run" / "own_accuracy.csv")
    own = own[own["round"] == 3].set_index("client")
    right = (own["global"] * own["examples"]).groupby(own.index // 2).sum()
    many = own["examples"].groupby(own.index // 2).sum()
    np.testing.assert_allclose(right / many, wide.loc[3], atol=1e-12)


def test_scenario_with_the_partition_by_domain_is_refused(pacs):
    with pytest.raises(ConfigError, match="partition=domains can only be used with scenario=none"):
        fedexp.run([*RUN, *GIVEN, "scenario=class_incremental"])


def test_tasks_of_classes_with_a_validation_set_train(pacs):
    """The tasks have the examples in another order than the domains of the data set."""
    options = ["scenario=class_incremental", "scenario.num_tasks=3", "scenario.split=[0.8,0,0.2]"]
    options += ["validation.fraction=0.2", "evaluate_on=both", "rounds=3", "partition=iid"]
    options += ["num_clients=2", "scenario.rounds_per_task=1", "dataset.test_fraction=0.5"]
    given = [each for each in RUN if not each.startswith("min_size")]
    run = fedexp.run([*given, *FOLDER, *options])
    assert run.summary["rounds"] == 3
    data = divide(build(composed(*FOLDER, *options)))[0]
    assert (data.domains, data.train_domains, data.test_domains) == ((), None, None)


def test_folder_without_test_fraction_is_refused(pacs):
    with pytest.raises(ConfigError, match=r"dataset\.test_fraction=None: must be a number below 1"):
        build(composed(*FOLDER, "dataset.test_fraction=null")).dataset.load()
    assert DomainFolder.has_domains
