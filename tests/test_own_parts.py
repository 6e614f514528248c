"""Invalid classes of users: each is rejected in one message."""

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedrep import FedRep
from fedexp.config.build import build
from fedexp.config.values import make
from fedexp.core.errors import ConfigError
from fedexp.data.datasets import Dataset
from fedexp.data.partition import Partitioner
from fedexp.metrics.forgetting_metric import BackwardTransfer, ForgettingMetric, Metrics
from fedexp.training.checks import task_problems
from fedexp.training.recorder import Recorder
from fedexp.training.rounds import run_rounds
from fedexp.training.summary import check_result_names
from toy_federation import AUGMENTATION, CONF, PAIR, assert_close, composed, make_simulation, play


# --- an algorithm
class Reduced(FedAvg):
    reduction: str = "mean"

    def example_loss(self, net, params, batch, ctx):
        if self.reduction == "number":
            return 1.0
        return F.cross_entropy(net(params, batch.x).logits, batch.y, reduction=self.reduction)


@pytest.mark.parametrize("engine", PAIR)
def test_reduced_example_loss_is_rejected(engine):
    # A mean counts the rows that pad a short batch on the vectorised engine.
    simulation = make_simulation(Reduced(), engine=engine)
    with pytest.raises(ConfigError, match=r"returned a tensor of shape \[\]; .* of shape \[\d+\]"):
        play(simulation, 1)
    with pytest.raises(
        ConfigError, match=r"example_loss of Reduced returned a float; .* of shape \[\d+\]"
    ):
        play(make_simulation(Reduced(reduction="number"), engine=engine), 1)
    play(make_simulation(Reduced(reduction="none"), engine=engine), 1)


def test_page_lists_all_hooks_with_arguments():
    page = (CONF.parent / "docs" / "guide" / "your_own_parts.md").read_text(encoding="utf-8")
    written = dict(re.findall(r"^\| `(\w+)\((.*)\)` \|", page, re.MULTILINE))
    hooks = {name: hook for name, hook in vars(FedAvg).items() if inspect.isfunction(hook)}
    expected = {name: list(inspect.signature(hook).parameters) for name, hook in hooks.items()}
    found = {name: ["self", *arguments.split(", ")] for name, arguments in written.items()}
    assert found == {name: value for name, value in expected.items() if name[0] != "_"}


