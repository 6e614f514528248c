"""Methods for several tasks: generic checks over two tasks, then each method against independent
numbers."""

import functools
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.cfed import CFeD, Learner, Reviewer, Student
from fedexp.algorithms.feddmc import Consolidation, FedDMC
from fedexp.algorithms.fedewc import FedEWC
from fedexp.algorithms.fedlwf import FedLwF
from fedexp.algorithms.fedmultihead import FedMultiHead
from fedexp.algorithms.heads import HEAD
from fedexp.algorithms.mixins import OnePass
from fedexp.config.options import conf_directories
from fedexp.config.values import find_class
from fedexp.core import storage, tree
from fedexp.engine.base import ClientRuntime, Shared
from fedexp.engine.network import LiveNetwork
from fedexp.rundir import files
from fedexp.training.rounds import play_round
from fedexp.training.trial import check_padding
from method_rows import TaskRow as Row
from method_rows import declared, stream
from test_algorithms import SHIPPED, assert_equal, differ, record, tables
from toy_federation import (
    CLASSES,
    ENGINES,
    KEPT,
    LOCAL,
    STRUCTURE,
    TWO_TASKS,
    SoftmaxRegression,
    assemble,
    broadcast,
    context,
    describe,
    detached,
    engines_compared,
    first_of_each_class,
    flat,
    leaves,
    one_of_each_kind,
    play,
    stepped,
    take_step,
    task_start,
)

ADAM = replace(LOCAL, optimizer="adam", lr=0.01)


CFED = dict(
    lambda_d=0.5,
    temperature=2.0,
    review_fraction=0.4,
    server_distillation=False,
    server_batch_size=2,
)
DMC = dict(
    targets="split",
    student="initial",
    new_model="initial",
    epochs_factor=2,
    rate_factor=2.0,
    whole_set=False,
)
DMC_OTHER = dict(targets="added", student="global", new_model="old", epochs_factor=1)
ROWS = [
    Row(FedLwF, dict(lambda_d=0.5, temperature=2.0), zero=dict(lambda_d=0.0)),
    Row(
        FedEWC,
        dict(lambda_=10.0, fisher="old_tasks"),
        zero=dict(lambda_=0.0),
        other=dict(fisher="released"),
    ),
    Row(
        FedEWC,
        dict(lambda_=10.0, fisher="released"),
        zero=dict(lambda_=0.0),
        other=dict(fisher="old_tasks"),
    ),
    Row(FedMultiHead, at_once=True),
    Row(
        CFeD,
        CFED,
        zero=dict(review_fraction=0.0),
        other=dict(review_fraction=1.0),
        silent=("server_batch_size",),
    ),
    Row(
        CFeD,
        CFED | dict(server_distillation=True),
        other=dict(review_fraction=1.0, server_batch_size=1),
        at_once=True,
    ),
    Row(FedDMC, DMC, other=DMC_OTHER),
    Row(
        FedDMC,
        DMC | dict(targets="added", student="global", whole_set=True),
        other=dict(targets="split", student="initial", new_model="old", epochs_factor=1),
    ),
    *declared("ROWS"),
]
EVERY = [*ROWS, *declared("OF_MODELS")]
FIRST = first_of_each_class(EVERY)
BY_NAME = {row.name: row for row in EVERY}
every_row = pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row in FIRST.values() else pytest.mark.slow)
        for row in EVERY
    ],
)


def test_every_method_for_tasks_has_generic_tests():
    """The row is here, or in test_algorithms if the algorithm needs no tasks."""
    paths = [path for conf in conf_directories() for path in (conf / "algorithm").glob("*.yaml")]
    targets = {yaml.safe_load(path.read_text()).get("_target_") for path in paths} - {None}
    classes = {find_class(target, "algorithm") for target in targets}
    for_tasks = {cls for cls in classes if "none" not in cls.scenarios}
    assert for_tasks == {row.cls for row in EVERY}
    assert classes - for_tasks <= {row.cls for row in SHIPPED}


# --- generic checks


@dataclass(frozen=True)
class Played:
    """A round of both tasks: its result, the server after it, and the training examples that were
    read in it."""

    result: Any
    server: Any
    read: set[int]

    @property
    def compared(self) -> tuple[Any, ...]:
        return self.server, self.result.losses, self.result.bytes_up, self.result.bytes_down


