"""`fedexp.testing.check` accepts correct parts of all kinds and names the faults of wrong ones.

Algorithms are in `test_testing.py`.
"""

from collections import Counter
from dataclasses import field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from fedexp.config.build import build
from fedexp.data.partition import Partitioner
from fedexp.data.partition_file import File
from fedexp.metrics.forgetting import forgetting_per_class
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.metrics.personal import Personal
from fedexp.metrics.record import Record
from fedexp.models.own import OwnModel
from fedexp.testing import check
from fedexp.trackers.base import Callback, CallbackConfig, Tracker, TrackerConfig
from test_own_models import Net
from test_own_parts import GIVEN, Given, Widest
from toy_federation import composed


def fails(part: Any, message: str, **options: Any) -> None:
    with pytest.raises(AssertionError, match=message):
        check(part, **options)


# --- all parts of fedexp


def shipped(group: str, name: str, *overrides: str) -> Any:
    """Return the part that an option selects."""
    part = getattr(build(composed(f"{group}={name}", *overrides)), group)
    return part[0] if isinstance(part, list) else part


SHIPPED = [
    *(("forgetting_metric", name, {}) for name in ("absence", "client_drop", "consistency")),
    *(("forgetting_metric", name, {}) for name in ("degree", "events", "forgetting")),
    *(("forgetting_metric", name, {}) for name in ("in_out_local", "phases", "round_drop")),
    ("forgetting_metric", "alignment", {}),
    ("partition", "lda", {}),
    ("partition", "dirichlet", {}),
    ("partition", "sharding", {"clients": (5, 10)}),
    ("partition", "equal_shards", {}),
    ("partition", "iid", {"left_out": 9}),
    ("dataset", "digits", {"classes": 10}),
    ("model", "cnn", {}),
    ("analysis", "weight_divergence", {}),
    *(
        pytest.param(group, name, {}, marks=pytest.mark.slow)
        for group, names in (
            ("model", ("cnn_3fc", "cnn_circle")),
            ("analysis", ("cka", "gradient_diversity", "local_epochs")),
        )
        for name in names
    ),
]


@pytest.mark.parametrize(("group", "name", "options"), SHIPPED)
def test_parts_of_fedexp_pass_the_check(group, name, options):
    check(shipped(group, name), **options)


def test_metric_of_personal_models_passes_the_check():
    check(Personal(own=False, local=False, tests_clients=False))


def test_partition_from_a_file_passes_the_check(tmp_path):
    numbers = np.arange(1437).reshape(3, 479)
    np.savez(tmp_path / "parts.npz", **{str(client): row for client, row in enumerate(numbers)})
    part = File(path=str(tmp_path / "parts.npz"))
    check(part, clients=(3,), deterministic=True)
    fails(part, "another seed gives the same clients; draw from", clients=(3,))
    fails(part, "gives 3 clients, but num_clients=2", clients=(2,), deterministic=True)


def test_option_is_checked_with_its_own_values():
    check("forgetting_metric=degree", overrides=["forgetting_metric.degree.xi=0.01", "alpha=2"])
    fails("partition=lda", "min_size=9999: must be at most 718", overrides=["min_size=9999"])
    fails("model=cnnn", "model=cnnn: no such option")


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"Counter\(\): must inherit from one of fedexp.algorithms"):
        check(Counter())
    with pytest.raises(TypeError, match="unexpected keyword argument 'zero'"):
        check(shipped("partition", "iid"), zero=None)


# --- metrics

MATRIX = [[0.9, 0.9], [0.5, 0.2], [0.8, 0.1], [0.6, 0.1]]  # drops of 0.2 and 0.1


class Worst(ForgettingMetric):
    """The largest drop of a class below its peak, as in the guide."""

    columns: ClassVar = {"worst": "min"}
    scale: float = 1.0

    def round_values(self, record):
        return {"worst": self.scale * float(np.fmax.reduce(forgetting_per_class(record.matrix)))}


class Poisoned(Worst):
    """Wrong: nan of an absent class becomes the value."""

    def round_values(self, record):
        return {"worst": float(np.max(forgetting_per_class(record.matrix)))}


class Remembers(Worst):
    """Wrong: a resumed run would have lost the earlier accuracies."""

    seen: list[Any] = field(default_factory=list)

    def round_values(self, record):
        self.seen.append(record.accuracy[-1])
        return {"worst": max(self.seen)}


class Counts(Worst):
    """Wrong: the second call gives another value."""

    calls: ClassVar[Counter[str]] = Counter()

    def round_values(self, record):
        self.calls["all"] += 1
        return {"worst": float(self.calls["all"])}


