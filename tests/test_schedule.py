"""Changes of the clients' data within a run: their values, their rounds, and resume."""

import json

import numpy as np
import pytest

from fedexp.cli import main
from fedexp.config.build import build
from fedexp.core.errors import ConfigError
from fedexp.data.changes import DataSchedule, NewPartition, NewShares, reduce_classes
from fedexp.data.partition import IID, Sharding
from fedexp.data.partition_lda import LDA
from fedexp.data.partitioned import Partition
from fedexp.metrics.forgetting_metric import InOutLocal
from fedexp.rundir.reader import RunDirectory
from quick_runs import SMALL
from toy_federation import LARGER, Ragged, composed, make_simulation, play

LABELS = np.array([0] * 10 + [1] * 5 + [0] * 3)
# client 1 holds class 0 alone
TWO = Partition.build([np.arange(15), np.arange(15, 18)], LABELS, 3, {})


def schedule(partition=(), classes=(), clients=None):
    return DataSchedule(
        partition=[NewPartition(round=n, partition=p) for n, p in partition],
        classes=[NewShares(round=n, shares=s) for n, s in classes],
        clients=clients,
    )


# --- what a change is


def test_examples_kept_of_a_reduced_class_equal_hand_calculation():
    """Client 0 has ten examples of class 0 and five of class 1: shares 0.25 and 0.5 keep floor(3.0)
    = 3 and floor(3.0) = 3; client 1 keeps floor(0.25 * 3 + 0.5) = 1 of its three."""
    found = reduce_classes(TWO, {0: 0.25, 1: 0.5}, None, LABELS, 3, seed=1)
    assert found.counts.tolist() == [[3, 3, 0], [1, 0, 0]]
    assert set(found.parts[0]) < set(TWO.parts[0])
    own = reduce_classes(TWO, {0: 0.25}, [0], LABELS, 3, seed=1)
    assert own.counts.tolist() == [[3, 5, 0], [3, 0, 0]]
    with pytest.raises(ConfigError, match="distinct client numbers"):  # it would be reduced twice
        schedule(classes=[(2, {0: 0.25})], clients=[0, 0])


def test_smaller_share_keeps_subset_of_larger_share():
    def kept(share, seed=1):
        return set(reduce_classes(TWO, {0: share}, [0], LABELS, 3, seed).parts[0])

    assert set(TWO.parts[0]) == kept(1) > kept(0.7) > kept(0.2) > kept(0) == set(range(10, 15))
    assert kept(0.2) != kept(0.2, seed=2)


@pytest.mark.parametrize(
    ("shares", "clients", "message"),
    [
        ({3: 0.5}, None, "schedule.classes=3: must be classes from 0 to 2"),
        ({0: 0.5}, [2], "schedule.clients=.2.: must be clients from 0 to 1"),
        ({0: 0.0}, None, "client 1 would have no examples left"),
    ],
)
def test_impossible_shares_are_rejected(shares, clients, message):
    with pytest.raises(ConfigError, match=message):
        reduce_classes(TWO, shares, clients, LABELS, 3, seed=1)


def test_latest_change_applies():
    """A share applies until the next one of its class, a partition until the next partition."""
    first, second = IID(), Sharding(shards_per_client=2)
    found = schedule([(9, second), (3, first)], [(5, {1: 0.5}), (7, {2: 0.1}), (9, {1: 0.2})])
    assert found.rounds == [3, 5, 7, 9]
    assert [found.shares_at(n) for n in (4, 5, 8, 20)] == [
        {},
        {1: 0.5},
        {1: 0.5, 2: 0.1},
        {1: 0.2, 2: 0.1},
    ]
    assert found.partition_at(2) is None
    assert [found.partition_at(n).partition for n in (3, 8, 9)] == [first, first, second]


# --- in a simulation


def test_stages_follow_schedule():
    """Clients have 1, 3, 7, 12 and 10 examples in round 1, equal numbers in round 2, and none of
    class 0 in round 3."""
    simulation = make_simulation(
        schedule=schedule([(2, IID())], [(3, {0: 0.0})]), public=0.1, rounds=4, sizes=LARGER
    )
    sizes = [[len(part) for part in simulation.stage_of(n).federation.parts] for n in (1, 2, 3, 4)]
    assert sorted(sizes[0]) == [1, 3, 7, 10, 12]
    assert sizes[1] == [7] * 5  # 40 examples, four of them public, floor(36 / 5) each
    assert sizes[2] == sizes[3]
    assert sum(sizes[2]) < 35
    for number in (1, 2, 3):
        stage = simulation.stage_of(number)
        held = np.concatenate([*stage.federation.parts, stage.partition.public])
        assert len(set(held)) == len(held)
        np.testing.assert_array_equal(stage.partition.public, simulation.stages[0].partition.public)
    assert (simulation.stage_of(3).federation.counts[:, 0] == 0).all()
    assert simulation.stage_of(3).federation.weights.tolist() == sizes[2]
    play(simulation, 3)