def four_rounds(simulation) -> list[Played]:
    """Play two tasks, including the exchanges between them."""
    state, rounds, load = simulation.initial_state(), [], ClientRuntime.load_train
    for _ in range(4):
        read: set[int] = set()

        def noting(self, index, draws, read=read):
            read.update(index.flatten().tolist())
            return load(self, index, draws)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ClientRuntime, "load_train", noting)
            result = play_round(simulation, state)
        state.advance(result)
        rounds.append(Played(result, state.server, read))
    return rounds


@functools.cache
def played(name: str) -> list[Played]:
    """Play the rounds of a row on the sequential engine, once for all tests of them."""
    return four_rounds(BY_NAME[name].simulation())


@engines_compared
@every_row
def test_engines_give_the_same_server_state_in_every_round(row, engines):
    expected = [each.compared for each in played(row.name)]
    for name in engines[1:]:
        simulation = on_engine(row.simulation(), name)
        state = simulation.initial_state()
        for number in range(4):
            result = play_round(simulation, state)
            state.advance(result)
            found = Played(result, state.server, set()).compared
            assert_equal(found, expected[number], atol=1e-12)


@every_row
def test_padding_does_not_change_a_step(row):
    simulation = row.simulation()
    check_padding(simulation, simulation.initial_state())
    check_padding(simulation, play(simulation, 1))


def on_engine(simulation, name):
    """Return the simulation with another engine for training and logits."""
    return replace(simulation, engine=ENGINES[name])


@pytest.mark.parametrize(
    "row", [row for row in EVERY if row.zero is not None], ids=lambda row: row.name
)
def test_zero_weight_gives_fedavg(row):
    assert_equal(ends_of_tasks(row.make(**row.zero)), ends_of_tasks(FedAvg()), atol=1e-12)