class Changes(Worst):
    """Wrong: changes what other metrics read."""

    def round_values(self, record):
        record.class_accuracy[-1][:] = 0
        return {"worst": 0.0}


class Forgets(Widest):
    """Wrong: local models are not tested for it."""

    columns: ClassVar = {"spread": "max"}
    of_clients = ()
    needs_local = False

    def round_values(self, record):
        known = record.local_class_accuracy[-1:]
        return {"spread": float(np.ptp(known[0])) if known else float("nan")}


class Numbered(Worst):
    """Wrong: the number of a round is not its position if some rounds are not tested."""

    def round_values(self, record):
        return {"worst": float(np.nanmin(record.matrix[record.rounds[-1]]))}


class Painted(Worst):
    """Wrong: an array is no figure."""

    def figures(self, record):
        return {"drops": lambda: forgetting_per_class(record.matrix)}


def test_metric_equals_a_matrix_by_hand():
    """The largest drop is 0.8 - 0.6 = 0.2; with class 2, which the test set lacks, too."""
    check(Worst(), matrix=MATRIX, expected={"worst": 0.2}, summary={"worst": 0.2})
    check(Worst(), matrix=[[*row, np.nan] for row in MATRIX], expected={"worst": 0.2})
    fails(Worst(scale=2.0), "by hand, round_values gives worst=0.4.*, not 0.2", **BY_HAND)
    fails(Worst(), "by hand, summary gives worst=0.2.*, not 0.1", matrix=MATRIX, summary=OTHER)
    fails(Worst(), "round_values gives worst, but not first", matrix=MATRIX, expected={"first": 1})
    fails(Worst(), r"Worst: matrix needs expected=\{...\} or summary", matrix=MATRIX)


OTHER = {"worst": 0.1}
BY_HAND = {"matrix": MATRIX, "expected": {"worst": 0.2}}


def test_metric_of_clients_equals_a_record_by_hand():
    record = Record(np.ones((3, 2), np.int64))
    record.add(0, [0.1, 0.1])
    record.add_local(1, [0, 2], [[0.3, 0.4], [0.8, 0.2]])
    record.add(1, [0.5, 0.5])
    check(Widest(), matrix=record, expected={"widest": [0.4, 0.8]}, summary={"widest": 0.6})
    wrong = {"widest": [0.4, 0.7]}
    fails(Widest(), "client_values gives widest=.*, not .*0.7", matrix=record, expected=wrong)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            Poisoned(),
            "with a class without examples, round_values gives worst=nan, not .*leave out",
        ),
        (Remembers(), "Remembers: after round 4.* gives worst=.*may depend only on the record"),
        (Counts(), "Counts: after round 4, a second call, round_values gives worst=.*only on"),
        (Changes(), r"round_values of Changes \(test_checks.py, line \d+\): .* read-only"),
        (Forgets(), "Forgets: spread is nan in all 4 rounds, so nothing is checked"),
        (
            Numbered(),
            r"round_values of Numbered .*IndexError.* with eval_interval=3; record.rounds",
        ),
        (Painted(), "Painted: the figure drops is a ndarray; must be a matplotlib Figure"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ForgettingMetric) else "",
)
def test_check_names_the_fault_of_a_metric(metric, message):
    fails(metric, message)


def test_metric_may_draw():
    class Drawn(Worst):
        def figures(self, record):
            return {"drops": Figure}

    check(Drawn())


# --- partitions


class Shuffled(Partitioner):
    """Give each client a part of the shuffled examples; `wrong` names a fault."""

    wrong: str = ""
    min_size: int = 1
    times: list[int] = field(default_factory=list)

    def assign(self, labels, num_classes, num_clients, rng, owners):
        self.times.append(num_clients)
        if self.wrong == "labels":
            labels.sort()
        if self.wrong == "global":
            rng = np.random.default_rng()
        if self.wrong == "fixed":
            rng = np.random.default_rng(5)
        if self.wrong == "memory":
            rng = np.random.default_rng(len(self.times))
        order = rng.permutation(len(labels))
        if self.wrong == "drops":
            order = order[1:]
        if self.wrong == "twice":
            order[0] = order[1]
        if self.wrong == "clients":
            num_clients = 5
        if self.wrong == "small":
            return np.split(order, range(1, num_clients)), {}
        return np.array_split(order, num_clients), {}


def test_partition_passes_the_check():
    check(Shuffled(min_size=143))
    check(Shuffled(wrong="drops"), left_out=1)
    check(Shuffled(wrong="fixed"), deterministic=True)


