"""Options whose history is restored: a resumed run equals an uninterrupted one."""

import csv
import dataclasses

import numpy as np
import pytest

from fedexp.algorithms.fedrod import FedRoD
from fedexp.algorithms.server_optimizers import ServerOptimizer
from fedexp.config.overrides import with_new_folder, with_new_paths
from fedexp.config.settings import LocalEvaluation
from fedexp.core.errors import ConfigError
from fedexp.data.held_out import Validation
from fedexp.data.partition import IID
from fedexp.metrics.forgetting_metric import ForgettingEvents, InOutLocal
from fedexp.rundir import checkpoint, files
from fedexp.testing import assert_equal, record
from fedexp.training.folder import check_partitions
from test_schedule import schedule
from toy_federation import ALL, LOCAL, make_simulation

OPTIONS = {
    "optimizers": {"local": dataclasses.replace(LOCAL, keep_optimizer=True)},
    "local models in some rounds": {
        "local_evaluation": LocalEvaluation(every=2),
        "eval_interval": 2,
        "forgetting_metric": ALL,
        "test_views": ["plain", "augmented"],
    },
    "personal models": {
        "algorithm": FedRoD(gamma=1.0),
        "evaluate": ["global", "personal"],
        "test_views": ["plain", "augmented"],
        "validation": Validation(fraction=0.25, per_client=True),
        "evaluate_on": "both",
    },
    "own tests": {
        "algorithm": FedRoD(gamma=1.0),
        "evaluate": ["global", "own"],
        "test_per_client": 0.25,
        "sizes": (5, 6, 7, 8, 9),
        "eval_interval": 2,
    },
    "schedule": {
        "schedule": schedule([(2, IID())], [(2, {0: 0.5})]),
        "forgetting_metric": InOutLocal(),
    },
    "single examples": {"forgetting_metric": ForgettingEvents()},
}


def content(path):
    """Return the rows of a table without times."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


@pytest.mark.parametrize("name", OPTIONS)
def test_resumed_run_equals_uninterrupted_run(name, tmp_path):
    def make(rounds):
        simulation = make_simulation(rounds=rounds, **OPTIONS[name])
        adam = ServerOptimizer(optimizer="adam", lr=0.01)
        return dataclasses.replace(simulation, server_optimizer=adam)

    whole = record(make(4), tmp_path / "whole")
    record(make(2), tmp_path / "parts")
    assert checkpoint.load(tmp_path / "parts").state["round"] == 2
    resumed = record(make(4), tmp_path / "parts", resume=True)
    assert_equal(resumed.server, whole.server)
    assert_equal(dict(resumed.clients), dict(whole.clients))
    assert resumed.records.keys() == whole.records.keys()
    for found, expected in zip(resumed.records.values(), whole.records.values(), strict=True):
        np.testing.assert_equal(vars(found), vars(expected))
    for path in (tmp_path / "whole").glob("*.csv"):
        assert content(tmp_path / "parts" / path.name) == content(path)


def test_clients_whose_examples_have_other_labels_are_refused(tmp_path):
    """Each client has the same examples, so the hash is equal, and changed data are accepted."""
    simulation = make_simulation()
    record(simulation, tmp_path)
    path, before = (
        tmp_path / files.PARTITION,
        simulation.partition_files()[files.PARTITION].partition,
    )
    classes = [str(number) for number in range(before.counts.shape[1])]
    before.save(path, classes=classes)
    check_partitions(tmp_path, simulation)
    relabelled = dataclasses.replace(before, counts=before.counts[:, ::-1])
    relabelled.save(path, classes=classes)
    with pytest.raises(ConfigError, match=r"the data have changed: .*\(partition\.npz\)"):
        check_partitions(tmp_path, simulation)


def test_only_paths_in_the_data_directory_move_with_it():
    node = {"data_dir": ".", "root": "./x", "weights": "DEFAULT", "path": "ylecun/mnist"}
    moved = {"data_dir": "/new", "root": "/new/x"}
    assert with_new_folder(node, ".", "/new") == node | moved
    paths = {"data_dir": "data", "parts": [{"root": "data/x"}, {"root": "data2/x"}]}
    moved = {"data_dir": "new", "parts": [{"root": "new/x"}, {"root": "data2/x"}]}
    assert with_new_folder(paths, "data/", "new") == moved


def test_paths_of_figures_and_trackers_stay_those_of_the_first_start():
    node = {"figures": {"style": "x"}, "tracker": {"tensorboard": {"logdir": "x"}}}
    moved = {"figures": {"style": "/place/x"}, "tracker": {"tensorboard": {"logdir": "/place/x"}}}
    assert with_new_paths(node, "/place/{}".format) == moved


def test_files_of_a_text_data_set_are_names_in_its_folder():
    """A file of this name where the run was started, such as the folder itself, is not meant."""
    node = {"root": "x", "vocabulary": "x", "vectors": "x"}
    assert with_new_paths(node, "/place/{}".format) == node | {"root": "/place/x"}