@functools.cache
def ends_of_tasks(algorithm: FedAvg, model: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all parameters after the first and after the second task, as one vector each."""
    simulation = stream(algorithm, model=model)
    state, ends = simulation.initial_state(), []
    for number in range(1, 5):
        state.advance(play_round(simulation, state))
        ends += [flat(state.server["params"])] if number % 2 == 0 else []
    return ends[0], ends[1]


@one_of_each_kind("row", BY_NAME, *KEPT, "heads", "refine")
def test_changing_any_option_changes_the_trained_model(row):
    """The model equals FedAvg's in task 1 (except with separate heads or server distillation), but
    not in task 2, and every option changes it."""
    first, second = ends_of_tasks(row.make(), row.model)
    fedavg = ends_of_tasks(FedAvg(), row.model)
    if not row.at_once:
        assert_equal(first, fedavg[0], atol=1e-12)
    assert differ([second], [fedavg[1]], by=1e-5)
    for name in row.live:
        _, other = ends_of_tasks(row.make(**{name: row.changed(name)}), row.model)
        if name in row.silent:
            assert torch.equal(other, second)
        else:
            assert differ([other], [second], by=1e-7), f"{name} does not matter"


@pytest.mark.parametrize(
    "cls", dict.fromkeys(row.cls for row in EVERY), ids=lambda cls: cls.__name__
)
def test_every_option_of_every_method_is_varied(cls):
    names = {f.name for f in fields(cls)} - {f.name for f in fields(FedAvg)}
    assert {name for row in EVERY if row.cls is cls for name in row.live} == names


@one_of_each_kind("row", BY_NAME, *KEPT, *STRUCTURE, "roles")
def test_run_resumed_in_the_second_task_equals_uninterrupted_run(row, tmp_path):
    """The results are equal bit for bit. The two parts of the run share only the files."""
    whole = record(row.simulation(), tmp_path / "whole", resume=False)
    simulation = row.simulation()
    halted = replace(simulation, engine=HaltsAfter(simulation.engine, calls=training_calls(row)))
    with pytest.raises(KeyboardInterrupt):
        record(halted, tmp_path / "parts", resume=False)
    assert storage.load_tree(tmp_path / "parts" / files.CHECKPOINT)["round"] == 3
    resumed = record(row.simulation(), tmp_path / "parts", resume=True)
    assert_equal(resumed.server, whole.server)
    assert resumed.record.curve == whole.record.curve
    assert resumed.record.task_accuracy == whole.record.task_accuracy
    assert tables(tmp_path / "parts") == tables(tmp_path / "whole")
    task_rows = [(tmp_path / part / files.TASKS).read_text() for part in ("parts", "whole")]
    assert task_rows[0] == task_rows[1]


def training_calls(row):
    """Return how often the engine trains in rounds 1 to 3: twice per round with two roles or
    exchanges, and for FedEWC's closing exchange."""
    if row.live.get("fisher") == "old_tasks":
        return 3 + 2  # four clients, three at a time
    return 3 + (row.cls in (CFeD, FedDMC))


class HaltsAfter:
    """An engine that is interrupted after some calls of `train`."""

    def __init__(self, engine, calls):
        self.engine, self.left = engine, calls

    def train(self, *arguments):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return self.engine.train(*arguments)

    def __getattr__(self, name):
        return getattr(self.engine, name)


@one_of_each_kind("row", {k: row for k, row in BY_NAME.items() if row.normed is not None}, *KEPT)
def test_methods_work_with_batch_norm(row):
    """The sequential engine and workers agree; every model uses its running statistics."""
    servers = []
    for name in ("sequential", "workers"):
        simulation = on_engine(row.simulation(model=row.normed), name)
        servers.append(play(simulation, 4).server)
    assert_equal(servers[1], servers[0])
    assert tree.is_finite(servers[0])
    moved = [
        (value - simulation.initial_buffers[k]).abs().max()
        for k, value in servers[0]["buffers"].items()
    ]
    assert min(moved) > 1e-3


@every_row
def test_other_tasks_examples_are_never_read(row):
    """All training examples are read by one function, whose calls are noted."""
    simulation, rounds = row.simulation(), played(row.name)
    for number, this in enumerate(rounds, 1):
        info = simulation.stage_of(number).federation
        allowed = {*np.concatenate([*info.parts, info.unlabelled]).tolist()}
        others = [s.federation for s in simulation.stages if s.federation is not info]
        foreign = np.concatenate([part for other in others for part in other.parts])
        assert not allowed & {*foreign.tolist()}
        if row.keeps and number == 3:  # it chooses in round 3 among those of task 1
            allowed |= {*np.concatenate(simulation.stages[0].federation.parts).tolist()}
        elif row.keeps and number > 3:
            allowed |= {*rounds[number - 2].server["kept"].flatten().tolist()}
        assert this.read <= allowed, number
        assert this.read


# --- the losses and roles


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 0), (0.4, 4), (0.41, 5), (0.05, 1), (1.0, 10)]
)
def test_cohort_splits_into_reviewers_and_learners(fraction, expected):
    """ceil(alpha m) clients review and the others learn, with a new draw each round. In the first
    task all learn."""
    algorithm = CFeD(**CFED | dict(review_fraction=fraction))
    infos = [stage.federation for stage in stream(algorithm).stages]
    clients, rng = list(range(10)), np.random.default_rng(0)
    assert {type(role) for role in algorithm.roles(infos[0], clients, rng)} == {Learner}
    draws = [[type(role) for role in algorithm.roles(infos[1], clients, rng)] for _ in range(20)]
    assert all(
        (draw.count(Reviewer), draw.count(Learner)) == (expected, 10 - expected) for draw in draws
    )
    assert (len({tuple(draw) for draw in draws}) > 5) == (0 < expected < 10)


def test_cfed_round_equals_a_plain_training_loop():
    """Round 3 as a plain loop: learners use cross-entropy on their examples, reviewers L_d on
    theirs, with weights n_k."""
    algorithm = CFeD(**CFED)
    simulation = stream(
        algorithm, local=replace(LOCAL, momentum=0.0, weight_decay=0.0), augment=False
    )
    state, runtime, info = play(simulation, 2), simulation.runtime, simulation.stages[1].federation
    result = play_round(simulation, state)
    old, weights = state.server["params"], 0
    total = tree.zeros_like(old)
    for client, role, schedule in zip(
        result.cohort.clients, result.cohort.roles, result.cohort.schedules, strict=True
    ):
        part = info.surrogate[client] if isinstance(role, Reviewer) else info.parts[client]
        w = leaves(old)
        for index, length in zip(schedule.index, schedule.lengths, strict=True):
            assert set(index[:length].tolist()) <= set(part.tolist())
            x, y = runtime.load_train(index[:length], None)
            logits = runtime.net(w, x).logits
            if isinstance(role, Reviewer):
                target = (runtime.net(old, x).logits / 2).softmax(-1)
                loss = 0.5 * F.cross_entropy(logits / 2, target)
            else:
                loss = F.cross_entropy(logits, y)
            w = stepped(w, loss)
        n = len(info.parts[client])
        total = {k: total[k] + n * w[k].detach() for k in w}
        weights += n
    assert {type(role) for role in result.cohort.roles} == {Learner, Reviewer}
    mean = {k: v / weights for k, v in total.items()}
    assert_equal(result.server["params"], mean, atol=1e-12)


