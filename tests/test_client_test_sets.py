"""Test sets of clients, and the size of the data in a run's summary."""

import json

import numpy as np
import pytest
import torch

from fedexp.cli import main
from fedexp.config.build import build
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import Partition
from fedexp.training.checks import test_problems as overlaps_of
from fedexp.training.prepare import prepare
from quick_runs import SMALL
from toy_federation import composed


def test_clients_hold_out_the_test_set(here, capsys):
    """digits with training and test images together: each client tests on a quarter of its own."""
    merged = "dataset.train_splits=[train,test]"
    given = [*SMALL, "rounds=1", merged]
    assert main.main([*given, "hydra.run.dir=run"]) == 2
    assert "clients would also train on the test examples" in capsys.readouterr().err
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


JOINED = "dataset.train_splits=[train,test]"
DOMAINS = "scenario.domains=[{digits: {train_splits: [train,test]}}]"
POOLED, FOLDERS = ["scenario=class_incremental", JOINED], ["dataset=image_folder", JOINED]


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["scenario=domain_incremental", "scenario.split=null", DOMAINS], [JOINED]),
        (["scenario=domain_incremental", "scenario.domains=[digits]"], ["scenario.domains"]),
        (["scenario=domain_incremental", "scenario.domains=[digits]", "scenario.split=null"], []),
        # the validation set is drawn from training and test examples, some of which are equal
        ([*POOLED, "validation.fraction=0.1"], [JOINED]),
        ([*POOLED, "scenario.split=null", "validation.fraction=0.1"], []),
        (FOLDERS, [JOINED]),
        ([*FOLDERS, "dataset.test_splits=[val]"], []),
    ],
)
def test_overlap_of_training_and_test_examples_is_rejected(overrides, options):
    """options: those that the messages name."""
    problems = overlaps_of(build(composed(*overrides)))
    assert [each.split(":")[0] for each in problems] == options


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
