"""Generic checks of every algorithm (one row each), and the losses of FedNTD and FedProx."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.ditto import Ditto
from fedexp.algorithms.fedala import FedALA
from fedexp.algorithms.fedalign import FedAlign
from fedexp.algorithms.fedavgm import FedAvgM
from fedexp.algorithms.fedbn import FedBN
from fedexp.algorithms.fedcurv import FedCurv
from fedexp.algorithms.feddecorr import FedDecorr
from fedexp.algorithms.feddf import FedDF
from fedexp.algorithms.feddyn import FedDyn
from fedexp.algorithms.fedexp_step import FedExPStep
from fedexp.algorithms.fedfomo import FedFOMO
from fedexp.algorithms.fedgkd import FedGKD
from fedexp.algorithms.fedka import FedKA
from fedexp.algorithms.fedkd import FedKD
from fedexp.algorithms.fedlc import FedLC
from fedexp.algorithms.fedlmd import FedLMD
from fedexp.algorithms.fedlwf import FedLwF
from fedexp.algorithms.fedmultihead import FedMultiHead
from fedexp.algorithms.fednova import FedNova
from fedexp.algorithms.fedntd import FedNTD
from fedexp.algorithms.fedpac import FedPAC
from fedexp.algorithms.fedproj import FedProj
from fedexp.algorithms.fedproto import FedProto
from fedexp.algorithms.fedprox import FedProx
from fedexp.algorithms.fedreg import FedReg
from fedexp.algorithms.fedrep import FedRep
from fedexp.algorithms.fedrod import FedRoD
from fedexp.algorithms.fedrs import FedRS
from fedexp.algorithms.fedsam import FedSAM
from fedexp.algorithms.fedsmoo import FedSMOO
from fedexp.algorithms.fedspeed import FedSpeed
from fedexp.algorithms.fedssd import FedSSD
from fedexp.algorithms.fedvls import FedVLS
from fedexp.algorithms.flashback import Flashback
from fedexp.algorithms.heads import HEAD
from fedexp.algorithms.interfaces import Batch
from fedexp.algorithms.local_only import LocalOnly
from fedexp.algorithms.moon import Moon
from fedexp.algorithms.scaffold import Scaffold
from fedexp.core import storage, tree
from fedexp.core.errors import ConfigError
from fedexp.engine.base import Engine, ScheduledData
from fedexp.models import Output
from fedexp.rundir import files
from fedexp.testing import assert_engines_agree, assert_equal, record, train
from fedexp.training.rounds import play_round
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from fedexp.training.trial import check_padding
from method_rows import Row, declared, stream
from toy_federation import (
    DRAWN,
    ENGINES,
    KEPT,
    LARGER,
    LOCAL,
    LOSSES,
    NOISE,
    ON_THE_SERVER,
    PAIR,
    SIZES,
    Normed,
    TenClasses,
    assemble,
    context,
    flat,
    make_simulation,
    one_of_each_kind,
    play,
    random,
)


@dataclass(frozen=True, kw_only=True)
class EveryHook(FedAvg):
    """An algorithm that uses every hook and has server and client states."""

    pull: float

    def server_init(self, params, federation):
        return {"params": params, "mean_first": next(iter(params.values())).new_zeros(())}

    def client_init(self, params, federation):
        return {"rounds": torch.zeros((), dtype=torch.int64), "last": params}

    def host_plan(self, federation, client, rng):
        return {"extra": rng.choice(federation.parts[client], 3), "role": client}

    def client_setup(self, net, data, ctx):
        x, _ = data.take(ctx.plan["extra"])
        return {"x": x, "teacher": net(ctx.server["params"], x).features}

    def penalty(self, net, params, ctx):
        return (
            self.pull * ((net(params, ctx.setup["x"]).features - ctx.setup["teacher"]) ** 2).mean()
        )

    def transform_grads(self, grads, params, batch, ctx):
        strength = self.pull * (1 + ctx.plan["role"]) / (1 + ctx.client["rounds"] + batch.step)
        return {
            k: grads[k] + strength * (params[k] - ctx.client["last"][k]) / ctx.steps for k in grads
        }

    def finish(self, net, params, data, ctx):
        seen = torch.zeros_like(ctx.steps)
        for batch in data.batches():
            seen = seen + (len(batch.y) if batch.mask is None else batch.mask.sum())
        return {"params": params, "seen": seen}, {
            "rounds": ctx.client["rounds"] + 1,
            "last": params,
        }

    def aggregate(self, server, messages, round):
        server = super().aggregate(server, messages, round)
        return server | {
            "mean_first": (messages["seen"] * round.weights).sum() / round.weights.sum()
        }

    def refine(self, net, server, messages, round):
        return server | {
            "params": tree.map(lambda leaf: leaf * (1 - 0.01 * self.pull), server["params"])
        }


@dataclass(frozen=True, kw_only=True)
class SignDescent(FedAvg):
    """Overrides the local step, which replaces the optimizer of both engines."""

    scale: float

    def local_step(self, net, params, memory, batch, ctx):
        def loss(p):
            return self.objective(net, p, batch, ctx)

        grads, value = torch.func.grad_and_value(loss)(params)
        return (
            {k: params[k] - self.scale * ctx.lr * torch.tanh(50 * grads[k]) for k in params},
            memory,
            value,
        )


NTD = {
    "beta": 1.0,
    "tau": 1.0,
    "lambda_": 1.0,
    "distance": "kl",
    "tau_squared": True,
    "mse_reduction": "sum",
}


def ntd_row(silent: tuple[str, ...] = (), rejected: tuple[str, ...] = (), **changes: Any) -> Row:
    """FedNTD with changes of the parameters above."""
    live = NTD | changes
    pairs = {"distance": ("kl", "mse"), "mse_reduction": ("sum", "mean")}
    other = {name: pair[pair.index(live[name]) - 1] for name, pair in pairs.items()}
    return Row(FedNTD, live=live, zero={"beta": 0.0}, other=other, silent=silent, rejected=rejected)


KA = {
    "beta": 0.5,
    "dominance": 0.4,
    "max_anchors": 2,
    "anchors": "both",
    "selection": "hard",
    "reduction": "sum",
    "norm": "squared",
}
KA_OTHER = {
    "max_anchors": 1,
    "anchors": "missing",
    "selection": "proficient",
    "reduction": "mean",
    "norm": "per_anchor",
}
FLASHBACK = {"gamma": 0.5, "epochs_on_server": 2, "on_clients": True, "on_server": True}
DF = {"lr": 0.05, "batch_size": 3, "clip": 0.05, "epochs_on_server": 2}
DF |= {"steps": 12, "patience": 4, "interval": 2, "validation": 0.5}
DF_OTHER = {"batch_size": 2, "epochs_on_server": 1, "steps": 2, "patience": 1, "interval": 3}
KL, MSE = ("mse_reduction",), ("tau", "tau_squared")  # without effect with the other distance
SHIPPED = [
    Row(FedAvg, zero={}),
    Row(FedProx, live=dict(mu=0.5), zero=dict(mu=0.0)),
    ntd_row(silent=("tau_squared", *KL)),  # 1^2 = 1
    ntd_row(silent=KL, tau=2.0),
    ntd_row(silent=KL, rejected=("distance",), tau=2.0, lambda_=0.0),
    ntd_row(silent=KL, rejected=("distance",), tau=2.0, lambda_=0.5, tau_squared=False),
    ntd_row(silent=MSE, rejected=("lambda_",), beta=0.05, tau=2.0, distance="mse"),
    ntd_row(silent=MSE, rejected=("lambda_",), distance="mse", mse_reduction="mean"),
    Row(FedAvgM, live=dict(beta=0.5), zero=dict(beta=0.0)),
    Row(FedNova, live=dict(variant="plain"), other=dict(variant="ccvr")),
    Row(FedNova, live=dict(variant="ccvr"), other=dict(variant="ccvr_frozen")),
    Row(FedNova, live=dict(variant="ccvr_frozen"), other=dict(variant="plain")),
    Row(
        Scaffold,
        live=dict(divisor="effective", variates="uniform"),
        other=dict(divisor="steps", variates="examples"),
    ),
    Row(
        Scaffold,
        live=dict(divisor="steps", variates="examples"),
        other=dict(divisor="effective", variates="uniform"),
    ),
    Row(
        Moon, live=dict(mu=1.0, tau=0.5, projection=0), zero=dict(mu=0.0), other=dict(projection=3)
    ),
    Row(Moon, live=dict(mu=1.0, tau=0.5, projection=4), other=dict(projection=3)),
    Row(
        FedCurv,
        live=dict(lambda_=5.0, samples=4, estimator="batch"),
        zero=dict(lambda_=0.0),
        other=dict(samples=0, estimator="sample"),
    ),
    Row(
        FedCurv,
        live=dict(lambda_=5.0, samples=500, estimator="sample"),
        zero=dict(lambda_=0.0),
        other=dict(samples=3, estimator="batch"),
    ),
    Row(FedDyn, live=dict(alpha=0.5, clip=1.0, per_client_alpha=False)),
    Row(FedDyn, live=dict(alpha=0.5, clip=0.0, per_client_alpha=True)),
    Row(FedKD, live=dict(beta=1.0, tau=2.0), zero=dict(beta=0.0)),
    Row(FedReg, live=dict(gamma=0.5, eta_s=0.1, eta_ratio=0.5, ascent=2), other=dict(ascent=1)),
    Row(FedKA, live=KA, zero=dict(beta=0.0), other=KA_OTHER),
    Row(
        FedKA,
        live=KA | dict(selection="random"),
        zero=dict(beta=0.0),
        other=KA_OTHER | dict(selection="hard"),
    ),
    Row(
        FedKA,
        live=KA | dict(anchors="missing"),
        zero=dict(beta=0.0),
        other=KA_OTHER | dict(anchors="both"),
        silent=("selection",),
    ),
    Row(
        Flashback,
        live=FLASHBACK,
        zero=dict(on_clients=False, on_server=False),
        other=dict(epochs_on_server=1),
        public=0.15,
    ),
    Row(
        Flashback,
        live=FLASHBACK | dict(on_server=False),
        zero=dict(on_clients=False),
        other=dict(epochs_on_server=1),
        silent=("epochs_on_server",),
        public=0.15,
    ),
    Row(
        FedDF,
        live=DF | dict(epochs_on_server=2),
        other=DF_OTHER,
        public=0.15,
        silent=("steps", "patience", "interval", "validation"),
    ),
    Row(
        FedDF,
        live=DF | dict(epochs_on_server=0, lr=0.02, steps=24, patience=12, interval=1),
        other=DF_OTHER | dict(epochs_on_server=1),
        public=0.15,
    ),
    Row(
        FedALA,
        live=dict(eta=1.0, part=0.8, threshold=0.001, max_passes=14),
        other=dict(threshold=10.0, max_passes=3),
    ),
    Row(
        FedAlign, live=dict(mu=0.5, width=0.4, clip=0.8), other=dict(width=1.0), stops_gradient=True
    ),
    Row(FedRoD, live=dict(gamma=1.0), zero=dict(gamma=0.0), stops_gradient=True),
    Row(
        FedFOMO,
        live=dict(models=1, validation=0.4, epsilon=1.0, epsilon_decay=0.1, distance="l1"),
        # one helps at most
        other=dict(models=2, epsilon=0.0, epsilon_decay=0.9, distance="l2"),
        silent=("distance",),
    ),
    Row(
        FedFOMO,
        live=dict(models=3, validation=0.4, epsilon=1.0, epsilon_decay=0.1, distance="l1"),
        other=dict(models=1, epsilon=0.0, epsilon_decay=0.9, distance="l2"),
        silent=("epsilon", "epsilon_decay"),
    ),  # all are sent
    Row(
        FedFOMO,
        live=dict(
            models=1, validation=0.4, epsilon=1.0, epsilon_decay=0.1, distance="l1", federations=2
        ),
        other=dict(models=2, epsilon=0.0, epsilon_decay=0.9, distance="l2", federations=1),
    ),
    Row(FedPAC, live=dict(lambda_=1.0, head_lr=0.2, head_epochs=1), other=dict(head_epochs=2)),
    Row(FedLMD, live=dict(beta=1.0, tau=2.0, teacher=True), zero=dict(beta=0.0)),
    Row(FedLMD, live=dict(beta=1.0, tau=2.0, teacher=False), zero=dict(beta=0.0)),
    Row(
        FedVLS,
        live=dict(lambda_=1.0, mu=0.5, variant="released"),
        other=dict(variant="paper"),
        dataset=TenClasses(**NOISE),
    ),
    Row(
        FedVLS,
        live=dict(lambda_=1.0, mu=0.5, variant="paper"),
        other=dict(variant="released"),
        dataset=TenClasses(**NOISE),
    ),
    Row(
        FedDecorr,
        live=dict(beta=0.5, variant="released"),
        zero=dict(beta=0.0),
        other=dict(variant="paper"),
    ),
    Row(
        FedDecorr,
        live=dict(beta=0.5, variant="paper"),
        zero=dict(beta=0.0),
        other=dict(variant="released"),
    ),
    Row(FedLC, live=dict(tau=1.0), zero=dict(tau=0.0)),
    Row(FedRS, live=dict(alpha=0.4), zero=dict(alpha=1.0)),
    Row(FedSAM, live=dict(rho=0.3), zero=dict(rho=0.0)),
    Row(FedExPStep, live=dict(eps=1e-4)),
    Row(
        FedGKD, live=dict(gamma=1.0, tau=2.0, models=2), zero=dict(gamma=0.0), other=dict(models=1)
    ),
    Row(FedSSD, live=dict(m_max=1.0, threshold=0.02), zero=dict(m_max=0.0), public=0.2),
    Row(
        FedProj,
        live=dict(
            tau=2.0,
            lr=0.02,
            batch_size=4,
            epochs_on_server=2,
            memory=5,
            memory_batch=4,
            warmup=1,
        ),
        other=dict(batch_size=3, epochs_on_server=1, memory=6, memory_batch=3, warmup=2),
        public=0.15,
    ),
    Row(FedSpeed, live=dict(rho=0.3, lambda_=0.5, alpha=0.8, clip=1.0), other=dict(clip=0.0)),
    Row(FedSMOO, live=dict(rho=0.3, lambda_=0.5, clip=1.0), other=dict(clip=0.0)),
    Row(FedRep, live=dict(head_epochs=1), other=dict(head_epochs=2)),
    Row(FedBN, model=Normed()),
    Row(Ditto, live=dict(lambda_=0.5), personal=True),
    Row(FedProto, live=dict(lambda_=1.0)),
    Row(LocalOnly, personal=True),
    *declared("ONE_TASK"),
]
ROWS = [
    *SHIPPED,
    Row(EveryHook, live=dict(pull=0.5), zero=dict(pull=0.0)),
    Row(SignDescent, live=dict(scale=0.5)),
]
FIRST = {row.cls: row for row in reversed(ROWS)}
BY_NAME = {row.name: row for row in ROWS}


def rows(chosen: Callable[[Row], bool] = lambda row: True) -> pytest.MarkDecorator:
    """Parametrise over rows. Only the first row of an algorithm is not slow."""
    marks = {True: (), False: pytest.mark.slow}
    params = [
        pytest.param(row, id=row.name, marks=marks[row is FIRST[row.cls]])
        for row in ROWS
        if chosen(row)
    ]
    return pytest.mark.parametrize("row", params)


@rows()
def test_padding_does_not_change_a_step(row):
    simulation = row.simulation()
    check_padding(simulation, simulation.initial_state())
    check_padding(simulation, play(simulation, 1))


def trajectory(simulation, rounds=3, personal=False) -> Iterator[torch.Tensor]:
    """Yield all parameters after each round as one vector.

    personal: use the clients' personal models.
    """
    state, federation = simulation.initial_state(), simulation.stages[0].federation
    for _ in range(rounds):
        state.advance(play_round(simulation, state))
        models = [state.server["params"]]
        if personal:
            algorithm = simulation.algorithm
            kept = [
                state.clients.get(c, simulation.first_client_state(algorithm, federation))
                for c in range(5)
            ]
            models = [
                algorithm.personal_model(state.server, c, own, federation)
                for c, own in enumerate(kept)
            ]
        yield torch.cat([flat(model) for model in models])


def differ(some, others, by) -> bool:
    """Return whether two trajectories differ by more than `by` after any round."""
    return any(
        a.shape != b.shape or (a - b).abs().max() > by for a, b in zip(some, others, strict=False)
    )


def clone(value):
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


# --- the generic checks


@functools.cache
def after_one_round(name: str) -> tuple[Simulation, State]:
    """Return a row's simulation and its state, for tests that change neither.

    In round 2 there are teachers and client states, and one client of four is new.
    """
    simulation = BY_NAME[name].simulation()
    return simulation, play(simulation, 1)


@rows()
def test_vectorised_engine_equals_sequential_engine(row):
    assert_engines_agree(*after_one_round(row.name), PAIR)


# methods and functions that need values of a tensor
WAITING = (
    *("__array__", "__bool__", "__contains__", "__float__", "__index__", "__int__", "cpu", "item"),
    *("allclose", "argwhere", "equal", "is_nonzero", "masked_select", "nonzero", "numpy"),
    *("tolist", "unique"),
)


class NoWaiting(TorchFunctionMode):
    """Rejects calls that would wait for a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        keys = tree_leaves(args[1:]) if name == "__getitem__" else ()
        by_mask = any(getattr(key, "dtype", None) == torch.bool for key in keys)
        waits = name in WAITING or by_mask
        assert not waits, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


