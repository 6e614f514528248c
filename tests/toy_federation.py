"""A small federation in float64, for exact comparisons. See also `fedexp.testing`.

Five clients have 1 to 8 examples, in batches of 4: numbers of steps differ, last batches are
partial, and one client never fills a batch.
"""

import functools
import inspect
import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict
from torch import nn

from fedexp.algorithms import mixins
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedntd import FedNTD
from fedexp.algorithms.interfaces import Context, Federation, ServerRound, TaskStart
from fedexp.algorithms.local_training import LocalTraining
from fedexp.algorithms.server_optimizers import ServerOptimizer
from fedexp.config import launchers
from fedexp.config.build import Built
from fedexp.config.cohorts import Cohorts, Uniform
from fedexp.config.composition import isolated_hydra
from fedexp.config.options import conf_directories
from fedexp.config.settings import LocalEvaluation, Seeds, Settings, Stop
from fedexp.core.tree import Params, Tree
from fedexp.data.augment import Augmentation
from fedexp.data.changes import DataSchedule
from fedexp.data.datasets import Dataset
from fedexp.data.held_out import Public, Validation
from fedexp.data.partition import Partitioner
from fedexp.data.surrogate import Surrogate
from fedexp.data.tasks import ClassIncremental, OneTask, Scenario
from fedexp.engine.base import Cohort, Trained
from fedexp.engine.hardware import Hardware
from fedexp.figures.pictures import PNG
from fedexp.metrics.forgetting_metric import (
    BackwardTransfer,
    Consistency,
    ForgettingDegree,
    InOutLocal,
    Metrics,
    RoundDrop,
)
from fedexp.models import Model, Output
from fedexp.models.cnn import CNN
from fedexp.testing import ENGINES, train
from fedexp.testing import PROCESS as PROCESS
from fedexp.testing import assemble as assemble
from fedexp.testing import play as play
from fedexp.training import exchange
from fedexp.training.prepare import prepare
from fedexp.training.rounds import play_round as play_round
from fedexp.training.simulation import Simulation
from fedexp.training.state import State

CONF = Path(__file__).parents[1] / "conf"
CONFS = conf_directories()
HARDWARE = {"device": "cpu", "engine": "auto", "precision": "fp32", "cuda_graphs": True}
HARDWARE |= dict.fromkeys(("workers", "threads", "chunk"))
SIMULATED = HARDWARE | {"precision": "fp64"}  # hardware of the simulations in tests
# engines that `make test` compares for every algorithm
PAIR = ("sequential", "vectorised")
engines_compared = pytest.mark.parametrize(
    "engines",
    [pytest.param(PAIR, id="two"), pytest.param(tuple(ENGINES), id="all", marks=pytest.mark.slow)],
)
CLASSES, SIZES = 4, (1, 3, 7, 8, 6)
LARGER = (1, 3, 7, 12, 10)  # up to three batches of 4, where a test counts them
LOCAL = LocalTraining(
    epochs=2, batch_size=4, optimizer="sgd", lr=0.1, lr_decay=0.9, momentum=0.9, weight_decay=1e-3
)
NTD = FedNTD(beta=1.0, tau=2.0, lambda_=1.0, distance="kl", tau_squared=True, mse_reduction="sum")
PLAIN = replace(LOCAL, epochs=1, lr_decay=1.0, momentum=0.0, weight_decay=0.0)
AUGMENTATION = Augmentation(crop_padding=1, padding_mode="zero", flip=True, cutout=2, rotation=0.0)
SETTINGS = Settings(
    seed=0,
    rounds=3,
    num_clients=len(SIZES),
    participation=0.8,
    weighting="examples",
    eval_interval=1,
    targets=[],
    target_fractions=[],
    checkpoint_interval=1,
    data_dir="unused",
    resume=None,
    augment=True,
    test_views=["plain"],
)


NOISE = {"name": "noise", "data_dir": "unused", "mean": (0.4,), "std": (0.3,)}
NOISE |= {"augmentation": AUGMENTATION}
SURROGATE = Surrogate(
    dataset=None,
    options={},
    fraction=0.0,
    classes=None,
    examples=None,
    shards=1,
    server_shards=1,
    total_shards=None,
)

