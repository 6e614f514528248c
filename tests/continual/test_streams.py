"""Tasks with blurred boundaries, and clients that learn the tasks in different orders."""

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from continual_rows import STREAM

from fedexp.algorithms.feddmc import FedDMC
from fedexp.algorithms.fedlwf import FedLwF
from fedexp.algorithms.fedmultihead import FedMultiHead
from fedexp.config.build import build
from fedexp.core.errors import ConfigError
from fedexp.data.types import Task
from fedexp.metrics.tasks import TaskHistory
from fedexp.training.division import divide
from fedexp_continual.algorithms.target import TARGET
from fedexp_continual.data.streams import blur_tasks, draw_orders
from toy_federation import composed, make_simulation, play, play_round

TASKS = [Task(f"task {t}", (t,), np.arange(20 * t, 20 * t + 20)) for t in range(3)]


def test_blur_moves_a_share_of_each_task_to_other_tasks():
    """With a share of 0.3, six of 20 examples leave each task, three to each other task. Sizes stay
    equal, and no example is lost or duplicated."""
    found = blur_tasks(TASKS, 0.3, np.random.default_rng(0))
    assert [(task.name, task.classes) for task in found] == [
        (task.name, task.classes) for task in TASKS
    ]
    for number, task in enumerate(found):
        assert Counter((task.train // 20).tolist()) == {
            t: 14 if t == number else 3 for t in range(3)
        }
        assert (np.diff(task.train) > 0).all()
    assert sorted(np.concatenate([task.train for task in found])) == list(range(60))


def test_task_orders_are_balanced():
    """With eight clients and three tasks, two or three clients learn each task at every stage."""
    orders = draw_orders(8, 3, np.random.default_rng(1))
    assert all(sorted(order) == [0, 1, 2] for order in orders.tolist())
    assert all(sorted(np.bincount(stage)) == [2, 3, 3] for stage in orders.T)
    assert len(np.unique(orders, axis=0)) > 3


def test_task_metrics_with_client_task_orders_equal_hand_calculation():
    """Accuracies after stages 1 and 2: (0.9, 0.1), (0.5, 0.8). Client 0 learns task 1 first and
    forgets 0.9 - 0.5 = 0.4; client 1 learns task 2 first: 0.1 - 0.8 = -0.7. New tasks: 0.9 and 0.1,
    then 0.8 and 0.5."""
    rows = [(0, [0.2, 0.2]), (1, [0.9, 0.1]), (2, [0.5, 0.8])]
    summary = TaskHistory.of(rows, 1, np.array([[0, 1], [1, 0]])).summary()
    assert summary["task_forgetting"] == pytest.approx((0.4 - 0.7) / 2)
    assert summary["average_accuracy"] == pytest.approx(0.65)
    assert [end["average_accuracy"] for end in summary["tasks"]] == pytest.approx([0.5, 0.65])
    assert [end["new_task_accuracy"] for end in summary["tasks"]] == pytest.approx([0.5, 0.65])
    assert summary["task_orders"] == [[1, 2], [2, 1]]
    shared = TaskHistory.of(rows, 1).summary()
    assert "task_orders" not in shared
    alike = TaskHistory.of(rows, 1, np.array([[0, 1]] * 4)).summary()
    assert {k: v for k, v in alike.items() if k != "task_orders"} == shared


@functools.cache
def stages(*overrides):
    given = (
        "scenario=class_stream",
        "partition=lda",
        "alpha=5",
        "num_clients=5",
        "rounds=1",
        *overrides,
    )
    return divide(build(composed(*given)))[1]


def test_clients_train_on_the_same_examples_in_different_orders():
    shared, own = stages(), stages("scenario.order=per_client")
    orders = []
    for client in range(5):
        tasks = [part.federation.parts[client].tolist() for part in shared]
        orders.append([tasks.index(part.federation.parts[client].tolist()) for part in own])
        for part in own:
            assert part.partition.counts[client].sum() == len(part.federation.parts[client])
            assert part.federation.counts[client].tolist() == part.partition.counts[client].tolist()
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    again = stages("scenario.order=per_client")
    assert [part.partition.hash for part in again] == [part.partition.hash for part in own]
    other = stages("scenario.order=per_client", "seed=1")
    assert [part.partition.hash for part in other] != [part.partition.hash for part in own]


@pytest.mark.parametrize("per_client", ["true", "false"])
def test_validation_example_counts_for_its_original_task(per_client):
    """The test examples of a task have only its classes, and so must the validation examples; a
    fifth of the training examples was moved to other tasks."""
    lines = (
        "scenario=class_stream",
        "partition=lda",
        "alpha=5",
        "num_clients=5",
        "rounds=1",
        "scenario.blur=0.2",
    )
    held_out = "validation.fraction=0.2", f"validation.per_client={per_client}"
    data, parts = divide(build(composed(*lines, *held_out)))
    task = np.repeat([0, 1, 2], [3, 3, 4])  # of each class
    of_validation, of_test = task[data.y_train[data.validation]], task[data.y_test]
    assert data.validation_tasks.tolist() == of_validation.tolist()
    assert data.test_tasks.tolist() == of_test.tolist()
    stage = np.repeat([0, 1, 2], [len(part.partition.validation) for part in parts])
    assert 0.1 < (stage != of_validation).mean() < 0.3


DMC = FedDMC(
    targets="split",
    student="initial",
    new_model="old",
    epochs_factor=1,
    rate_factor=1.0,
    whole_set=False,
)


@pytest.mark.parametrize("changed", [{"blur": 0.1}, {"order": "per_client"}])
@pytest.mark.parametrize("algorithm", [DMC, FedMultiHead()], ids=["FedDMC", "FedMultiHead"])
def test_methods_for_separate_tasks_reject_mixed_tasks(algorithm, changed):
    (option,) = changed
    with pytest.raises(ConfigError, match=rf"scenario\.{option}=.*one task at a time"):
        make_simulation(algorithm, scenario=replace(STREAM, **changed), surrogate=0.2)


def test_methods_for_separate_tasks_reject_replay_buffer():
    """The loss of an old example is infinite under FedMultiHead's current head and 1e30 under
    TARGET's, which is finite, so that a run would continue. FedLwF
    trains on a buffer."""
    made = dict(batches=2, batch_size=4, steps=3, width=3, lr_generator=0.05, temperature=2.0)
    target = TARGET(kd=5.0, **made)
    given = dict(scenario=replace(STREAM, replay=3), participation=1.0, rounds=2)
    for algorithm in (DMC, FedMultiHead(), target):
        with pytest.raises(ConfigError, match=r"scenario\.replay=3: .*one task at a time"):
            make_simulation(algorithm, surrogate=0.2, **given)
    simulation = make_simulation(FedLwF(lambda_d=0.1, temperature=2.0), **given)
    assert 0 < play_round(simulation, play(simulation, 3)).train_loss < 10