def test_waiting_calls_are_found():
    x = torch.arange(3)
    for wait in (torch.Tensor.item, bool, float, lambda one: one.cpu(), lambda one: x[x == one]):
        with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
            wait(torch.ones(()))


@rows()
def test_training_never_waits_for_the_device(row):
    """The CPU of the vectorised engine launches the work of all clients ahead of the device."""
    simulation, state = after_one_round(row.name)
    cohort = assemble(simulation, state, 2)
    with NoWaiting():
        train(ENGINES["vectorised"], simulation, state, cohort, evaluate_local=True)


@one_of_each_kind("row", BY_NAME, *KEPT, *DRAWN)
def test_all_engines_give_the_same_rounds(row):
    simulation = row.simulation()
    state = simulation.initial_state()
    for _ in range(2):
        assert_engines_agree(simulation, state, tuple(ENGINES))
        state.advance(play_round(simulation, state))


@one_of_each_kind(
    "row", {name: row for name, row in BY_NAME.items() if row.zero is not None}, *KEPT, *LOSSES
)
def test_zero_weight_gives_fedavg(row):
    expected = play(row.simulation(FedAvg())).server["params"]
    assert_equal(play(row.simulation(row.make(**row.zero))).server["params"], expected, atol=1e-12)


@one_of_each_kind(
    "row",
    {name: row for name, row in BY_NAME.items() if row.cls is not FedAvg},
    *KEPT,
    *LOSSES,
    "transform_grads",
)
def test_changing_any_option_changes_the_trained_model(row):
    """The result differs from FedAvg's within three rounds."""

    def rounds_of(algorithm: FedAvg | None = None) -> Iterator[torch.Tensor]:
        return trajectory(row.simulation(algorithm, sizes=LARGER), personal=row.personal)

    result = list(rounds_of())
    assert differ(rounds_of(FedAvg()), result, by=1e-5)
    for name in row.live:
        if name in row.rejected:
            with pytest.raises(ConfigError, match="algorithm"):
                row.make(**{name: row.changed(name)})
            continue
        other = rounds_of(row.make(**{name: row.changed(name)}))
        if name in row.silent:
            assert all(map(torch.equal, other, result)), f"{name} should not matter here"
        else:
            assert differ(other, result, by=1e-7), f"{name} does not matter"


