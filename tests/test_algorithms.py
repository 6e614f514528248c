"""Generic checks of every algorithm (one row each), and the losses of FedNTD and FedProx."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.base import FedAvg, masked_mean, overrides
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
from fedexp.algorithms.flashback import Flashback
from fedexp.algorithms.interfaces import Batch
from fedexp.algorithms.local_only import LocalOnly
from fedexp.algorithms.moon import Moon
from fedexp.algorithms.scaffold import Scaffold
from fedexp.core import storage, tree
from fedexp.core.errors import ConfigError
from fedexp.engine.base import Cohort, Engine, ScheduledData
from fedexp.engine.network import LiveNetwork
from fedexp.models import Output
from fedexp.rundir import files
from fedexp.testing import assert_engines_agree, assert_equal, gradient_of, record, train
from fedexp.training.rounds import play_round
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from method_rows import Row, declared
from toy_federation import (
    DRAWN,
    ENGINES,
    KEPT,
    LARGER,
    LOCAL,
    LOSSES,
    ON_THE_SERVER,
    PAIR,
    Normed,
    assemble,
    context,
    describe,
    flat,
    kind_of,
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


def every_engine(first: str) -> pytest.MarkDecorator:
    """Parametrise over engines. Only `first` is not slow."""
    marks = {name: () if name == first else pytest.mark.slow for name in ENGINES}
    params = [pytest.param(engine, id=name, marks=marks[name]) for name, engine in ENGINES.items()]
    return pytest.mark.parametrize("engine", params)


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


def has_own_loss(row: Row) -> bool:
    """Whether a row has another loss than FedAvg, which is the first row."""
    return row is ROWS[0] or bool(kind_of(row) & {*LOSSES})


@rows(lambda row: not row.stops_gradient and has_own_loss(row))
def test_gradient_equals_finite_differences(row):
    """In round 3, away from the initial parameters, where distillation and penalties are flat."""
    simulation = row.simulation(sizes=LARGER)
    gradient_of(simulation, simulation.algorithm.objective)
    if row.cls.penalty is not FedAvg.penalty:
        penalty = simulation.algorithm.penalty
        found = gradient_of(simulation, lambda net, params, batch, ctx: penalty(net, params, ctx))
        assert flat(found).abs().max() > 1e-3


@every_engine(first="sequential")
@one_of_each_kind("row", BY_NAME)
def test_hooks_do_not_modify_their_arguments(row, engine):
    """Server, client states, schedules, plans, data and the frozen network do not change."""
    simulation, state = after_one_round(row.name)
    cohort, data = assemble(simulation, state, 2), simulation.runtime.data
    pixels = {k: getattr(data, k) for k in ("x_train", "y_train", "x_test", "y_test")}
    inputs = {
        "server": state.server,
        "clients": dict(state.clients),
        "states": list(cohort.states),
        "personals": list(cohort.personals),
        "plans": [{k: torch.as_tensor(v) for k, v in plan.items()} for plan in cohort.plans],
        "schedules": [(s.index, s.draws, torch.from_numpy(s.lengths)) for s in cohort.schedules],
        "data": pixels,
        "initial": simulation.initial,
        "network": dict(simulation.runtime.net.module.named_parameters()),
    }
    before = clone(inputs)
    trained = train(engine, simulation, state, cohort)
    messages, about = clone(trained.messages), describe(simulation, state, cohort, trained)
    server = simulation.algorithm.aggregate(state.server, trained.messages, about)
    server = server | {"buffers": state.server["buffers"]}
    kept = clone(server)
    if overrides(simulation.algorithm, "refine"):
        net = LiveNetwork(simulation.runtime.net)
        simulation.algorithm.refine(net, server, trained.messages, about)
    assert_equal(server, kept)
    assert_equal(inputs, before)
    assert_equal(trained.messages, messages)


@every_engine(first="vectorised")
@one_of_each_kind("row", BY_NAME, *KEPT, *DRAWN)
def test_aggregation_ignores_cohort_order(row, engine):
    """Not bit for bit, because vectorised kernels may round by position."""
    simulation, state = after_one_round(row.name)
    cohort, order = assemble(simulation, state, 2), [2, 0, 3, 1]
    parts = (
        cohort.clients,
        cohort.roles,
        cohort.schedules,
        cohort.states,
        cohort.plans,
        cohort.personals,
    )
    permuted = Cohort(2, *([part[i] for i in order] for part in parts))
    straight, turned = (train(engine, simulation, state, c) for c in (cohort, permuted))
    assert_equal(turned.messages, tree.map(lambda leaf: leaf[order], straight.messages), atol=1e-13)
    assert_equal(turned.states, [straight.states[i] for i in order], atol=1e-13)
    assert_equal(turned.losses, straight.losses[order], atol=1e-13)


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


@pytest.mark.parametrize(
    ("error", "interval"),
    [
        pytest.param(KeyboardInterrupt, 1, id="interrupt", marks=pytest.mark.slow),
        pytest.param(RuntimeError, 2, id="crash between checkpoints"),
    ],
)
@one_of_each_kind("row", {row.cls.__name__: row for row in ROWS}, *KEPT, *DRAWN, *ON_THE_SERVER)
def test_resumed_run_equals_uninterrupted_run(row, error, interval, tmp_path):
    """Bit for bit, also if files have rows after the checkpoint."""
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


def test_client_state_persists_between_rounds(tmp_path):
    """Only clients that have participated have a state."""
    simulation = make_simulation(EveryHook(pull=0.1), rounds=6, participation=0.4)
    state = record(simulation, tmp_path, resume=False)
    rows = [line.split(",") for line in (tmp_path / files.CLIENTS).read_text().splitlines()[1:]]
    clients = [int(row[1]) for row in rows]
    expected = {client: clients.count(client) for client in set(clients)}
    assert {client: int(kept["rounds"]) for client, kept in state.clients.items()} == expected
    assert len(set(expected.values())) > 1


def test_stateless_algorithms_keep_no_client_state(tmp_path):
    assert record(make_simulation(FedProx(mu=0.1)), tmp_path, resume=False).clients == {}
    assert not list((tmp_path / "checkpoint").glob("clients/*"))


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
    return torch.stack(
        [torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(z, y.tolist(), strict=True)]
    )


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


def test_masked_mean_without_examples_is_zero():
    """In the vectorised engine, finished clients have batches without examples."""
    assert masked_mean(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 0


def test_fedprox_gradient_is_mu_times_distance():
    """w_{i+1} = w_i - lr * (grad CE(w_i) + mu * (w_i - w_0))."""
    local, mu = replace(LOCAL, epochs=3, momentum=0.0, weight_decay=0.0), 0.7
    simulation = make_simulation(FedProx(mu=mu), local=local, sizes=(10,), participation=1.0)
    state, runtime = simulation.initial_state(), simulation.runtime
    (schedule,) = assemble(simulation, state, 1).schedules
    start = w = state.server["params"]
    for batch in ScheduledData(runtime, schedule).batches():

        def loss(p, batch=batch):
            return F.cross_entropy(runtime.net(p, batch.x).logits, batch.y)

        grads = torch.func.grad(loss)(w)
        w = {k: w[k] - local.lr * (grads[k] + mu * (w[k] - start[k])) for k in w}
    assert_equal(play(simulation, 1).server["params"], w, atol=1e-12)


@pytest.mark.parametrize(
    ("cls", "changes", "key"),
    [
        (FedProx, {"mu": -0.1}, "algorithm.mu"),
        (FedProx, {"mu": float("nan")}, "algorithm.mu"),
        (FedNTD, {"lambda_": 1.1}, "algorithm.lambda_"),
        (FedNTD, {"distance": "l2"}, "algorithm.distance"),
        (FedNTD, {"distance": "mse", "lambda_": 0.5}, "algorithm.lambda_"),
    ],
)
def test_parameters_out_of_range_are_rejected(cls, changes, key):
    values = (NTD if cls is FedNTD else {}) | changes
    with pytest.raises(ConfigError, match=f"^{key}="):
        cls(**values)


def test_fedntd_has_no_gradient_on_the_true_class():
    """The gradient of the label's logit is exactly 0, and the teacher's logit of the label has no
    effect."""
    teacher, student = logits(seed=1), logits(seed=2).requires_grad_()
    not_true = torch.arange(6) != Y[:, None]
    for algorithm in (ntd(tau=2.0), ntd(distance="mse")):
        if algorithm.distance == "kl":
            term = algorithm.distillation(teacher, student, not_true)
            other = algorithm.distillation(teacher.where(not_true, 99.0), student, not_true)
        else:
            term = algorithm.squared_error(teacher, student, not_true, None)
            other = algorithm.squared_error(teacher.where(not_true, 99.0), student, not_true, None)
        (grad,) = torch.autograd.grad(term.sum(), student)
        assert (grad[~not_true] == 0).all()
        assert (grad[not_true] != 0).all()
        assert_equal(other, term)


def test_fedntd_of_two_classes_is_cross_entropy():
    teacher, student, y = (
        logits(classes=2, seed=1),
        logits(classes=2, seed=2).requires_grad_(),
        Y % 2,
    )
    loss, cross_entropy = (
        objective(algorithm, teacher, student, y) for algorithm in (ntd(tau=3.0), FedAvg())
    )
    assert_equal(loss, cross_entropy)
    expected = torch.autograd.grad(cross_entropy, student)
    assert_equal(torch.autograd.grad(loss, student), expected)