def test_partition_may_draw_from_global_generators():
    """They are seeded with seeds.partition, also in a run."""

    class Legacy(Shuffled):
        def assign(self, labels, num_classes, num_clients, rng, owners):
            return np.array_split(np.random.permutation(len(labels)), num_clients), {}  # noqa: NPY002

    check(Legacy(), clients=(5,))


@pytest.mark.parametrize(
    ("wrong", "message", "options"),
    [
        ("labels", "with 2 clients, assign changes the labels that it receives; copy", {}),
        ("global", "with 2 clients, dividing again with the same seed .*only from the arg", {}),
        ("memory", "with 2 clients, dividing again with the same seed .*keep nothing", {}),
        ("fixed", "with 2 clients, another seed gives the same clients; draw from the arg", {}),
        ("", "with 2 clients, another seed gives other clients, but .*=True", {"deterministic": 1}),
        ("drops", "with 2 clients, 1 example have no client, more than left_out=0", {}),
        ("twice", "gives example .*; each example has one client", {}),
        ("clients", "gives 5 clients, but num_clients=2", {}),
        ("small", "with 2 clients, the smallest client has 1 example, but min_size=2", {}),
    ],
)
def test_check_names_the_fault_of_a_partition(wrong, message, options):
    fails(Shuffled(wrong=wrong, min_size=2), message, **options)


# --- callbacks and trackers


class Counting(Callback):
    """Counts rounds, and writes the count to a file; `wrong` names a fault."""

    def __init__(self, wrong):
        self.wrong, self.count = wrong, 0

    def start(self, info):
        self.path = info.directory / "counts.txt"

    def after_round(self, record):
        self.count += 1
        if self.wrong == "model":
            for value in record.model["params"].values():
                value.data.mul_(0.5)
        if self.wrong == "noted":
            next(iter(record.model["params"].values())).mul_(0.5)
        if self.wrong == "raises":
            raise ZeroDivisionError("division by zero")
        self.path.write_text(str(self.count))
        return "enough" if self.wrong == "ends" and record.round == 3 else None

    def summary(self):
        found = {"rounds_seen": np.int64(self.count), "mean": np.nan}
        others = {
            "replaces": {"accuracy": 1.0},
            "reserved": {"dataset": "mine"},
            "object": {"x": {1}},
            "file": {},
        }
        return others.get(self.wrong, found)

    def state_dict(self):
        return {} if self.wrong in ("file", "forgets") else {"count": self.count}

    def load_state_dict(self, state):
        self.count = state.get("count", 0) + (self.wrong == "load")


class Watch(CallbackConfig):
    wrong: str = ""

    def create(self):
        return Counting(self.wrong)


class Ending(Watch):
    ends_runs: ClassVar[bool] = True
    wrong: str = "ends"


class Showing(Counting, Tracker):
    name = "the tracker of counts"


class Show(TrackerConfig):
    wrong: str = ""

    def create(self):
        return Showing(self.wrong)


def test_callbacks_and_trackers_pass_the_check():
    check(Watch)
    check(Ending)
    check(Show)
    check(Show(wrong="file"))  # files and states of a tracker are not compared
    check(Watch(wrong="file"), same_files=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Watch(wrong="model"), "Watch: the run with it differs from the run without it"),
        (Watch(wrong="noted"), r"after_round of Counting changes record.model\['params'\]"),
        (Watch(wrong="raises"), "after_round of Counting .*ZeroDivisionError: division by zero"),
        (Watch(wrong="ends"), "ended the run .*does not declare ends_runs = True"),
        (Watch(wrong="replaces"), "summary of Counting returns accuracy=1.0, but .*already has"),
        (
            Show(wrong="replaces"),
            "tracker: summary of Showing returns accuracy=1.0, but .*already has",
        ),
        (Watch(wrong="reserved"), "summary of Counting returns dataset='mine', but .*already has"),
        (Watch(wrong="object"), r"returns x, which JSON cannot hold \(\{1\} is a set\)"),
        (Watch(wrong="forgets"), r"resumed, summary returns \{'rounds_seen': 2, .*, not .*: 5,"),
        (Watch(wrong="load"), r"resumed, state_dict returns .*'count': 6.*, not .*'count': 5"),
        (Watch(wrong="file"), "resumed, counts.txt is missing, new or different; return what"),
        (Show(wrong="raises"), "Show: .*the tracker of counts could not log a round"),
        (Show(wrong="forgets"), r"resumed, summary returns \{'rounds_seen': 2, .*, not .*: 5,"),
    ],
    ids=lambda value: value.wrong if isinstance(value, CallbackConfig) else "",
)
def test_check_names_the_fault_of_a_callback(options, message):
    fails(options, message)