@pytest.mark.parametrize(
    "cls", dict.fromkeys(row.cls for row in SHIPPED), ids=lambda cls: cls.__name__
)
def test_every_option_of_every_algorithm_is_varied(cls):
    names = {f.name for f in fields(cls)} - {f.name for f in fields(FedAvg)}
    alive = {
        name
        for row in SHIPPED
        if row.cls is cls
        for name in row.live.keys() - {*row.silent, *row.rejected}
    }
    assert alive == names


# --- save and resume


@dataclass(frozen=True)
class Stopping(Engine):
    """An engine that fails in the middle of a round."""

    engine: Any
    last_rate: float  # learning rate of the last round that it plays
    error: type[BaseException]

    def train(self, shared, cohort, evaluate_local):
        if shared.lr < self.last_rate:
            raise self.error
        return self.engine.train(shared, cohort, evaluate_local)


def tables(directory):
    """Return the tables of a run without the columns of times."""
    result = {}
    for name in (files.ROUNDS, "class_accuracy.csv", files.CLIENTS):
        header, *rows = [line.split(",") for line in (directory / name).read_text().splitlines()]
        keep = [
            i for i, column in enumerate(header) if not column.endswith(("seconds", "per_second"))
        ]
        result[name] = [[row[i] for i in keep] for row in (header, *rows)]
    return result


