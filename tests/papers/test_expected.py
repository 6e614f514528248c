"""The data that an experiment expects, compared with the data of a run."""

from fedexp_papers.cells import find_data_changes
from quick_runs import make_run
from test_compare import RUN8, table8

CIFAR = {"train": 50_000, "test": 10_000, "classes": 10, "clients": 100}


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


def test_run_on_other_data_is_reduced(tmp_path):
    make_run(tmp_path, RUN8, [0.4], data=CIFAR | {"train": 5_000})
    row = table8(tmp_path)
    assert (row["protocol"], row["verdict"]) == ("reduced", "not judged: reduced protocol")
    assert row["changes"] == "data: 5,000 training examples, not 50,000"
    make_run(tmp_path, RUN8, [0.4], data=CIFAR)
    row = table8(tmp_path)
    assert (row["protocol"], row["verdict"], row["not_shown"]) == ("full", "within", 1)