# --- models


class Strange(Net):
    """An ordinary network, or one with a fault."""

    def __init__(self, shape, num_classes, wrong):
        super().__init__(shape, num_classes, 0.5 if wrong == "dropout" else 0.0)
        self.wrong = wrong
        if wrong == "numpy":
            self.fc.bias.data.copy_(torch.from_numpy(np.random.default_rng().random(num_classes)))
        if wrong == "tensor":
            self.shift = torch.ones(num_classes, dtype=torch.float64)
        if wrong in ("eval", "unsaved"):
            self.register_buffer("mean", torch.zeros(num_classes), persistent=wrong == "eval")
        if wrong == "unused":
            self.more = nn.Linear(2, 2, bias=False)
        if wrong == "norm":
            self.norm = nn.BatchNorm1d(num_classes)

    def forward(self, x):
        change = FAULTS.get(self.wrong)
        logits = super().forward(x)
        return logits if change is None else change(self, logits)


def counted(network, logits, unsaved):
    if network.training == unsaved:
        network.mean.add_(1.0)
    return logits + network.mean if unsaved else logits


FAULTS = {
    "squeeze": lambda network, logits: logits.squeeze(),
    "random": lambda network, logits: logits + torch.randn_like(logits),
    "mixes": lambda network, logits: logits - logits.mean(0),
    "mixes in training": lambda network, logits: logits - network.training * logits.mean(0),
    "detached": lambda network, logits: logits.detach(),
    "softmax": lambda network, logits: logits.softmax(1),
    "root": lambda network, logits: logits + (0 * network.fc.bias).sum().sqrt(),  # d/dx at 0
    "eval": lambda network, logits: counted(network, logits, False),
    "unsaved": lambda network, logits: counted(network, logits, True),
    "norm": lambda network, logits: network.norm(logits),
}


class Own(OwnModel):
    wrong: str = ""

    def network(self, shape, num_classes):
        return Strange(shape, num_classes, self.wrong)


class Fast(Own):
    vectorises: ClassVar[bool] = True


class Unmixed(Own):
    mixes_examples: ClassVar[bool] = False


class Alone(Own):
    vectorises: ClassVar[bool] = False


def test_own_models_pass_the_check():
    check(Fast())
    check(Own(wrong="norm"))
    check(Alone(wrong="mixes in training"))
    with pytest.warns(UserWarning, match=r"the logits do not depend on network.more.weight"):
        check(Alone(wrong="unused"))
    check(Own(wrong="dropout"))  # a trial finds that the vectorised engine cannot train it


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Own(wrong="squeeze"), r"logits of 1 of 7 examples have shape \[10\]; must be \[1, 10\]"),
        (Own(wrong="random"), "in eval mode, the logits of an example depend on random numbers"),
        (Own(wrong="mixes"), "in eval mode, the logits .* depend on the other examples of its"),
        (Own(wrong="numpy"), "two networks of one seed differ; draw initial values only with"),
        (Own(wrong="tensor"), "network.shift is a tensor, but neither a parameter nor a buffer"),
        (Own(wrong="eval"), "the network changes its parameters or buffers in eval mode"),
        (Own(wrong="unsaved"), "that loads the state_dict of a trained one computes otherwise"),
        (Fast(wrong="dropout"), "(?s)vectorised fails.*draw random numbers, set vectorises = Fal"),
        (Own(wrong="mixes in training"), "(?s)vectorised differs.*mix examples .*vectorises = Fa"),
        (Own(wrong="detached"), "Own: the logits do not depend on trainable parameters"),
        (Own(wrong="softmax"), "Own: the logits of each example are positive and sum to 1"),
        (Own(wrong="root"), "Own: a round of training gives nan or infinity"),
        (Unmixed(wrong="norm"), "has batch norm, so mixes_examples must be True"),
        (Own(head="fcc"), "model.head=fcc: must be the name of the last layer"),
    ],
    ids=lambda value: value.wrong if isinstance(value, OwnModel) else "",
)
def test_check_names_the_fault_of_a_model(model, message):
    fails(model, message)


# --- data sets

rng = np.random.default_rng(3)
PIXELS = rng.integers(0, 256, (12, 3, 3, 1), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.int64) % 2
ARRAYS = {"x_train": PIXELS[:8], "y_train": LABELS[:8], "x_test": PIXELS[8:], "y_test": LABELS[8:]}