@one_of_each_kind("row", {row.cls.__name__: row for row in ROWS}, *KEPT, *DRAWN, *ON_THE_SERVER)
def test_resumed_run_equals_uninterrupted_run(row, tmp_path):
    """Bit for bit, also if files have rows after the checkpoint."""
    check_resumed(row, RuntimeError, 2, tmp_path)


def test_interrupted_run_resumes_after_its_last_round(tmp_path):
    check_resumed(ROWS[0], KeyboardInterrupt, 1, tmp_path)


def check_resumed(row, error, interval, tmp_path):
    """interval: the rounds between two checkpoints."""
    simulation = row.simulation(rounds=5, participation=0.4, checkpoint_interval=interval)
    whole = record(simulation, tmp_path / "whole", resume=False)
    stopping = Stopping(simulation.engine, LOCAL.lr_at(3), error)
    with pytest.raises(error):
        record(replace(simulation, engine=stopping), tmp_path / "parts", resume=False)
    assert (
        storage.load_tree(tmp_path / "parts" / files.CHECKPOINT)["round"] == {1: 3, 2: 2}[interval]
    )
    resumed = record(row.simulation(rounds=5, participation=0.4), tmp_path / "parts", resume=True)
    assert_equal(resumed.server, whole.server)
    assert resumed.clients.keys() == whole.clients.keys()
    assert_equal(dict(resumed.clients), dict(whole.clients))
    assert (resumed.record.curve, resumed.examples, resumed.status) == (
        whole.record.curve,
        whole.examples,
        "completed",
    )
    assert tables(tmp_path / "parts") == tables(tmp_path / "whole")


