"""Invalid classes of users: each is rejected in one message."""

import inspect
import re
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedrep import FedRep
from fedexp.config.build import build
from fedexp.config.values import make
from fedexp.core.errors import ConfigError, require
from fedexp.data.datasets import Dataset
from fedexp.data.partition import Partitioner
from fedexp.metrics.forgetting_metric import BackwardTransfer, ForgettingMetric, Metrics
from fedexp.metrics.record import Record
from fedexp.testing import record
from fedexp.trackers.base import Callback, Callbacks, Tracker
from fedexp.training.checks import task_problems
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


class Levels(FedAvg):
    """An option with a list, such as `levels: [0.5, 1]` in yaml. Clients have two roles."""

    levels: list[float]

    def roles(self, federation, clients, rng):
        return [replace(self, levels=self.levels[k % 2 :]) for k in range(len(clients))]


@pytest.mark.parametrize("engine", PAIR)
def test_algorithm_with_a_list_trains(engine):
    found = play(make_simulation(Levels(levels=[0.5, 1.0]), engine=engine), 1)
    expected = play(make_simulation(FedAvg(), engine=engine), 1)
    assert_close(found.server, expected.server)


class Averaged(FedAvg):
    change: Any

    def aggregate(self, server, messages, round):
        new = super().aggregate(server, messages, round)
        return self.change(new["params"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: None, "a dict with params; got NoneType"),
        (lambda params: params, "a dict with params; got dict"),
        (
            lambda params: {"params": {**params, "a": 1.0}},
            r"params\['a'\] must be None, but is 1.0",
        ),
        (
            lambda params: {"params": {k: v.mean(-1, True) for k, v in params.items()}},
            r"params\['\S+bias'\] must be \[4\], torch.float64, but is \[1\], torch.float64",
        ),
    ],
)
def test_aggregate_must_return_a_model_like_the_one_before(change, message):
    with pytest.raises(
        ConfigError, match="aggregate of Averaged must return the server's.*" + message
    ):
        play(make_simulation(Averaged(change=change)), 1)


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
    name: str = ""
    more: Any = None


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_value_that_is_not_finite_is_rejected(value):
    assert make(Clipped, {"clip": 2.0}, "algorithm.").clip == 2
    wrongs = (("clip", value), ("name", value), ("more", [1, [value]]), ("more", {"a": value}))
    for key, wrong in wrongs:
        with pytest.raises(ConfigError, match=rf"algorithm\.{key}=.*: must be finite"):
            make(Clipped, {key: wrong}, "algorithm.")


@pytest.mark.parametrize(
    ("base", "name", "meant"),
    [
        (FedAvg, "agregate", "aggregate"),
        (FedAvg, "exampleloss", "example_loss"),
        (ForgettingMetric, "need_local", "needs_local"),
        (Partitioner, "asign", "assign"),
        (Callback, "after_rounds", "after_round"),
        (Tracker, "after_rounds", "after_round"),
        (Tracker, "abrot", "abort"),
    ],
)
def test_misspelt_hook_is_rejected_if_its_class_is_used(base, name, meant):
    """Also if a class that derives from it is used."""
    mine = type("Mine", (base,), {name: lambda self: None})
    for kind in (mine, type("Other", (mine,), {}), mine):
        with pytest.raises(ConfigError, match=rf"Mine\.{name}: is not used .*'{meant}'"):
            use(kind)
    use(type("Mine", (base,), {f"_{name}": None, "helper": None}))


def use(kind):
    """Use a class as a run does."""
    return Callbacks([kind()]) if issubclass(kind, Callback) else kind()


def test_misspelt_hook_is_rejected_in_a_class_with_its_own_checks():
    class Mine(FedAvg):
        weight: float = 1.0

        def __post_init__(self):
            require(self.weight > 2, "algorithm.weight", self.weight, "greater than 2")

        def agregate(self, server, replies, ctx):
            return server

    with pytest.raises(ConfigError, match=r"Mine\.agregate: is not used"):
        Mine()


@pytest.mark.parametrize(
    ("base", "name", "instead"),
    [
        (Tracker, "log_round", "after_round"),
        (FedAvg, "needs", "the attributes needs_public, .*"),
        (ForgettingMetric, "needs_neurons", "the hook callback, .*"),
    ],
)
def test_hook_of_an_earlier_version_is_rejected(base, name, instead):
    with pytest.raises(
        ConfigError, match=rf"Mine\.{name}: is not used .* any more; use {instead}$"
    ):
        use(type("Mine", (base,), {name: lambda self: None}))


