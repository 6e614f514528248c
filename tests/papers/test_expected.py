"""The data that an experiment expects, compared with the data of a run."""

import pytest
import yaml

from fedexp.config.options import list_options
from fedexp_papers.cells import EXPECTED, find_data_changes
from quick_runs import make_run
from test_compare import RUN8, table8
from toy_federation import CONFS, conf_file

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