# --- losses against formulas


def logits(rows=5, classes=6, scale=2.0, seed=0, dtype=torch.float64):
    return (scale * random(rows, classes, seed=seed)).to(dtype)


def objective(algorithm, teacher, student, y, mask=None):
    """Return the objective of a model whose only parameters are its logits."""

    def net(params, x):
        return Output(x, params["logits"])

    ctx = context(server={"params": {"logits": teacher}})
    return algorithm.objective(
        net, {"logits": student}, Batch(torch.zeros(len(y)), y, mask, 0), ctx
    )


def ntd(**changes):
    return FedNTD(**NTD | changes)


def without_label(z, y):
    """Return the C - 1 logits of the other classes for each row."""
    others = torch.arange(z.shape[1]) != y[:, None]  # torch 2.6 has no y.tolist() inside grad
    return z[others].view(len(z), -1)


def kl(teacher, student, tau):
    loss = torch.nn.KLDivLoss(reduction="batchmean")
    return loss(F.log_softmax(student / tau, dim=1), F.softmax(teacher / tau, dim=1))


Y = torch.tensor([0, 5, 2, 2, 1])


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("tau_squared", [True, False])
@pytest.mark.parametrize("lambda_", [0.0, 0.3, 1.0])
def test_fedntd_equals_kl_of_gathered_logits(tau, tau_squared, lambda_):
    teacher, student, scale = logits(seed=1), logits(seed=2), tau**2 if tau_squared else 1.0
    not_true = kl(without_label(teacher, Y), without_label(student, Y), tau)
    whole = kl(teacher, student, tau)
    expected = F.cross_entropy(student, Y) + 0.7 * scale * (
        (1 - lambda_) * whole + lambda_ * not_true
    )
    algorithm = ntd(beta=0.7, tau=tau, tau_squared=tau_squared, lambda_=lambda_)
    assert_equal(objective(algorithm, teacher, student, Y), expected, atol=1e-13)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "mask", [None, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)]
)
def test_fedntd_mse_equals_loop(reduction, mask):
    teacher, student, rows = logits(seed=1), logits(seed=2), 5 if mask is None else 3
    total = sum(
        (float(teacher[i, c]) - float(student[i, c])) ** 2
        for i in range(rows)
        for c in range(6)
        if c != Y[i]
    )
    total /= rows * 5 if reduction == "mean" else 1
    expected = F.cross_entropy(student[:rows], Y[:rows]) + 0.2 * total
    algorithm = ntd(beta=0.2, distance="mse", mse_reduction=reduction)
    assert_equal(objective(algorithm, teacher, student, Y, mask), expected, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "row", [row for row in SHIPPED if row.cls is FedNTD], ids=lambda row: row.name
)
def test_fedntd_is_finite_for_extreme_logits(row, dtype):
    teacher, student = (
        logits(scale=1e4, seed=1, dtype=dtype),
        logits(scale=1e4, seed=2, dtype=dtype).requires_grad_(),
    )
    loss = objective(row.make(), teacher, student, Y)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, student)[0].isfinite().all()