# forgetting_metric=all
ALL = Metrics(
    members=[
        BackwardTransfer(),
        RoundDrop(local=True),
        ForgettingDegree(xi=1e-6),
        InOutLocal(),
        Consistency(),
    ]
)

DROP = RoundDrop(local=False)

# classes 0 and 1, then 2 and 3; two rounds each
TWO_TASKS = ClassIncremental(
    rounds_per_task=2,
    num_tasks=2,
    shuffle_classes=False,
    classes=None,
    split=None,
    evaluate_on="test",
)


class Noise(Dataset):
    """40 training and 20 test images, with 6 x 6 random grey pixels and 4 classes."""

    def read(self) -> dict[str, Any]:
        rng = np.random.default_rng(7)
        images, labels = (
            rng.integers(0, 256, (60, 6, 6, 1), dtype=np.uint8),
            np.arange(60, dtype=np.int64) % CLASSES,
        )
        names = [f"class {c}" for c in range(CLASSES)]
        train = {"x_train": images[:40], "y_train": labels[:40]}
        return train | {"x_test": images[40:], "y_test": labels[40:], "classes": np.array(names)}


class TenClasses(Noise):
    """The same images with labels of 10 classes, of which every client lacks two or more."""

    def read(self) -> dict[str, Any]:
        found = super().read()
        found["y_train"], found["y_test"] = np.arange(40) % 10, np.arange(20) % 10
        return found | {"classes": np.array([f"class {c}" for c in range(10)])}


class Ragged(Partitioner):
    """Partition with the given sizes; the other examples are unused."""

    sizes: tuple[int, ...]

    def assign(self, labels, num_classes, num_clients, rng, owners):
        return np.split(
            rng.permutation(len(labels))[: sum(self.sizes)], np.cumsum(self.sizes)[:-1]
        ), {}


class Normed(Model):
    """A model whose batch norm has running statistics, like torchvision's ResNets."""

    mixes_examples: ClassVar[bool] = True
    vectorises: ClassVar[bool] = True
    reads: ClassVar[str] = "images"

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        return NormedModule(shape[0], num_classes)


class NormedModule(nn.Module):
    def __init__(self, channels: int, num_classes: int):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, 3, 3), nn.BatchNorm2d(3)
        self.classifier = nn.Linear(3, num_classes)

    def forward(self, x: torch.Tensor) -> Output:
        features = self.norm(self.convolution(x)).relu().mean((2, 3))
        return Output(features, self.classifier(features))


class SoftmaxRegression(Model):
    """A convex model: one linear layer on the pixels."""

    mixes_examples: ClassVar[bool] = False
    vectorises: ClassVar[bool] = True
    reads: ClassVar[str] = "images"

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        return SoftmaxRegressionModule(shape, num_classes)


class SoftmaxRegressionModule(nn.Module):
    def __init__(self, shape: tuple[int, int, int], num_classes: int):
        super().__init__()
        self.classifier = nn.Linear(int(np.prod(shape)), num_classes)

    def forward(self, x: torch.Tensor) -> Output:
        features = x.flatten(1)
        return Output(features, self.classifier(features))


NO_SCHEDULE = DataSchedule(partition=[], classes=[], clients=None)
NO_VALIDATION = Validation(fraction=0.0, per_client=False)
SAMPLED, ALL_LOCAL = Uniform(), LocalEvaluation(every=None)