def test_partition_without_assign_is_rejected():
    class Forgot(Partitioner):
        pass

    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="partition: Forgot must have the method assign"):
        Forgot().deal(np.zeros(9, np.int64), 3, rng)


# --- a metric
class Own(ForgettingMetric):
    """Return the given values, and in clients.csv the given ones too."""

    columns: ClassVar = {"mine": "max"}
    of_clients = ("mine",)
    of_rounds: Any = np.nan
    of_each: Any = (1.0, 1.0, 1.0, 1.0)
    of_run: Any = np.nan
    needs_local = True

    def round_values(self, record):
        return {"mine": self.of_rounds}

    def local_values(self, record, index):
        return {"mine": self.of_each}

    def summary(self, record):
        return {"mine": self.of_run}


def declares(*names, further=(), base=ForgettingMetric):
    """Return a metric that only declares names."""
    values = {"columns": dict.fromkeys(names, "max"), "further": dict.fromkeys(further, "max")}
    return type("Declared", (base,), values)()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"columns": ["mine"]}, r"declares \['mine'\]; columns .* to 'max' or 'min'"),
        ({"further": {"mine": "up"}}, r"declares 'mine'; columns"),
        ({"columns": {"": "max"}}, r"declares ''; columns"),
        ({"columns": {"a,b": "max"}}, r"a name without a comma"),
        ({"columns": {"a": "max"}, "of_clients": ["b"]}, r"has b in of_clients; these must also"),
    ],
)
def test_metric_must_declare_names_and_directions(body, message):
    with pytest.raises(ConfigError, match=f"forgetting_metric: Wrong .*{message}"):
        type("Wrong", (ForgettingMetric,), body)


class Widest(ForgettingMetric):
    """The best class accuracy of each local model."""

    columns: ClassVar = {"widest": "max"}
    of_clients = ("widest",)
    needs_local = True

    def local_values(self, record, index):
        return {"widest": np.nanmax(record.local_class_accuracy[index], axis=1)}


def test_metric_of_clients_is_their_mean(tmp_path):
    run(tmp_path, Widest())
    rounds, clients = (pd.read_csv(tmp_path / name) for name in ("rounds.csv", "clients.csv"))
    local = pd.read_csv(tmp_path / "local_class_accuracy.csv")
    expected = local.groupby(["round", "client"])["accuracy"].max()
    found = clients.set_index(["round", "client"])["widest"]
    pd.testing.assert_series_equal(found, expected, check_names=False)
    means = [np.nan, *expected.groupby("round").mean()]
    np.testing.assert_allclose(rounds["widest"], means, rtol=1e-15)


def test_metric_of_clients_must_need_local_models(tmp_path):
    class Forgot(Widest):
        needs_local = False

    with pytest.raises(ConfigError, match="so it must have needs_local = True"):
        run(tmp_path, Forgot())


def run(directory, metric, **options):
    return record(make_simulation(forgetting_metric=metric, rounds=2, **options), directory)


AUGMENTED = {"test_views": ["plain", "augmented"]}


@pytest.mark.parametrize(
    ("metric", "file", "options"),
    [
        (declares("mine", "lr"), "rounds", {}),
        *((declares(further=[name]), "summary", {}) for name in ("accuracy", "status")),
        (declares("test_accuracy_augmented"), "rounds", AUGMENTED),
        (declares("lr"), "rounds", {"algorithm": FedRep(head_epochs=1)}),
    ],
)
def test_metric_cannot_use_a_reserved_name(metric, file, options):
    name = [*metric.columns, *metric.further][-1]
    message = rf"forgetting_metric: {file}\..* already has a value named {name}; rename"
    with pytest.raises(ConfigError, match=message):
        check_result_names(make_simulation(forgetting_metric=metric, **options))


def test_metrics_cannot_share_a_name_in_trackers():
    """W&B kept the value of only one of them."""
    message = "forgetting_metric: F and forgetting would both be forgetting/F in W&B; rename yours"
    with pytest.raises(ConfigError, match=message):
        Metrics([BackwardTransfer(), declares("F")])


