"""The data that an experiment expects, compared with the data of a run."""

import json

import numpy as np
import pytest
import torch
import yaml

from fedexp.cli import main
from fedexp.config.build import build
from fedexp.config.options import list_options
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import Partition
from fedexp.papers.cells import EXPECTED, find_data_changes
from fedexp.training.prepare import prepare
from quick_runs import FEDERATION
from test_compare import RUN8, make_run, table8
from toy_federation import CONFS, composed, conf_file

CIFAR = {"train": 50_000, "test": 10_000, "classes": 10, "clients": 100}


def expected(name):
    """The numbers that an experiment expects."""
    text = conf_file(f"experiment/{name}").read_text(encoding="utf-8")
    return yaml.safe_load(text)["expected"]


@pytest.mark.parametrize("name", list_options("experiment", CONFS))
def test_each_experiment_states_its_data(name):
    numbers = expected(name)
    assert list(numbers) == list(EXPECTED)
    path = conf_file(f"experiment/{name}")
    texts = [each.read_text() for each in (path, path.with_name("_protocol.yaml")) if each.exists()]
    assert f"num_clients: {numbers['clients']}\n" in "".join(texts)
    assert numbers["classes"] is not None


def test_data_changes_are_listed():
    here = {"expected": CIFAR, "num_clients": 100}
    assert find_data_changes(here, {"data": CIFAR}) == []
    assert find_data_changes(here, {}) == []  # an old summary
    # rounding: less than one in a thousand
    assert find_data_changes(here, {"data": CIFAR | {"train": 49_960}}) == []
    assert find_data_changes(here, {"data": CIFAR | {"train": 5_000, "classes": 9}}) == [
        "data: 5,000 training examples, not 50,000",
        "data: 9 classes, not 10",
    ]
    fewer = {"data": CIFAR | {"clients": 20}}
    assert find_data_changes(here | {"num_clients": 20}, fewer) == []
    assert find_data_changes(here, fewer) == ["data: 20 clients, not 100"]
    assert find_data_changes(here, {"data": CIFAR | {"clients": 1}}) == []  # centralised
    assert find_data_changes({}, {"data": CIFAR}) == []


def test_test_sets_of_clients_may_be_rounded():
    """Each client's test set is rounded up, so 100 clients have up to 100 more test examples."""
    wanted = {"train": 45_000, "test": 15_000, "classes": 10, "clients": 10}
    config = {"expected": wanted, "num_clients": 100, "test_per_client": 0.25}
    data = wanted | {"train": 44_950, "test": 15_050, "clients": 100}
    assert find_data_changes(config, {"data": data}) == []
    assert find_data_changes(config | {"test_per_client": 0.0}, {"data": data}) != []
    assert find_data_changes(config, {"data": data | {"test": 15_200}}) != []


def test_thucnews_titles_differ_from_the_paper():
    bundled = {"train": 9_000, "test": 9_000, "classes": 9, "clients": 100}
    config = {"expected": expected("cfed/text_class"), "num_clients": 100}
    assert find_data_changes(config, {"data": bundled}) == [
        "data: 9,000 training examples, not 502,180",
        "data: 9,000 test examples, not 143,480",
    ]


def test_run_on_other_data_is_reduced(tmp_path):
    make_run(tmp_path, RUN8, [0.4], data=CIFAR | {"train": 5_000})
    row = table8(tmp_path)
    assert (row["protocol"], row["verdict"]) == ("reduced", "not judged: reduced protocol")
    assert row["changes"] == "data: 5,000 training examples, not 50,000"
    make_run(tmp_path, RUN8, [0.4], data=CIFAR)
    row = table8(tmp_path)
    assert (row["protocol"], row["verdict"], row["not_shown"]) == ("full", "within", 1)


def test_summary_has_the_size_of_the_data(here):
    """digits: 1,437 + 360 images of ten classes."""
    assert main.main([*FEDERATION, "rounds=1", "hydra.run.dir=run"]) == 0
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert summary["data"] == {"train": 1437, "test": 360, "classes": 10, "clients": 8}


def test_clients_hold_out_the_test_set(here, capsys):
    """digits with training and test images together: each client tests on a quarter of its own."""
    merged = "dataset.train_splits=[train,test]"
    given = [*FEDERATION, "rounds=1", merged]
    assert main.main([*given, "hydra.run.dir=run"]) == 2
    assert "clients would also train on the test images" in capsys.readouterr().err
    given.append("test_per_client=0.25")
    assert main.main([*given, "hydra.run.dir=run"]) == 0
    partition = Partition.load(here / "run" / "partition.npz")
    summary = json.loads((here / "run" / "summary.json").read_text())
    held = len(partition.test)
    assert summary["data"] == {"train": 1797 - held, "test": held, "classes": 10, "clients": 8}
    assert 1797 / 4 <= held < 1797 / 4 + 8  # a quarter of each client's, rounded up
    numbers = np.concatenate([*partition.parts, partition.test])
    assert sorted(numbers) == list(range(1797))
    data = build(composed(*given)).dataset.load()
    assert torch.equal(data.x_train[-360:], data.x_test)
    assert torch.equal(data.y_train[-360:], data.y_test)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scenario=class_incremental"], "test_per_client=0.25: can only be used with scenario"),
        (["schedule.partition={2:{name:iid}}"], "cannot be used with schedule.partition"),
    ],
)
def test_test_set_of_clients_is_rejected(overrides, message):
    with pytest.raises(ConfigError, match=message):
        prepare(build(composed("tracker=none", "test_per_client=0.25", *overrides)))