# --- whole rounds against a plain loop


def distilled(old, z):
    """Return -sum_i softmax(old / 2)_i log softmax(z / 2)_i, averaged over the batch."""
    return -(F.softmax(old / 2, 1) * F.log_softmax(z / 2, 1)).sum(1).mean()


# name -> algorithm, what its clients add to the cross-entropy: f(logits, teacher's logits, labels)
PLAIN_LOOPS: dict[str, tuple[FedAvg, Any]] = {
    "FedAvg": (FedAvg(), lambda z, t, y: 0),
    "FedProx": (FedProx(mu=0.7), lambda z, t, y: 0),
    "Scaffold": (Scaffold(divisor="steps", variates="uniform"), lambda z, t, y: 0),
    "Scaffold by examples": (Scaffold(divisor="steps", variates="examples"), lambda z, t, y: 0),
    "FedKD": (FedKD(beta=0.5, tau=2.0), lambda z, t, y: 0.5 * 4 * kl(t, z, 2.0)),
    "FedNTD": (
        FedNTD(**NTD | {"tau": 2.0}),
        lambda z, t, y: 4 * kl(without_label(t, y), without_label(z, y), 2.0),
    ),
    "FedAvgM": (FedAvgM(beta=0.6), lambda z, t, y: 0),
    "FedLwF": (FedLwF(lambda_d=0.5, temperature=2.0), lambda z, t, y: 0.5 * distilled(t, z)),
    # the loss of the second task's head instead
    "FedMultiHead": (
        FedMultiHead(),
        lambda z, t, y: F.cross_entropy(z[:, 2:], y - 2) - F.cross_entropy(z, y),
    ),
}