def test_example_with_a_growing_penalty_has_the_stated_weights():
    """The example in docs/guide/your_own_parts.md. Its weight is w / 4, w / 2, ...; with weight 0
    it is FedAvg."""
    page = (CONF.parent / "docs" / "guide" / "your_own_parts.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    exec(page.partition("`mine/reminded.py`\n```python\n")[2].partition("```\n")[0], found)

    def played(engine, **options):
        algorithm = found["Reminded"](**{"weight": 0.5, "rounds": 4, "examples": 3} | options)
        return play(make_simulation(algorithm, engine=engine), 3).server

    one, other = (played(engine) for engine in PAIR)
    assert float(one["round"]) == 4
    assert_close(one["params"], other["params"])
    assert_close(
        played("sequential", weight=0.0)["params"], play(make_simulation(), 3).server["params"]
    )
    faster = played("sequential", rounds=1)["params"]
    assert any((leaf - faster[name]).abs().max() > 1e-6 for name, leaf in one["params"].items())


class Clipped(FedAvg):
    clip: float = 1.0
    more: Any = None


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_value_that_is_not_finite_is_rejected(value):
    assert make(Clipped, {"clip": 2.0}, "algorithm.").clip == 2
    for key, wrong in (("clip", value), ("more", [1, [value]]), ("more", {"a": value})):
        with pytest.raises(ConfigError, match=rf"algorithm\.{key}=.*: must be finite"):
            make(Clipped, {key: wrong}, "algorithm.")


# --- a metric
@dataclass(frozen=True)
class Own(ForgettingMetric):
    """Return the given columns of rounds.csv and clients.csv and keys of summary.json."""

    columns: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    of_clients: tuple[str, ...] = ()
    needs_local: bool = True
    from_round: int = 0

    def round_values(self, history):
        return dict.fromkeys(self.columns if history.rounds[-1] >= self.from_round else (), 1.0)

    def local_values(self, history, index):
        return {name: np.ones(len(history.sampled[index])) for name in self.of_clients}

    def summary(self, history):
        return dict.fromkeys(self.keys, 1.0)


def run(directory, metric, **options):
    directory.mkdir(exist_ok=True)
    simulation = make_simulation(forgetting_metric=metric, rounds=2, **options)
    check_result_names(simulation)
    recorder, state = Recorder(directory, simulation, [], None), simulation.initial_state()
    try:
        run_rounds(simulation, state, recorder)
    finally:
        recorder.close()
    return state


AUGMENTED = {"test_views": ["plain", "augmented"]}


@pytest.mark.parametrize(
    ("given", "file", "options"),
    [
        *(({"columns": ("mine", name)}, "rounds", {}) for name in ("round", "test_accuracy", "lr")),
        *(({"keys": (name,)}, "summary", {}) for name in ("accuracy", "seconds", "status")),
        ({"columns": ("commit",), "keys": ("commit",)}, "summary", {}),
        ({"of_clients": ("train_loss",)}, "clients", {}),
        ({"columns": ("test_accuracy_augmented",)}, "rounds", AUGMENTED),
    ],
)
def test_metric_cannot_use_a_reserved_name(given, file, options, tmp_path):
    """If the names are known in advance, nothing is trained or written."""
    name = next(reversed(given.values()))[-1]
    message = rf"forgetting_metric: {file}\..* already has a value named {name}; rename"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", Own(**given), **options)
    assert (tmp_path / "run" / "rounds.csv").exists() == (file == "clients")


def test_reserved_name_is_rejected_with_personal_models():
    own, evaluate = FedRep(head_epochs=1), ["global", "personal"]
    with pytest.raises(ConfigError, match=r"rounds\.csv already has a value named lr"):
        check_result_names(
            make_simulation(own, forgetting_metric=Own(columns=("lr",)), evaluate=evaluate)
        )


def test_columns_of_a_user_metric_are_written_once(tmp_path):
    state = run(tmp_path / "run", Own(columns=("mine",), keys=("mine",), of_clients=("mine",)))
    assert state.status == "completed"
    for name in ("rounds.csv", "clients.csv"):
        header = (tmp_path / "run" / name).read_text().splitlines()[0].split(",")
        assert header.count("mine") == 1


class Gain(Own):
    def summary(self, history):
        return {"gain": max(float(accuracy.mean()) for accuracy in history.class_accuracy[1:])}


def test_summary_of_a_user_metric_is_computed_after_training(tmp_path):
    assert (
        run(tmp_path / "run", Gain(columns=("mine",), needs_local=False), eval_interval=2).status
        == "completed"
    )


def test_metrics_with_equal_names_are_rejected(tmp_path):
    """Both values are nan until the second round."""
    with pytest.raises(
        ConfigError,
        match=r"two metrics return forgetting with different values, .* and 1\.0; rename",
    ):
        run(
            tmp_path / "run",
            Metrics(members=(BackwardTransfer(), Own(columns=("forgetting",), from_round=0))),
        )


@dataclass(frozen=True)
class Wrong(ForgettingMetric):
    """Return the given values from the second evaluated round on, and nan before."""

    of_rounds: Any = np.nan
    of_clients: Any = None
    of_run: Any = np.nan
    needs_local: bool = True

    def round_values(self, history):
        return {"mine": self.of_rounds if len(history.rounds) > 1 else np.nan}

    def local_values(self, history, index):
        return {} if self.of_clients is None else {"mine": self.of_clients}

    def summary(self, history):
        return {"mine": self.of_run}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"of_rounds": [0.5, 0.25]},
            r"\[0\.5, 0\.25\], but mine must be one number \(nan if undefined\)",
        ),
        ({"of_rounds": None}, "None, but mine must be one number"),
        ({"of_rounds": torch.tensor(0.5)}, r"tensor\(0\.5000\), but mine must be one number"),
        ({"of_run": {"a": 1.0}}, r"\{'a': 1\.0\}, but mine must be one number"),
        ({"of_clients": 0.5}, r"0\.5, but mine must be 4 numbers, one for each client"),
        ({"of_clients": [[1], [1, 2], [1], [1]]}, "must be 4 numbers, one for each client"),
        ({"of_clients": np.zeros((4, 3))}, "must be 4 numbers, one for each client"),
    ],
)
def test_metric_must_return_numbers(given, message, tmp_path):
    with pytest.raises(ConfigError, match="forgetting_metric: Wrong returns mine=.*" + message):
        run(tmp_path / "run", Wrong(**given), eval_interval=1)


@pytest.mark.parametrize("number", [1, True, np.float32(0.5), np.int64(2), np.nan, float("inf")])
def test_metric_may_return_any_number_type(number, tmp_path):
    state = run(
        tmp_path / "run", Wrong(of_rounds=number, of_run=number, of_clients=np.full(4, number))
    )
    assert state.status == "completed"