def make_simulation(
    algorithm: FedAvg | None = None,
    local: LocalTraining = LOCAL,
    sizes: tuple[int, ...] = SIZES,
    model: Any = None,
    engine: str = "sequential",
    seeds: Seeds | None = None,
    public: float = 0.0,
    scenario: Scenario | None = None,
    surrogate: float = 0.0,
    forgetting_metric: Any = None,
    dataset: Any = None,
    schedule: DataSchedule = NO_SCHEDULE,
    cohorts: Cohorts = SAMPLED,
    validation: Validation = NO_VALIDATION,
    local_evaluation: LocalEvaluation = ALL_LOCAL,
    **settings: Any,
) -> Simulation:
    """Return a simulation of the small federation. `settings` are changes of SETTINGS."""
    changed = replace(SETTINGS, num_clients=len(sizes), **settings)
    threads = torch.get_num_threads()  # as it is: tests must not change the process that they share
    groups: dict[str, Any] = {
        "dataset": dataset or Noise(**NOISE),
        "scenario": scenario or OneTask(rounds_per_task=changed.rounds),
        "partition": Ragged(sizes=sizes),
        "model": model or CNN(channels=(3,), kernel=3, padding=1, hidden=(8,)),
        "algorithm": algorithm or FedAvg(),
        "forgetting_metric": getattr(forgetting_metric, "members", [forgetting_metric or DROP]),
        "analysis": [],
        "hardware": Hardware(**SIMULATED | {"engine": engine, "threads": threads}),
        "tracker": [],
        "callback": [],
    }
    seeds = seeds or Seeds(partition=0, sampling=0, training=0)
    unlabelled = replace(SURROGATE, fraction=surrogate)
    built = Built(
        settings=changed,
        seeds=seeds,
        local=local,
        public=Public(fraction=public, balanced=True),
        surrogate=unlabelled,
        schedule=schedule,
        cohorts=cohorts,
        validation=validation,
        local_evaluation=local_evaluation,
        values={},
        stop=Stop(patience=None, metric=None, minutes=None),
        **{"server": ServerOptimizer(), "figures": PNG, **groups},
    )
    return prepare(built)


def broadcast(simulation: Simulation, state: State) -> Tree:
    return exchange.broadcast(simulation.algorithm, state.server)


def describe(simulation: Simulation, state: State, cohort: Cohort, trained: Trained) -> ServerRound:
    one = exchange.Exchange(
        simulation, simulation.algorithm, state.server, state.clients, cohort.round
    )
    return one.describe(cohort, trained)


def trained_round(
    algorithm: FedAvg, number: int = 2, **changes: Any
) -> tuple[Simulation, State, Trained, ServerRound]:
    """Train the clients of round `number`.

    Return the simulation, the state before the round, the clients' results, and the round as the
    server's hooks receive it.
    """
    simulation = make_simulation(algorithm, **changes)
    state = play(simulation, number - 1)
    cohort = assemble(simulation, state, number)
    trained = train(simulation.engine, simulation, state, cohort)
    return simulation, state, trained, describe(simulation, state, cohort, trained)


