"""Task sequences, surrogate sets, shards, continual metrics, and their options."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from fedexp.config.build import build
from fedexp.config.values import resolve
from fedexp.core.errors import ConfigError
from fedexp.core.storage import read_table
from fedexp.data.datasets import Caltech256
from fedexp.data.partition import Shards
from fedexp.data.surrogate import Surrogate, inputs_like, resize_images
from fedexp.data.tasks import ClassIncremental, DomainIncremental
from fedexp.data.types import ImageData, Task, TextData
from fedexp.metrics.tasks import TaskHistory
from fedexp.training.checks import surrogate_problems, task_problems
from fedexp.training.job import Job
from fedexp.training.prepare import prepare
from fedexp.training.run import train_run
from toy_federation import composed

SPLIT = {"split": [0.7, 0.1, 0.2], "evaluate_on": "test"}


class Loads:
    """A data set that is already in memory."""

    kind = "images"

    def __init__(self, data):
        self.data, self.name = data, data.name

    def load(self):
        return self.data


def images(name="a", train=400, test=100, classes=10, shape=(4, 4, 1), seed=0):
    """Return images that contain their index, so that examples can be identified."""
    total = train + test
    rng = np.random.default_rng(seed)
    x = np.zeros((total, *shape), np.uint8)
    x[:, 0, 0, 0], x[:, 0, 1, 0] = np.arange(total) % 256, np.arange(total) // 256
    y = rng.permutation(np.arange(total) % classes)
    x, y = torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
    names = tuple(f"c{c}" for c in range(classes))
    return ImageData(name, x[:train], y[:train], x[train:], y[train:], names, (0.5,), (0.5,))


def number(x):
    """Return the index that each image contains."""
    return (x[:, 0, 0, 0].long() + 256 * x[:, 0, 1, 0].long()).tolist()


def class_incremental(**changes):
    live = {"rounds_per_task": 2, "num_tasks": 3, "shuffle_classes": False, "classes": None}
    return ClassIncremental(**live | SPLIT | changes)


def rng():
    return np.random.default_rng(5)


# --- scenarios


def labels_of(*sources):
    """Return a dict that maps the index in each image to its label."""
    return {
        n: label
        for data in sources
        for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test))
        for n, label in zip(number(x), y.tolist(), strict=True)
    }


def test_class_incremental_tasks_have_disjoint_classes_and_splits():
    """Tasks have 3, 3 and 4 disjoint classes, each split 70/10/20 %. No example appears twice, and
    labels are kept. The parts do not depend on which of them is evaluated on."""
    data = images()
    sequence = class_incremental().sequence(Loads(data), rng())
    assert [task.classes for task in sequence.tasks] == [(0, 1, 2), (3, 4, 5), (6, 7, 8, 9)]
    out, label = sequence.data, labels_of(data)
    assert out.test_tasks.tolist() == sorted(out.test_tasks.tolist())
    assert {n: label[n] for n in labels_of(out)} == labels_of(out)
    assert len(labels_of(out)) == len(out.x_train) + len(out.x_test) == 450  # 50 of validation
    for t, task in enumerate(sequence.tasks):
        counts = np.bincount(out.y_train[task.train].numpy(), minlength=10)
        assert counts[list(task.classes)].tolist() == [35] * len(task.classes)
        tested = np.bincount(out.y_test[out.test_tasks == t].numpy(), minlength=10)
        assert tested.tolist() == [10 * (c in task.classes) for c in range(10)]
    assert np.concatenate([task.train for task in sequence.tasks]).tolist() == list(range(350))
    other = class_incremental(evaluate_on="validation").sequence(Loads(data), rng()).data
    assert torch.equal(other.x_train, out.x_train)
    assert len(labels_of(out, other)) == 500
    own = class_incremental(split=None).sequence(Loads(data), rng()).data
    assert sorted(number(own.x_train)) == sorted(number(data.x_train))
    assert sorted(number(own.x_test)) == sorted(number(data.x_test))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_tasks": 5}, [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]),
        ({"classes": [[9, 0], [4]]}, [(0, 9), (4,)]),
        ({"num_tasks": 5, "shuffle_classes": True}, None),
    ],
)
def test_classes_are_divided_among_tasks(changes, expected):
    tasks = class_incremental(**changes).sequence(Loads(images()), rng()).tasks
    found = [task.classes for task in tasks]
    if expected is not None:
        assert found == expected
    else:
        assert sorted(sum(found, ())) == list(range(10))
        assert sum(found, ()) != tuple(range(10))
        assert [*map(len, found)] == [2] * 5


def test_each_domain_is_a_task_with_the_chosen_classes():
    """One task per data set with three of the classes, numbered from 0. Each example stays in its
    domain."""
    first, second = images("a"), images("b", train=200, test=100, seed=1)
    scenario = DomainIncremental(
        rounds_per_task=1, domains=[Loads(second)], classes=[7, 2, 4], **SPLIT
    )
    sequence = scenario.sequence(Loads(first), rng())
    assert [(t.name, t.classes) for t in sequence.tasks] == [("a", (0, 1, 2)), ("b", (0, 1, 2))]
    assert sequence.data.classes == ("c7", "c2", "c4")
    for task, source in zip(sequence.tasks, (first, second), strict=True):
        label, x = labels_of(source), sequence.data.x_train[task.train]
        found = [[7, 2, 4][c] for c in sequence.data.y_train[task.train].tolist()]
        assert found == [label[n] for n in number(x)]
    assert [len(task.train) for task in sequence.tasks] == [3 * 35, 3 * 21]
    assert sequence.data.test_tasks.bincount().tolist() == [3 * 10, 3 * 6]


def test_surrogate_set_excludes_test_examples():
    """If the digits are split again, 286 of their 359 test images are training images of the
    original split."""
    lines = "scenario=class_incremental", "surrogate.dataset=digits"
    (problem,) = surrogate_problems(build(composed(*lines)))
    assert problem.startswith("surrogate.dataset=digits: scenario=class_incremental splits")
    for others in (("scenario.split=null",), ("dataset=mnist",)):
        assert not list(surrogate_problems(build(composed(*lines, *others))))
    alone = "surrogate.dataset=digits"
    assert not list(surrogate_problems(build(composed(alone))))
    joined = "+surrogate.options.train_splits=[train,test]"
    for other, why in (
        ("test_per_client=0.25", "the clients hold out the test set"),
        (joined, "it is read"),
    ):
        (problem,) = surrogate_problems(build(composed(alone, other)))
        assert problem.startswith(f"surrogate.dataset=digits: {why}")
        assert not list(surrogate_problems(build(composed(alone, other, "dataset=mnist"))))


def test_surrogate_set_with_another_split_of_the_same_data_is_refused():
    """With the seed 1, 292 of the 360 test images are training images of the split with seed 0."""
    lines = ["algorithm=cfed", "scenario=class_incremental", "scenario.split=null", "tracker=none"]
    lines += ["partition=iid", "surrogate.dataset=digits", "dataset.split_seed=1", "rounds=1"]
    with pytest.raises(ConfigError, match=r"^surrogate\.dataset=digits: 292 of the 360 test"):
        prepare(build(composed(*lines)))
    equal = "+surrogate.options.split_seed=1"
    stages = prepare(build(composed(*lines, equal))).stages
    assert len(stages[0].federation.unlabelled) == 1437


def test_class_has_same_label_in_all_domains():
    """c0 and c1 are exchanged in the second data set. Labels 2 to 9, or other names, are
    accepted."""
    first, names = images("a"), ("c1", "c0", *(f"c{c}" for c in range(2, 10)))
    given = dict(rounds_per_task=1, **SPLIT)

    def run(classes, names):
        second = replace(images("b"), classes=names)
        return DomainIncremental(domains=[Loads(second)], classes=classes, **given).sequence(
            Loads(first), rng()
        )

    with pytest.raises(ConfigError, match="b has 10 classes, but a has 5"):
        DomainIncremental(domains=[Loads(images("b"))], classes=None, **given).sequence(
            Loads(images("a", classes=5)), rng()
        )
    for classes in (None, [0, 1, 2]):
        with pytest.raises(ConfigError, match="the class c1 has the label 1 in a and 0 in b"):
            run(classes, names)
    for classes, others in (([2, 3, 9], names), (None, tuple(str(c) for c in range(10)))):
        assert len(run(classes, others).tasks) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": [0.7, 0.1, 0.1]}, "scenario.split"),
        (
            {"split": [0.8, 0.0, 0.2], "evaluate_on": "validation"},
            "greater than 0 for the validation part",
        ),
        ({"split": None, "evaluate_on": "validation"}, "must be test if scenario.split=null"),
        ({"classes": [[0, 1], [1]]}, "lists in which no class is repeated"),
        ({"num_tasks": 0}, "at least 1"),
        ({"num_tasks": 11}, "at most 10"),
        ({"classes": [[0], [12]]}, "from 0 to 9"),
    ],
)
def test_invalid_scenario_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        class_incremental(**changes).sequence(Loads(images()), rng())


# --- surrogate examples


def surrogate(**changes):
    live = {
        "dataset": None,
        "options": {},
        "fraction": 0.0,
        "classes": None,
        "examples": None,
        "shards": 2,
        "server_shards": 2,
        "total_shards": None,
    }
    return Surrogate(**live | changes)


@pytest.mark.parametrize("classes", [None, [7, 3]])
def test_withheld_examples_are_unlabelled_and_unassigned(classes):
    data = images()
    tasks = (
        Task("first", tuple(range(10)), np.arange(200)),
        Task("second", tuple(range(10)), np.arange(200, 400)),
    )
    attached, left, numbers = surrogate(fraction=0.25, classes=classes).attach(data, tasks, rng())
    allowed = torch.tensor(range(10) if classes is None else classes)
    assert len(numbers) == int(torch.isin(data.y_train, allowed).sum()) // 4 > 0
    assert torch.isin(data.y_train[numbers], allowed).all()
    assert (attached.y_train[numbers] == -1).all()
    assert torch.equal(attached.x_train, data.x_train)
    kept = np.concatenate([task.train for task in left])
    assert sorted([*kept.tolist(), *numbers.tolist()]) == list(range(400))
    assert torch.equal(attached.y_train[kept], data.y_train[kept])
    hundred = [replace(tasks[0], train=np.arange(100))]
    assert len(surrogate(fraction=0.29).attach(data, hundred, rng())[2]) == 29


@pytest.mark.parametrize("classes", [None, [5]])
@pytest.mark.parametrize("whole", [False, True])
def test_surrogate_data_set_is_appended(classes, whole):
    """whole: fedexp draws the test part of the data set, so it is used unless the run is tested on
    this data set."""
    data, other = images(), images("other", train=60, test=15, seed=3)
    loads, tasks = Loads(other), (Task("all", tuple(range(10)), np.arange(400)),)
    loads.splits_itself = whole and Caltech256.splits_itself
    attached, left, numbers = surrogate(dataset=loads, classes=classes).attach(data, tasks, rng())
    x, y = other.x_train, other.y_train
    if whole:
        x, y = torch.cat([x, other.x_test]), torch.cat([y, other.y_test])
    added = x if classes is None else x[y == 5]
    assert left == tasks
    assert numbers.tolist() == list(range(400, 400 + len(added)))
    assert torch.equal(attached.x_train, torch.cat([data.x_train, added]))
    assert attached.y_train[400:].tolist() == [-1] * len(added)
    loads.data = replace(other, name=data.name)
    assert len(surrogate(dataset=loads).attach(data, (), rng())[2]) == 60


def test_surrogate_data_set_can_be_limited_to_a_number_of_examples():
    """20 of 60 different images in ascending order. Another seed draws others."""
    data, other = images(), images("other", train=60, shape=(4, 4, 1), seed=3)
    found = []
    for seed in (0, 1):
        live = surrogate(dataset=Loads(other), examples=20)
        attached, _, numbers = live.attach(data, (), np.random.default_rng(seed))
        assert numbers.tolist() == list(range(400, 420))
        places = number(attached.x_train[400:])
        assert places == sorted(set(places))
        found.append(places)
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fraction": 0.5, "classes": [1, 1]}, "surrogate.classes=.*distinct labels, or null"),
        ({"fraction": 0.5, "classes": [10]}, "surrogate.classes=.*labels from 0 to 9"),
        (
            {"classes": [1]},
            "surrogate.classes=.*null unless surrogate.dataset or surrogate.fraction",
        ),
        ({"dataset": Loads(images()), "examples": 401}, "examples=401: must be at most 400"),
        ({"examples": 5, "fraction": 0.5}, "examples=5: must be null if surrogate.dat"),
    ],
)
def test_invalid_surrogate_sets_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        surrogate(**changes).attach(
            images(), (Task("all", tuple(range(10)), np.arange(400)),), rng()
        )


@pytest.mark.parametrize(
    ("shards", "clients", "total"), [(2, 100, None), (4, 100, None), (1, 7, 9), (40, 100, 200)]
)
def test_surrogate_shards_are_disjoint_if_possible(shards, clients, total):
    """Each client has `shards` different shards of about equal size."""
    numbers = np.arange(1000, 3305)
    dealt = surrogate(shards=shards, total_shards=total).draw_shards(numbers, clients, rng())
    pieces = total or 2 * clients
    smallest, largest = len(numbers) // pieces, -(-len(numbers) // pieces)
    assert len(dealt.clients) == clients
    for held in dealt.clients:
        assert shards * smallest <= len(set(held.tolist())) == len(held) <= shards * largest
        assert set(held.tolist()) <= set(numbers.tolist())
    everything = np.concatenate(dealt.clients)
    assert (len(set(everything.tolist())) == len(everything)) == (shards * clients <= pieces)
    assert 2 * smallest <= len(dealt.server) <= 2 * largest


def test_too_few_surrogate_examples_are_rejected():
    with pytest.raises(ConfigError, match="150 examples cannot be cut into 200 shards"):
        surrogate().draw_shards(np.arange(150), 100, rng())
    with pytest.raises(
        ConfigError, match=r"surrogate.shards=5: must be at most 4, the number of shards"
    ):
        surrogate(shards=5).draw_shards(np.arange(150), 2, rng())


def test_images_are_converted_to_other_size_and_channels():
    """Images get the size, channels and scale of the first data set. A constant colour becomes its
    luma."""
    like = replace(images(shape=(6, 6, 1)), max_value=16)
    colour = torch.tensor([255, 0, 0], dtype=torch.uint8).expand(3, 12, 12, 3)
    grey = resize_images(colour, 255, like)
    assert grey.shape == (3, 6, 6, 1)
    assert grey.unique().tolist() == [round(0.299 * 16)]
    like = images(shape=(5, 7, 3))
    spread = resize_images(torch.full((2, 5, 7, 1), 8, dtype=torch.uint8), 16, like)
    assert spread.shape == (2, 5, 7, 3)
    assert spread.unique().tolist() == [round(8 * 255 / 16)]
    step = torch.zeros(1, 8, 8, 1, dtype=torch.uint8)
    step[:, :, 4:] = 200
    halved = resize_images(step, 255, images(shape=(4, 4, 1)))[0, :, :, 0]
    # triangle filter of width 4: weights 1/8, 3/8, 3/8, 1/8
    assert halved[0].tolist() == [0, 25, 175, 200]


def test_texts_and_images_cannot_be_combined():
    """sina2019 and sogoucs are the default domains."""
    built = build(composed("scenario=domain_incremental"))
    problem = next(task_problems(built))
    assert problem.startswith(
        "scenario.domains=[sina2019,sogoucs]: all domains must contain images"
    )
    tokens, none = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    texts = TextData("t", tokens, none, tokens, none, ("a",), vocabulary=("x",))
    for pair in ((images(), texts), (texts, images())):
        with pytest.raises(ConfigError, match="cannot be used together"):
            inputs_like(*pair)


# --- partition


@pytest.mark.parametrize("sort_by_label", [False, True])
def test_equal_shards_give_clients_shards_of_equal_size(sort_by_label):
    """Each client has two shards of equal size. Sorted by label, a shard has one class."""
    labels = np.repeat(np.arange(10), 100)
    parts = Shards(shards_per_client=2, sort_by_label=sort_by_label).deal(labels, 50, rng()).parts
    assert [*map(len, parts)] == [20] * 50
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    classes = np.array([len(set(labels[part])) for part in parts])
    assert classes.max() <= 2 if sort_by_label else classes.mean() > 8


# --- metrics


def test_task_metrics_equal_hand_calculation():
    """Three tasks of two rounds. After task 1: .9; task 2: .5, .8; task 3: .3, .4, .7."""
    rows = [
        (0, [0.1, 0.1, 0.1]),
        (1, [0.6, 0, 0]),
        (2, [0.9, 0, 0]),
        (4, [0.5, 0.8, 0]),
        (5, [0.4, 0.5, 0.5]),
        (6, [0.3, 0.4, 0.7]),
    ]
    history = TaskHistory.of(rows, 2)
    assert history.matrix().tolist() == [[0.9, 0, 0], [0.5, 0.8, 0], [0.3, 0.4, 0.7]]
    summary = history.summary()
    assert summary["average_accuracy"] == pytest.approx((0.3 + 0.4 + 0.7) / 3)
    assert summary["task_forgetting"] == pytest.approx(((0.9 - 0.3) + (0.8 - 0.4)) / 2)
    ends = [(end["average_accuracy"], end["new_task_accuracy"]) for end in summary["tasks"]]
    assert ends == [pytest.approx(each) for each in ((0.9, 0.9), (0.65, 0.8), (1.4 / 3, 0.7))]
    middle = TaskHistory.of(rows[:5], 2).values()
    assert middle["task_forgetting"] == pytest.approx(((0.9 - 0.4) + (0.8 - 0.5)) / 2)
    start = TaskHistory.of(rows[:1], 2).summary()
    assert (start["average_accuracy"], start["new_task_accuracy"]) == (None, None)
    (end,) = TaskHistory.of([(2, [np.nan, 0.5])], 2).summary()["tasks"]  # no test examples
    both = {"average_accuracy": None, "new_task_accuracy": None}
    assert end == {"task": 1, **both, "accuracies": [None, 0.5]}


# --- from a configuration


def test_named_data_sets_are_resolved():
    config = composed(
        "scenario=domain_incremental",
        "scenario.domains=[mnist]",
        "surrogate.dataset=image_folder",
        "+surrogate.options.size=8",
        "data_dir=here",
    )
    values = resolve(config)
    assert values["scenario"]["domains"][0]["_target_"].endswith("TorchvisionDataset")
    assert values["scenario"]["domains"][0]["data_dir"] == "here"
    assert values["surrogate"]["dataset"]["size"] == 8
    built = build(config)
    assert [domain.name for domain in built.scenario.domains] == ["mnist"]
    assert built.surrogate.dataset.name == "image_folder"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("surrogate.dataset=mnits", "surrogate.dataset=mnits: no such data set (nearest: 'mnist')"),
        (
            "+surrogate.options.rooot=x",
            "surrogate.options.rooot: image_folder has no such key (nearest: 'root')",
        ),
    ],
)
def test_unknown_data_set_is_rejected(override, message):
    base = ["scenario=domain_incremental", "surrogate.dataset=image_folder"]
    given = [o for o in base if not override.startswith(o.split("=")[0] + "=")]
    with pytest.raises(ConfigError) as error:
        resolve(composed(*given, override))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset=thucnews"], "dataset=thucnews contains text, but the model CNN reads images"),
        (
            ["algorithm=fedewc"],
            "scenario=none: FedEWC is only defined for scenario=class_incremental",
        ),
        (
            ["dataset=thucnews", "model=textcnn", "algorithm=fedreg", "local.optimizer=sgd"],
            "FedReg is only defined for images",
        ),
        (
            ["scenario=class_incremental", "partition=file", "partition.path=x"],
            "partition=file can only be used with scenario=none",
        ),
    ],
)
def test_incompatible_options_are_rejected(overrides, message):
    with pytest.raises(ConfigError) as error:
        prepare(build(composed(*overrides)))
    assert message in str(error.value)


def test_centralized_run_has_one_client():
    """It has all examples of a task, whatever the partition."""
    built = build(composed("algorithm=lwf", "scenario=class_incremental", "surrogate.fraction=0.1"))
    simulation = prepare(built)
    sizes = [stage.federation.parts[0].size for stage in simulation.stages]
    assert simulation.settings.cohort_size == simulation.stages[0].federation.num_clients == 1
    assert sum(sizes) + len(simulation.stages[0].federation.unlabelled) == len(
        simulation.runtime.data.y_train
    )
    assert (
        simulation.stages[0].federation.surrogate[0].tolist()
        == simulation.stages[0].federation.unlabelled.tolist()
    )


def run_once(directory, *overrides):
    config = composed(
        "scenario=class_incremental",
        "partition=equal_shards",
        "tracker=none",
        "figures=false",
        "rounds=2",
        "local.epochs=1",
        "hardware.engine=sequential",
        "hardware.threads=1",
        *overrides,
    )
    choices = {
        "algorithm": "a",
        "dataset": "digits",
        "partition": "equal_shards",
        "model": "cnn",
        "scenario": "class",
    }
    return train_run(Job(config, directory, [], choices, None))


def test_files_of_a_run_with_tasks_agree(tmp_path):
    """tasks.csv, rounds.csv and the summary agree. Each task has a partition file, and roles are
    named."""
    summary = run_once(
        tmp_path, "algorithm=cfed", "surrogate.fraction=0.2", "surrogate.total_shards=40"
    )
    tasks, rounds = (read_table(tmp_path / name) for name in ("tasks.csv", "rounds.csv"))
    assert len(tasks) == 7 * 3
    assert rounds["task"].tolist() == [0, 1, 1, 2, 2, 3, 3]
    table = tasks.pivot(index="round", columns="evaluated_task", values="accuracy").to_numpy()
    assert rounds["new_task_accuracy"][1:].tolist() == pytest.approx(
        [table[r, -(-r // 2) - 1] for r in range(1, 7)]
    )
    assert rounds["average_accuracy"][1:].tolist() == pytest.approx(
        [table[r, : -(-r // 2)].mean() for r in range(1, 7)]
    )
    assert json.loads((tmp_path / "summary.json").read_text())["tasks"] == summary["tasks"]
    assert [end["accuracies"] for end in summary["tasks"]] == [table[r].tolist() for r in (2, 4, 6)]
    roles = (
        pd.read_csv(tmp_path / "clients.csv")
        .groupby("round")["role"]
        .value_counts()
        .unstack(fill_value=0)
    )
    assert roles["reviewer"].tolist() == [0, 0, 4, 4, 4, 4]
    assert roles["learner"].tolist() == [10, 10, 6, 6, 6, 6]