def test_metrics_of_two_classes_cannot_share_a_name():
    message = "Declared and BackwardTransfer both declare forgetting; rename it in your metric"
    with pytest.raises(ConfigError, match=message):
        make_simulation(forgetting_metric=declares("forgetting"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"of_rounds": [0.5, 0.25]}, r"\[0\.5, 0\.25\], but mine must be one number \(nan if"),
        ({"of_run": {"a": 1.0}}, r"\{'a': 1\.0\}, but mine must be one number"),
        ({"of_each": 0.5}, r"0\.5, but mine must be 4 numbers, one for each client"),
        ({"of_each": np.zeros((4, 3))}, "must be 4 numbers, one for each client"),
    ],
)
def test_metric_must_return_numbers(given, message):
    metrics, history = Metrics([Own(**given)]), Record(np.ones((4, 2), np.int64))
    history.add(1, np.zeros(2))
    history.add_local(1, np.arange(4), np.zeros((4, 2)))
    kind = {"of_each": "client_values", "of_run": "summary"}.get(*given, "round_values")
    with pytest.raises(ConfigError, match="forgetting_metric: Own returns mine=.*" + message):
        getattr(metrics, kind)(history)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (True, 1.0),
        # tables had infinity, where summary.json and the trackers had no value
        (-np.inf, np.nan),
    ],
)
def test_numbers_of_a_metric_become_floats(given, expected):
    own = Own(of_rounds=given, of_each=np.full(4, float(given)))
    metrics, history = Metrics([own]), Record(np.ones((4, 2), np.int64))
    history.add(1, np.zeros(2))
    history.add_local(1, np.arange(4), np.zeros((4, 2)))
    value = metrics.round_values(history)["mine"]
    assert type(value) is float
    np.testing.assert_equal(value, expected)
    np.testing.assert_equal(metrics.client_values(history)["mine"], np.full(4, expected))


def test_metric_that_leaves_another_mode_of_torch_is_named(tmp_path):
    class Ungraded(Own):
        def round_values(self, record):
            torch.set_grad_enabled(False)
            return super().round_values(record)

    message = r"forgetting_metric: round_values of Ungraded leaves torch.set_grad_enabled\(False\)"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, Ungraded())


def test_record_is_read_only():
    history = Record(np.ones((4, 2), np.int64), labels=np.zeros(3, np.int64))
    history.add(0, np.zeros(2), np.ones(3, bool), (0.5, 1.0), [0.5])
    history.add_local(1, np.arange(4), np.zeros((4, 2)), np.zeros(2))
    history.add_personal(1, np.zeros((4, 2)))
    history.add_cohort(1, [0, 1])
    for name, value in vars(history).items():
        for array in (value, *value) if isinstance(value, tuple) else (value,):
            if isinstance(array, np.ndarray):
                assert not array.flags.writeable, name
        assert not hasattr(value, "append"), name
        assert not hasattr(value, "update"), name
        with pytest.raises(FrozenInstanceError):
            setattr(history, name, value)


@pytest.mark.parametrize("values", [0.5, {}, {"mine": 1.0, "late": 2.0}])
def test_metric_must_return_the_values_that_it_declares(values):
    class Other(Own):
        def summary(self, record):
            return values

    with pytest.raises(ConfigError, match=r"Other returns .*, but .* that it declares: mine"):
        Metrics([Other()]).summary(Record(np.ones((2, 2), np.int64)))


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
            {"y_train": LABELS.astype(np.int32)},
            r"y_train is int32 of shape \[4\]; .* y must be int64 \[N\]",
        ),
        ({"classes": None, "y_test": None}, "`read` must also return the arrays y_test, classes"),
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


class Returning(Partitioner):
    given: Any

    def assign(self, labels, num_classes, num_clients, rng, owners):
        return self.given


@pytest.mark.parametrize("given", [[[0], [1]], ([0], [1]), None])
def test_partition_must_return_parts_and_info(given):
    with pytest.raises(ConfigError, match="partition: Returning: `assign` must return two things"):
        Returning(given=given).deal(np.array([0, 1, 0, 1]), 2, np.random.default_rng(0))


def test_information_on_a_partition_may_be_of_numpy():
    def info(value):
        own = Returning(given=([[0], [1]], {"mine": value}))
        return own.deal(np.array([0, 1, 0, 1]), 2, np.random.default_rng(0)).info["mine"]

    assert (info(np.int64(3)), info(np.arange(2))) == (3, [0, 1])
    with pytest.raises(ConfigError, match="information that JSON cannot hold"):
        info(info)


def test_keeps_without_its_base_class_is_rejected():
    """Without the base, the hook would never be called, and the run would be FedAvg."""
    with pytest.raises(ConfigError, match=r"defines keeps.*mixins\.KeepsPart"):
        type("Unrelated", (FedAvg,), {"keeps": lambda self, name: True})


@pytest.mark.parametrize("body", [{"__annotations__": {"epochs": int}}, {"epochs": 3}])
def test_field_with_the_name_of_a_hook_is_rejected(body):
    with pytest.raises(ConfigError, match=r"Longer has a field epochs, but `epochs` is a hook"):
        type("Longer", (FedAvg,), body)