class Images(Given):
    """Random images; `wrong` names a fault."""

    wrong: str = ""
    changed: Any = field(default_factory=lambda: ARRAYS)

    def read(self):
        arrays = super().read()
        if self.wrong == "order":
            arrays["x_train"] = np.random.default_rng().permutation(arrays["x_train"])
        return arrays

    def load(self):
        data = super().load()
        changes: dict[str, dict[str, Any]] = {
            "labels": {"y_test": data.y_test + 1},
            "types": {"y_train": data.y_train.int()},
            "lengths": {"x_test": data.x_test[1:]},
            "floats": {"x_train": data.x_train.float()},
            "names": {"classes": ("a", "a")},
            "owners": {"owners": np.zeros(3, np.int64)},
            "std": {"std": (0.0,)},
        }
        return replace(data, **changes.get(self.wrong, {}))

    def load_test(self):
        data = super().load_test()
        if self.wrong == "other pixels":
            return replace(data, x_test=255 - data.x_test)
        return replace(data, y_test=data.y_test.flip(0)) if self.wrong == "other test" else data


class Grey16(Images):
    max_value: ClassVar[int] = 16


class OfDomains(Images):
    has_domains: ClassVar[bool] = True


TWO_DOMAINS = {
    "domains": ["a", "b"],
    "train_domains": LABELS[:8] + 1,
    "test_domains": LABELS[8:],
}


def images(wrong: str = "", kind: type[Images] = Images, **arrays: Any) -> Images:
    return kind(**GIVEN | {"wrong": wrong, "changed": ARRAYS | arrays})


@pytest.mark.filterwarnings("error")
def test_data_set_passes_the_check():
    check(images())
    check(images(), classes=2)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (images("order"), "reading it again gives other examples or another order; sort files"),
        (images("labels"), r"y_test has the label \[2\]; must be 0 to 1"),
        (images("types"), r"y_train is torch.int32 of shape \[8\]; must be torch.int64 \[N\]"),
        (images("lengths"), "x_test has 3 examples, y_test has 4"),
        (images("floats"), r"x_train is torch.float32 of shape .*; must be torch.uint8 \[N, heig"),
        (images("names"), "class names must be different, not twice a"),
        (images("owners"), r"owners has shape \[3\]; must be \[8\]"),
        (images("std"), "inputs of a model contain nan or infinity; see dataset.std"),
        (images("other test"), "load_test gives other labels or classes than load"),
        (images("other pixels"), "load_test gives other test examples than load"),
        (images(x_test=PIXELS[8:, 1:]), r"test images have the size \[.*must have one size"),
        (images(owners=LABELS[:9]), r"owners has shape \[9\]; must be \[8\], the number of exam"),
        (images(owners=LABELS[:8] - 1), "owners has the number -1; must be at least 0"),
        (images(test_owners=LABELS[8:] + 0.5), "test_owners is float64; must be integers"),
        (images(ownrs=LABELS[:8]), r"returns ownrs, which .*\(nearest: 'owners'\); it uses x_"),
        (images(validation=LABELS[:2]), "returns validation, but the data set has no dataset.val"),
        (images(train_domains=LABELS[:8]), "returns train_domains, but Images.has_domains is F"),
        (images(kind=OfDomains, domains=["a"]), "returns domains, but OfDomains.has_domains is Tr"),
        (images(kind=OfDomains, **TWO_DOMAINS), "train_domains has the number 2; must be less tha"),
        (images(x_train=PIXELS[:8] // 128), "x_train are 0 to 1, but max_value is 255; scale them"),
        (images(kind=Grey16), r"x_train are 0 to 2\d\d, but max_value is 16; scale them, or set"),
        (images(classes=["a"], y_train=LABELS[:8] * 0, y_test=LABELS[8:] * 0), "only one class"),
        (images(y_train=LABELS[:8] + 5), "labels outside 0..1"),
    ],
)
def test_check_names_the_fault_of_a_data_set(dataset, message):
    fails(dataset, message)


def test_check_compares_the_number_of_classes():
    fails(images(), "has 2 classes, but must have 3", classes=3)


def test_check_warns_of_leaks_and_missing_classes():
    leaky = images(x_test=PIXELS[[0, 1, 8, 9]])
    with pytest.warns(UserWarning, match="2 test examples of 4 equal training examples"):
        check(leaky)
    with pytest.warns(UserWarning, match="1 class without test examples: b"):
        check(images(y_test=LABELS[8:] * 0))