def assert_close(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    """Check that the entries of two trees of tensors differ by at most `atol`."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def assert_engines_play(simulation: Simulation, engines: Sequence[str], rounds: int = 2) -> State:
    """Check that the server is equal after some rounds on each engine, and return the state."""
    first, *others = [play(replace(simulation, engine=ENGINES[name]), rounds) for name in engines]
    for other in others:
        assert_close(other.server, first.server)
    return first


def float64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return standard normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def context(**given: Any) -> Context:
    """Return the context of a client's hooks, empty except for the given fields."""
    one = torch.ones((), dtype=torch.float64)
    return replace(Context({}, {}, {}, {}, {}, 0.1, one, LOCAL, one), **given)


def task_start(federation: Federation, initial: Params) -> TaskStart:
    """Return what `begin_task` may read, with the given fields only."""
    empty: dict[str, Any] = dict.fromkeys(("before", "pixels", "network", "features", "rng"))
    return TaskStart(federation=federation, initial=initial, **empty)


def leaves(params: Params) -> Params:
    """Return copies of the parameters with requires_grad."""
    return {name: value.detach().clone().requires_grad_() for name, value in params.items()}


def stepped(params: Params, loss: torch.Tensor, lr: float = 0.1) -> Params:
    """Return the leaves after one step of gradient descent."""
    grads = torch.autograd.grad(loss, list(params.values()))
    return leaves({k: v - lr * g for (k, v), g in zip(params.items(), grads, strict=True)})


def take_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def detached(params: Params) -> Params:
    return {name: value.detach() for name, value in params.items()}


def flat(params: Params) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([params[name].flatten() for name in sorted(params)])


def composed(*overrides: str) -> Any:
    """Return the configuration that `fedexp <overrides>` would run with, without Hydra's own.

    Hydra composes the chosen options once, and values are set in a copy.
    """
    values = [each for each in overrides if is_value(each)]
    options = tuple(each for each in overrides if each not in values)
    config = pickle.loads(_composed(options))  # copy.deepcopy takes seven times as long
    for override in OverridesParser.create().parse_overrides(values):
        key = override.key_or_group
        if override.is_delete():
            node, _, name = key.rpartition(".")
            with open_dict(config):
                (OmegaConf.select(config, node) if node else config).pop(name)
        else:
            adds = override.is_add() or override.is_force_add()
            OmegaConf.update(config, key, override.value(), force_add=adds)
    return config


def is_value(override: str) -> bool:
    """Whether an override sets or removes a value, not an option."""
    key = override.lstrip("+~").partition("=")[0]
    return "@" not in key and not any((conf / key).is_dir() for conf in CONFS)


def conf_file(name: str) -> Path:
    """Return the file of an option, such as `model/cnn`."""
    return next(path for conf in CONFS if (path := conf / f"{name}.yaml").exists())


# --- which rows of a family are for `make test`

# Hook or declaration -> its defaults, in FedAvg and in the mixins.
DECLARED: dict[str, list[Any]] = {}
for base in (FedAvg, mixins.OnePass, mixins.KeepsPart, mixins.KeepsModel):
    for name, value in vars(base).items():
        if not name.startswith("_"):
            DECLARED.setdefault(name, [None]).append(value)
KEPT = ("client_init", "server_init")
DRAWN = ("host_plan", "personal_broadcast", "roles")
ON_THE_SERVER = ("aggregate", "refine")
LOSSES = ("penalty", "example_loss", "objective", "local_step")
STRUCTURE = ("exchanges", "closing_exchanges", "begin_task", "heads", "training_data")


def kind_of(row: Any) -> frozenset[str]:
    """What an algorithm does otherwise than FedAvg, by the names of hooks and declarations, and
    `public` data."""
    own = own_names(row.cls)
    return own | {"public"} if getattr(row, "public", 0.0) else own


@functools.cache
def own_names(cls: type[FedAvg]) -> frozenset[str]:
    return frozenset(
        name
        for name in DECLARED
        if all(inspect.getattr_static(cls, name, None) is not each for each in DECLARED[name])
    )


def first_of_each_class(*tables: Sequence[Any]) -> dict[str, Any]:
    """Of rows with a class `cls`, the first of each, by the name of the class."""
    rows: dict[str, Any] = {}
    for row in itertools.chain(*tables):
        rows.setdefault(row.cls.__name__, row)
    return rows


def one_of_each_kind(argument: str, rows: Mapping[str, Any], *matters: str) -> pytest.MarkDecorator:
    """Parametrises over rows (name -> row with its class `cls`), the variants among them slow.

    A row is for `make test` where it is the first one that does something otherwise than FedAvg,
    and the first row of all is. So an algorithm with a hook that none before it has is tested at
    once, and a further one of a known kind by `make test-slow`. matters: the hooks that make a
    difference to the test; none given: all. The argument is the row, or its name where it is called
    `name`.
    """
    params, seen = [], set[str]()
    for name, row in rows.items():
        kind = kind_of(row) & set(matters) if matters else kind_of(row)
        marks = pytest.mark.slow if params and kind <= seen else ()
        params.append(pytest.param(name if argument == "name" else row, id=name, marks=marks))
        seen |= kind
    return pytest.mark.parametrize(argument, params)


@functools.cache  # a composition takes 0.1 s
def _composed(overrides: tuple[str, ...]) -> bytes:
    """Return a pickled configuration."""
    with isolated_hydra():
        launchers.register()
        with initialize_config_dir(str(CONF), **launchers.DEFAULTS):
            config = hydra_compose("config", list(overrides))
    OmegaConf.set_struct(config, True)
    return pickle.dumps(config)