def test_metric_must_return_a_dict(tmp_path):
    class Scalar(Wrong):
        def summary(self, history):
            return 0.5

    with pytest.raises(
        ConfigError,
        match=r"Scalar returns 0\.5, but must return a dict that maps names to numbers",
    ):
        run(tmp_path / "run", Scalar())


# --- a data set
IMAGES, LABELS = np.zeros((4, 2, 2, 1), np.uint8), np.arange(4, dtype=np.int64) % 2


class Given(Dataset):
    changed: Any

    def read(self):
        arrays = {
            "x_train": IMAGES,
            "y_train": LABELS,
            "x_test": IMAGES,
            "y_test": LABELS,
            "classes": np.array(["a", "b"]),
        }
        return {key: value for key, value in (arrays | self.changed).items() if value is not None}


GIVEN: dict[str, Any] = {
    **{"name": "given", "data_dir": "unused", "mean": (0.5,), "std": (0.5,)},
    "augmentation": AUGMENTATION,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"x_train": IMAGES / 255},
            r"x_train is float64 of shape \[4, 2, 2, 1\]; x must be uint8",
        ),
        (
            {"x_test": IMAGES[..., 0]},
            r"x_test is uint8 of shape \[4, 2, 2\]; x must be uint8 \[N, height, width",
        ),
        (
            {"y_train": LABELS.astype(np.int32)},
            r"y_train is int32 of shape \[4\]; .* y must be int64 \[N\]",
        ),
        (
            {"y_test": LABELS[:, None]},
            r"y_test is int64 of shape \[4, 1\]; .* y must be int64 \[N\]",
        ),
        ({"classes": None, "y_test": None}, "`read` must also return the arrays y_test, classes"),
        ({"y_train": [0, 1, 0, 1]}, r"y_train is list; .* y must be int64 \[N\]"),
        ({"classes": ["a", "b", "c", "a", "b"]}, "class names must .* are repeated: a, b$"),
    ],
)
def test_invalid_arrays_of_a_user_data_set_are_rejected(changed, message):
    assert len(Given(**GIVEN, changed={}).load().y_train) == 4
    with pytest.raises(ConfigError, match="dataset=given: " + message):
        Given(**GIVEN, changed=changed).load()


class Shadowing(Given):
    kind: str = "red"


def test_field_that_hides_an_attribute_is_rejected():
    built = replace(build(composed()), dataset=Shadowing(**GIVEN, changed={}))
    assert any(
        "dataset.kind: Shadowing has a field `kind`" in said for said in task_problems(built)
    )


# --- a partition
class Fixed(Partitioner):
    parts: Any

    def assign(self, labels, num_classes, num_clients, rng, owners):
        return self.parts, {}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1]], "gives 1 client, but num_clients=2"),
        (None, "must give a list of example indices for each client"),
    ],
)
def test_invalid_partition_is_rejected(parts, message):
    """test_partition.py tests all messages, for files."""
    labels, rng = np.array([0, 1, 0, 1]), np.random.default_rng(0)
    with pytest.raises(ConfigError, match="partition: Fixed " + message):
        Fixed(parts=parts).deal(labels, 2, rng)


class Returning(Partitioner):
    given: Any

    def assign(self, labels, num_classes, num_clients, rng, owners):
        return self.given


@pytest.mark.parametrize(
    "given", [[[0], [1]], ([0], [1]), [[0], [1], [2]], None, ([[0], [1]], {}, 1)]
)
def test_partition_must_return_parts_and_info(given):
    with pytest.raises(ConfigError, match="partition: Returning: `assign` must return two things"):
        Returning(given=given).deal(np.array([0, 1, 0, 1]), 2, np.random.default_rng(0))


def test_keeps_without_its_base_class_is_rejected():
    """Without the base, the hook would never be called, and the run would be FedAvg."""
    with pytest.raises(ConfigError, match=r"defines keeps.*mixins\.KeepsPart"):
        type("Unrelated", (FedAvg,), {"keeps": lambda self, name: True})


@pytest.mark.parametrize("body", [{"__annotations__": {"epochs": int}}, {"epochs": 3}])
def test_field_with_the_name_of_a_hook_is_rejected(body):
    with pytest.raises(ConfigError, match=r"Longer has a field epochs, but `epochs` is a hook"):
        type("Longer", (FedAvg,), body)