def test_server_distillation_equals_a_plain_training_loop():
    """Eleven examples are divided among three local models and the old model: 3, 3, 3 and 2.
    Training starts from the average of the local models, with SGD, momentum and weight decay for E
    = 2 epochs of batches of 2. lambda_d is not a factor."""
    algorithm = CFeD(**CFED | dict(server_distillation=True, lambda_d=0.1))
    simulation = stream(algorithm)
    state, net = play(simulation, 1), simulation.runtime.net
    cohort, lr = assemble(simulation, state, 2), simulation.lr_at(2)
    trained = simulation.engine.train(
        Shared(FedAvg(), simulation.runtime, broadcast(simulation, state), lr), cohort, False
    )
    numbers = torch.tensor([30, 2, 17, 5, 39, 11, 8, 23, 0, 14, 26])  # of any client
    about = describe(simulation, state, cohort, trained)
    about = replace(about, surrogate=replace(about.surrogate, numbers=numbers))
    models = [tree.row(trained.messages["params"], i) for i in range(3)] + [state.server["params"]]

    rng = describe(simulation, state, cohort, trained).rng  # the same numbers once more
    order, teacher_of = rng.permutation(11).tolist(), {}
    for model, size in zip(models, (3, 3, 3, 2), strict=True):
        for _ in range(size):
            teacher_of[order.pop(0)] = model
    inputs = simulation.runtime.load_train(numbers, None)[0]
    server = algorithm.aggregate(state.server, trained.messages, about) | {"buffers": {}}
    w = leaves(server["params"])
    # lr lr_decay^(2 - 1)
    sgd = torch.optim.SGD(w.values(), 0.1 * 0.9, momentum=0.9, weight_decay=1e-3)
    for _ in range(2):
        shuffled = rng.permutation(11)
        for start in range(0, 11, 2):
            batch, loss = shuffled[start : start + 2].tolist(), 0.0
            for i in batch:
                q = (net(teacher_of[i], inputs[i : i + 1]).logits[0].detach() / 2).softmax(0)
                loss = loss - (
                    q * (net(w, inputs[i : i + 1]).logits[0] / 2).softmax(0).log()
                ).sum() / len(batch)
            take_step(sgd, loss)
    assert (flat(w) - flat(server["params"])).abs().max() > 1e-3
    refined = algorithm.refine(LiveNetwork(net), server, trained.messages, about)
    assert_equal(refined["params"], detached(w), atol=1e-12)