def test_metrics_use_data_of_the_round():
    """Round 2 has other counts than round 1."""
    simulation = make_simulation(
        schedule=schedule([(2, Ragged(sizes=(8,) * 5))]), forgetting_metric=InOutLocal()
    )
    found = simulation.initial_state().record
    np.testing.assert_array_equal(found.counts_in(1), simulation.stages[0].federation.counts)
    assert found.counts_in(2).sum(1).tolist() == found.counts_in(9).sum(1).tolist() == [8] * 5
    np.testing.assert_array_equal(found.counts_until(2), found.counts_in(2))
    np.testing.assert_array_equal(found.counts_until(0), found.counts_in(1))


# --- what a user writes


def test_schedule_options_become_partitions():
    written = [
        "schedule.partition={101:{name:dirichlet,alpha:0.3},11:iid}",
        "schedule.classes={50:{3:0.1,4:0}}",
    ]
    built = build(composed(*written, "schedule.clients=[2]"))
    lda = LDA(alpha=0.3, min_size=10, balance=True, max_draws=10000)
    assert built.schedule == schedule([(11, IID()), (101, lda)], [(50, {3: 0.1, 4: 0.0})], [2])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "schedule.partition={1:iid}",
            "schedule.partition: 1 must be a round number of at least 2",
        ),
        (
            "schedule.partition={5:{alpha:1}}",
            "schedule.partition.5={'alpha': 1}: must be the name of a partition",
        ),
        (
            "schedule.partition={5:{name:lda,alfa:1}}",
            "schedule.partition.5.alfa: lda has no such key (nearest: 'alpha')",
        ),
        (
            "schedule.classes={5:0.1}",
            "schedule.classes.5=0.1: must give a fraction for each class, such as {3: 0.1}",
        ),
        (
            "schedule.classes={5:{cat:1}}",
            "schedule.classes.5: cat is not a class; classes are numbered 0, 1, ...",
        ),
    ],
)
def test_invalid_schedule_is_rejected(override, message):
    with pytest.raises(ConfigError) as error:
        build(composed(override))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_schedule_conflicts_are_rejected(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fedexp"])
    for overrides, message in (
        (
            ["schedule.partition={31:iid}"],
            "schedule.partition: a change is scheduled for round 31, but the run has only 30",
        ),
        (
            ["schedule.classes={5:{3:0.1}}", "scenario=class_incremental"],
            "schedule: can only be used with scenario=none",
        ),
        (
            ["schedule.partition={5:iid}", "partition=file", "partition.path=x.npz"],
            "partition=iid, dirichlet,",
        ),
        (
            ["schedule.partition={5:iid}", "validation.fraction=0.1", "validation.per_client=true"],
            "per_client=false",
        ),
    ):
        assert main.main([*overrides, "tracker=none"]) == 2
        assert message in capsys.readouterr().err


# --- in a run


def test_files_of_a_run_show_its_schedule(here):
    small = [option for option in SMALL if not option.startswith("min_size")]  # lda's alone
    small += ["num_clients=4", "partition=iid", "forgetting_metric=in_out_local"]
    small += ["schedule.partition={2:{name:lda,alpha:0.1}}", "schedule.classes={3:{0:0.5}}"]
    assert main.main([*small, "rounds=4", "hydra.run.dir=whole"]) == 0
    assert (here / "whole" / "partition_from_round3.npz").exists()
    summary = json.loads((here / "whole" / "summary.json").read_text())
    assert [(each["round"], each["scheme"]) for each in summary["schedule"]] == [
        (2, "LDA"),
        (3, "LDA"),
    ]
    assert summary["schedule"][1]["shares"] == {"0": 0.5}
    log = (here / "whole" / "run.log").read_text()
    assert "schedule: from round 2 on: 4 clients" in log
    assert "share kept: 0.5 of class 0" in log
    history = RunDirectory(here / "whole").record()
    assert history.starts == (1, 2, 3)
    np.testing.assert_array_equal(
        history.counts[2, :, 0], np.floor(history.counts[1, :, 0] / 2 + 0.5)
    )