@pytest.mark.parametrize("name", PLAIN_LOOPS)
def test_two_rounds_equal_a_plain_loop(name):
    """Momentum SGD with weight decay from the received model, then a mean weighted by n_k. The
    teacher is the received model, or with FedLwF, the model after the first task. The server's step
    is v <- beta v + (w - mean), w <- w - v, with beta = 0 except in FedAvgM. FedMultiHead's server
    restores the other task's head."""
    algorithm, term = PLAIN_LOOPS[name]
    in_tasks = name in ("FedLwF", "FedMultiHead")
    simulation = stream(algorithm) if in_tasks else make_simulation(algorithm)
    state = play(simulation, 2)
    old, start, net = state.server["params"], state.server["params"], simulation.runtime.net
    share = [1 / simulation.settings.num_clients] * simulation.settings.num_clients
    if name == "Scaffold by examples":
        share = simulation.stages[0].federation.weights / sum(SIZES)
    corrects = isinstance(algorithm, Scaffold)
    variates = {k: v["c"] for k, v in state.clients.items()} if corrects else {}
    zeros = tree.zeros_like(start)
    mean, v = state.server.get("c", zeros), state.server.get("v", zeros)
    beta = 0.6 if name == "FedAvgM" else 0.0
    for number in (3, 4):
        cohort, lr, models = assemble(simulation, state, number), simulation.lr_at(number), []
        moved = mean
        for client, schedule in zip(cohort.clients, cohort.schedules, strict=True):
            w, memory, own = start, zeros, variates.get(client, zeros)
            for batch in ScheduledData(simulation.runtime, schedule).batches():
                teacher = net(old if name == "FedLwF" else start, batch.x).logits

                def loss(p, batch=batch, teacher=teacher, start=start):
                    z = net(p, batch.x).logits
                    far = sum(((p[k] - start[k]) ** 2).sum() for k in p)
                    pull = 0.35 * far if name == "FedProx" else 0
                    return F.cross_entropy(z, batch.y) + term(z, teacher, batch.y) + pull

                grads = torch.func.grad(loss)(w)
                changed = {k: grads[k] - own[k] + mean[k] + 1e-3 * w[k] for k in w}
                memory = {k: 0.9 * memory[k] + changed[k] for k in w}
                w = {k: w[k] - lr * memory[k] for k in w}
            models.append(w)
            if corrects:
                new = {k: (start[k] - w[k]) / (lr * schedule.steps) for k in w}
                moved = {k: moved[k] + share[client] * (new[k] - mean[k]) for k in w}
                variates[client] = {k: own[k] + new[k] - mean[k] for k in w}
        mean, parts = moved, simulation.stage_of(number).federation.parts
        sizes = [len(parts[client]) for client in cohort.clients]
        pairs = list(zip(sizes, models, strict=True))
        average = {k: sum(n * w[k] for n, w in pairs) / sum(sizes) for k in start}
        if name == "FedMultiHead":
            average |= {k: torch.cat([start[k][:2], average[k][2:]]) for k in HEAD}
        v = {k: beta * v[k] + start[k] - average[k] for k in start}
        start = {k: start[k] - v[k] for k in start}
        state.advance(play_round(simulation, state))
        assert_equal(state.server["params"], start, atol=1e-12)