def test_centralised_cfed_shuffles_new_and_surrogate_batches():
    """One client has all examples. Batches of new examples and as many batches of surrogate
    examples come in random order."""
    simulation = stream(CFeD(**CFED, paradigm="centralized"), surrogate=0.3)
    (part,), (unlabelled,) = (
        simulation.stages[1].federation.parts,
        simulation.stages[1].federation.surrogate,
    )
    everything = np.concatenate([stage.partition.parts[0] for stage in simulation.stages])
    assert len(everything) + len(unlabelled) == 40
    state = play(simulation, 2)
    cohort = assemble(simulation, state, 3)
    assert [type(role) for role in cohort.roles] == [Student]
    (schedule,) = cohort.schedules
    kinds = []
    for index, length in zip(schedule.index, schedule.lengths, strict=True):
        numbers = set(index[:length].tolist())
        kinds.append(numbers <= set(part.tolist()))
        assert kinds[-1] or numbers <= set(unlabelled.tolist())
    assert (
        kinds.count(True) == kinds.count(False) == LOCAL.epochs * -(-len(part) // LOCAL.batch_size)
    )
    assert kinds != sorted(kinds)


def test_centralised_cfed_round_equals_a_plain_training_loop():
    """Cross-entropy on the batches of new examples, lambda_d L_d on those of surrogate examples.
    Class 0, whose label must not be confused with that of unlabelled examples, is in task 2."""
    plain = replace(LOCAL, momentum=0.0, weight_decay=0.0)
    tasks = replace(TWO_TASKS, classes=[[1, 3], [0, 2]])
    simulation = stream(
        CFeD(**CFED, paradigm="centralized"), local=plain, augment=False, scenario=tasks
    )
    state, runtime = play(simulation, 2), simulation.runtime
    result = play_round(simulation, state)
    new = set(simulation.stages[1].federation.parts[0].tolist())
    old, (schedule,), seen = state.server["params"], result.cohort.schedules, set()
    w = leaves(old)
    for index, length in zip(schedule.index, schedule.lengths, strict=True):
        x, y = runtime.load_train(index[:length], None)
        logits = runtime.net(w, x).logits
        if set(index[:length].tolist()) <= new:
            seen |= set(y.tolist())
            loss = F.cross_entropy(logits, y)
        else:
            target = (runtime.net(old, x).logits / 2).softmax(-1)
            loss = 0.5 * F.cross_entropy(logits / 2, target)
        w = stepped(w, loss)
    assert seen == {0, 2}
    assert_equal(result.server["params"], detached(w), atol=1e-12)


@pytest.mark.parametrize("drop_last", [False, True])
def test_ewc_fisher_equals_the_formula_for_softmax_regression(drop_last):
    """d(-log q_y)/dW_cd = (p_c - [c = y]) x_d, so F_cd is the mean of its square over all examples
    of the task, also of clients without a complete batch. The four clients form groups of three
    and one."""
    algorithm, local = FedEWC(lambda_=1.0, fisher="old_tasks"), replace(LOCAL, drop_last=drop_last)
    simulation = stream(algorithm, local=local, model=SoftmaxRegression())
    state, runtime, info = play(simulation, 2), simulation.runtime, simulation.stages[0].federation
    x, y = runtime.load_train(torch.from_numpy(np.concatenate(info.parts)), None)
    x, w = x.flatten(1), state.server["params"]
    delta = (x @ w[HEAD[0]].T + w[HEAD[1]]).softmax(-1) - F.one_hot(y, CLASSES)
    assert_equal(state.server["importance"][HEAD[0]], (delta**2).T @ (x**2) / len(y), atol=1e-13)
    assert_equal(state.server["importance"][HEAD[1]], (delta**2).mean(0), atol=1e-13)
    assert_equal(state.server["anchor"], w)


@dataclass(frozen=True)
class Counting(FedAvg):
    """Clients count the rounds in which they take part."""

    def client_init(self, params, federation):
        return {"rounds": torch.zeros(1, dtype=torch.int64)}

    def finish(self, net, params, data, ctx):
        return {"params": params}, {"rounds": ctx.client["rounds"] + 1}

    def closing_exchanges(self, federation):
        return (Counts(),)


@dataclass(frozen=True)
class Counts(OnePass):
    """The server asks all clients for their counts."""

    def client_init(self, params, federation):
        return {"rounds": torch.zeros(1, dtype=torch.int64)}

    def finish(self, net, params, data, ctx):
        return ctx.client, ctx.client

    def aggregate(self, server, messages, round):
        return server | {"mean": tree.weighted_mean(messages["rounds"], round.weights)}


def test_closing_exchange_reads_the_states_after_the_round():
    """In two rounds with three of four clients, a client takes part 6 / 4 times on average."""
    assert play(stream(Counting(), weighting="uniform"), 2).server["mean"].item() == 1.5


def test_ewc_quadratic_sums_over_tasks():
    """P (w - a)^2 has the gradient of F1 (w - t1)^2 + F2 (w - t2)^2, and equals it up to a
    constant."""
    algorithm = FedEWC(lambda_=3.0, fisher="old_tasks")
    simulation = stream(algorithm)
    (fisher,) = algorithm.closing_exchanges(simulation.stages[0].federation)
    generator = torch.Generator().manual_seed(1)

    def uniform(like):
        return {k: torch.rand(v.shape, generator=generator, dtype=v.dtype) for k, v in like.items()}

    server, terms = {"params": simulation.initial}, []
    for _ in range(2):
        server = server | {"params": uniform(simulation.initial)}
        message = uniform(simulation.initial)
        message = {k: v * (v > 0.3) for k, v in message.items()}  # some parameters matter to nobody
        about = SimpleNamespace(weights=torch.ones(1, dtype=torch.float64))
        stacked = {"fisher": tree.map(lambda leaf: leaf[None], message)}
        server = fisher.aggregate(server, stacked, about)
        terms.append((message, server["params"]))
    ctx = context(server=server)

    def plain_penalty(w):
        return 1.5 * sum((f[k] * (w[k] - t[k]) ** 2).sum() for f, t in terms for k in w)

    points = [uniform(simulation.initial) for _ in range(2)]
    ours = [torch.func.grad_and_value(lambda w: algorithm.penalty(None, w, ctx))(p) for p in points]
    theirs = [torch.func.grad_and_value(plain_penalty)(p) for p in points]
    for (gradient, _), (expected, _) in zip(ours, theirs, strict=True):
        assert_equal(gradient, expected, atol=1e-12)
    assert_equal(ours[0][1] - ours[1][1], theirs[0][1] - theirs[1][1], atol=1e-10)


def test_ewc_released_variant_equals_a_plain_training_loop():
    """Round 3 of one client: G is computed for each pair at the received model, on the new task's
    batches only."""
    algorithm = FedEWC(lambda_=50.0, fisher="released")
    local = replace(LOCAL, epochs=1, momentum=0.0, weight_decay=0.0)
    simulation = stream(
        algorithm,
        model=SoftmaxRegression(),
        sizes=(10,),
        participation=1.0,
        surrogate=0.0,
        local=local,
        augment=False,
    )
    state, runtime = play(simulation, 2), simulation.runtime
    assert state.server.keys() == {"params", "buffers"}  # nothing of the old task is kept
    result = play_round(simulation, state)
    (schedule,) = result.cohort.schedules
    batches = [
        runtime.load_train(i[:n], None)
        for i, n in zip(schedule.index, schedule.lengths, strict=True)
    ]
    assert [len(y) for _, y in batches] == [4, 4, 2]

    def logs(w, x):
        return (x.flatten(1) @ w[HEAD[0]].T + w[HEAD[1]]).log_softmax(-1)

    received = leaves(state.server["params"])
    pairs = [
        logs(received, x)[b, y[other]]
        for x, y in batches
        for b in range(len(y))
        for other in range(len(y))
    ]
    assert len(pairs) == 16 + 16 + 4
    mean = sum(pairs) / len(pairs)
    strength = {
        k: g**2
        for k, g in zip(HEAD, torch.autograd.grad(mean, [received[k] for k in HEAD]), strict=True)
    }
    w = leaves({k: received[k] for k in HEAD})
    for x, y in batches:
        held = sum((strength[k] * (w[k] - received[k].detach()) ** 2).sum() for k in HEAD)
        w = stepped(w, F.nll_loss(logs(w, x), y) + 25.0 * held)
    assert_equal(result.server["params"], detached(w), atol=1e-12)


@pytest.mark.parametrize("local", [LOCAL, ADAM], ids=["sgd", "adam"])
def test_inactive_heads_do_not_change(local):
    """They are equal bit for bit, also with weight decay. The active head changes."""
    simulation = stream(FedMultiHead(), local=local)
    state = play(simulation, 2)
    before = {k: state.server["params"][k].clone() for k in HEAD}
    for _ in range(2):
        state.advance(play_round(simulation, state))
    for k in HEAD:
        now = state.server["params"][k]
        assert torch.equal(now[:2], before[k][:2])
        assert (now[2:] - before[k][2:]).abs().min() > 0


def test_each_head_predicts_its_task():
    """With disjoint classes, a head is the rows of the task's classes. With shared labels, each
    task has separate rows."""
    assert FedMultiHead().heads([[0, 1], [2, 3]]).tolist() == [[0, 1, -1, -1], [-1, -1, 2, 3]]
    assert FedMultiHead().heads([[0, 1], [0, 1]]).tolist() == [[0, 1], [2, 3]]
    simulation = stream(FedMultiHead())
    state, runtime = play(simulation, 3), simulation.runtime
    tasks, y = runtime.data.test_tasks, runtime.data.y_test
    logits = runtime.net(state.server["params"], runtime.load_test(torch.arange(len(y)))[0]).logits
    right = [
        (logits[i, 2 * t : 2 * t + 2].argmax() + 2 * t == y[i]).item()
        for i, t in enumerate(tasks.tolist())
    ]
    evaluation = simulation.engine.evaluate(runtime, state.server)
    expected = [
        sum(r for r, t in zip(right, tasks.tolist(), strict=True) if t == task) for task in (0, 1)
    ]
    assert evaluation.task_correct.tolist() == expected
    assert evaluation.class_correct.sum() == sum(expected)


def consolidation_loss(targets, server, **logits):
    """Return the loss of models with the given logits; `server` has the old and new classes."""
    logits = {name: torch.tensor([row], dtype=torch.float64) for name, row in logits.items()}
    shared = {name: DMC[name] for name in ("student", "epochs_factor", "rate_factor", "whole_set")}
    exchange = Consolidation(targets=targets, **shared)
    ctx = context(server=server | {"old": "old", "new": "new"})
    net = lambda params, x: SimpleNamespace(logits=logits[params])  # noqa: E731
    return exchange.example_loss(net, "student", SimpleNamespace(x=None), ctx).item()


def test_dmc_targets_equal_hand_calculation():
    """Task 2 of {0}, {1, 2}, {3}: from (4, 9, 9, 9) and (9, 10, 4, 9) the targets are 0 and (3,
    -3). The student's (2, 0, 0, 100) is off by 2, 3 and 3: (4 + 9 + 9) / 3. With `added` class 3
    counts: the models minus 31/4 and 8 are (-3.75, 1.25, 1.25, 1.25) and (1, 2, -4, 1), together
    (-2.75, 3.25, -2.75, 2.25)."""
    simulation = stream(FedDMC(**DMC))
    info = replace(simulation.stages[1].federation, tasks=((0,), (1, 2), (3,)), task=1)
    start = task_start(info, simulation.initial)
    server = simulation.algorithm.begin_task(simulation.initial_state().server, start)
    assert server["old_classes"].tolist() == [1, 0, 0, 0]
    assert server["new_classes"].tolist() == [0, 1, 1, 0]
    answers = {"old": [4, 9, 9, 9], "new": [9, 10, 4, 9], "student": [2, 0, 0, 100]}
    assert consolidation_loss("split", server, **answers) == pytest.approx(22 / 3)
    added = (4.75**2 + 3.25**2 + 2.75**2 + 97.75**2) / 4
    assert consolidation_loss("added", server, **answers) == pytest.approx(added)


def test_dmc_round_equals_a_plain_training_loop():
    """Round 3. First, the initial model learns classes 2 and 3. Then, for twice the epochs at twice
    the rate, it learns the logits of the old model for classes 0 and 1 and of the new model for 2
    and 3, minus their means, on unlabelled examples."""
    simulation = stream(
        FedDMC(**DMC), local=replace(LOCAL, momentum=0.0, weight_decay=0.0), augment=False
    )
    state, net, info = play(simulation, 2), simulation.runtime.net, simulation.stages[1].federation
    old, result = state.server["params"], play_round(simulation, state)

    def learn(w, x, y):
        return F.cross_entropy(net(w, x).logits[:, 2:], y - 2)

    def consolidate(w, x, y):
        targets = [net(old, x).logits[:, :2], net(new, x).logits[:, 2:]]
        targets = [each - each.mean(1, keepdim=True) for each in targets]
        return F.mse_loss(net(w, x).logits, torch.cat(targets, 1))

    new = simulation.initial
    pairs = zip((learn, consolidate), (info.parts, info.surrogate), result.exchanges, strict=True)
    for factor, (loss, parts, done) in enumerate(pairs, 1):
        models, sizes = [], []
        for client, schedule in zip(done.cohort.clients, done.cohort.schedules, strict=True):
            assert schedule.steps == factor * LOCAL.epochs * -(-len(parts[client]) // 4)
            w = leaves(simulation.initial)
            for index, length in zip(schedule.index, schedule.lengths, strict=True):
                assert set(index[:length].tolist()) <= set(parts[client].tolist())
                x, y = simulation.runtime.load_train(index[:length], None)
                w = stepped(w, loss(w, x, y), 0.1 * factor)
            models.append(detached(w))
            sizes.append(len(info.parts[client]))
        weighted = list(zip(sizes, models, strict=True))
        new = {k: sum(n * w[k] for n, w in weighted) / sum(sizes) for k in old}
    assert_equal(result.server["params"], new, atol=1e-12)


# --- what makes no sense
