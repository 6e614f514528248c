"""Channels between processes, and the workers engine, also when a process dies."""

import fcntl
import logging
import math
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from fedexp.algorithms.base import FedAvg
from fedexp.engine.base import Shared
from fedexp.engine.processes.channel import Channel
from fedexp.engine.processes.workers import WorkerDied, Workers, keeping_processes
from fedexp.engine.sequential import ClientFailure, Sequential
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.models.own import OwnModel
from fedexp.testing import assert_equal
from toy_federation import LARGER, PROCESS, assemble, make_simulation


def pair():
    return tuple(Channel(end) for end in socket.socketpair())


def train(engine, algorithm, close=True, **options):
    simulation = make_simulation(algorithm, test_views=["plain", "augmented"], **options)
    state = simulation.initial_state()
    cohort = assemble(simulation, state, 1)
    try:
        return cohort, engine.train(
            Shared(algorithm, simulation.runtime, state.server, 0.1), cohort, True
        )
    finally:
        if close:
            engine.close()


@dataclass(frozen=True, kw_only=True)
class Dropping(OwnModel):
    freeze: tuple[str, ...] = ("1.bias",)

    def network(self, shape, num_classes):
        layers = nn.Linear(math.prod(shape), 6), nn.Dropout(0.5), nn.Linear(6, num_classes)
        return nn.Sequential(nn.Flatten(), *layers)


# --- channels

BLOCK = torch.arange(120.0, dtype=torch.float64).reshape(2, 3, 4, 5)
TENSORS = {
    "plain": BLOCK,
    "channels last": BLOCK.to(memory_format=torch.channels_last),
    "transposed": BLOCK.permute(3, 1, 0, 2),
    "with gaps": BLOCK[:, ::2, :, 1:4],
    "broadcast": torch.ones(1).expand(3, 4),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "bool": BLOCK > 50,
    "bf16": BLOCK.to(torch.bfloat16),
    "bytes": BLOCK.to(torch.uint8),
    "with gradient": BLOCK.clone().requires_grad_(),
}


def test_values_arrive_unchanged_and_in_order():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    network.to(memory_format=torch.channels_last)
    ours, theirs = pair()
    for value in (TENSORS, network, "text"):
        ours.send_value(value)

    tensors = theirs.receive()
    for name, sent in TENSORS.items():
        torch.testing.assert_close(tensors[name], sent.detach(), rtol=0, atol=0)
        assert not tensors[name].requires_grad
        if name in ("plain", "channels last", "transposed"):
            assert tensors[name].stride() == sent.stride()

    received = theirs.receive()
    assert all(isinstance(p, nn.Parameter) for p in received.parameters())
    assert received[0].weight.stride() == network[0].weight.stride()
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(received(x), network(x))
    assert theirs.receive() == "text"


def test_no_descriptor_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = pair()
    for _ in range(3):
        ours.send_value(torch.zeros(100))
        theirs.receive()
    ours.close()
    theirs.close()
    assert len(os.listdir("/proc/self/fd")) == before


# --- engines (every algorithm on two workers: test_algorithms.py)


@pytest.fixture(scope="module")
def started_workers(tmp_path_factory):
    """Two workers, started in a directory with modules of the same names as those they import."""
    folder, before = tmp_path_factory.mktemp("modules"), os.getcwd()
    for name in ("fedexp", "random", "torch"):
        (folder / f"{name}.py").write_text("import os; os.mkdir('stolen'); raise SystemExit(1)")
    engine = Workers(Sequential(), PROCESS, 2, share=False)
    os.chdir(folder)
    try:
        train(engine, FedAvg(), close=False)
    finally:
        os.chdir(before)
    yield engine, folder
    engine.close()


@pytest.fixture
def pair_of_workers(started_workers, nothing_left):
    """The workers of this module. Those that a test ends are started again when needed."""
    yield started_workers
    nothing_left.keep_workers(started_workers[0])


def assert_no_bit_differs(engine, close):
    """In training and in the tests of local models, with dropout and a frozen parameter."""
    model = Dropping()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = train(Sequential(), FedAvg(), model=model)[1]
    finally:
        torch.set_num_threads(threads)
    actual = train(engine, FedAvg(), close, model=model)[1]
    for name in ("messages", "losses", "class_correct"):
        assert_equal(getattr(actual, name), getattr(expected, name))


def test_workers_equal_one_process_bit_for_bit(pair_of_workers):
    assert_no_bit_differs(pair_of_workers[0], close=False)


def test_workers_evaluate_like_one_process(pair_of_workers):
    simulation = make_simulation(test_views=["plain", "augmented"])
    server = simulation.initial_state().server
    for view in ("plain", "augmented"):
        found, expected = (
            engine.evaluate(simulation.runtime, server, view, 1)
            for engine in (pair_of_workers[0], Sequential())
        )
        assert_equal(found.class_correct, expected.class_correct)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_workers_does_not_change_the_result(count):
    assert_no_bit_differs(Workers(Sequential(), PROCESS, count, share=False), close=True)


def test_runs_in_a_block_use_the_same_process():
    """The second run has other data and needs one of the two processes."""
    used = []
    with keeping_processes():
        for count, sizes in ((2, None), (1, LARGER)):
            engine = Workers(Sequential(), PROCESS, count, share=False)
            options = {} if sizes is None else {"sizes": sizes}
            found = train(engine, FedAvg(), close=False, **options)[1]
            expected = train(Sequential(), FedAvg(), **options)[1]
            torch.testing.assert_close(found.messages, expected.messages, rtol=0, atol=0)
            used.append([process.popen for process in engine._processes])
            engine.close()
    assert used[1] == used[0][:1]
    assert all(popen.poll() is not None for popen in used[0])


def test_modules_of_the_current_directory_are_not_imported(pair_of_workers):
    assert not (pair_of_workers[1] / "stolen").exists()


@pytest.mark.slow
def test_workers_can_vectorise_their_shares():
    expected = train(Sequential(), FedAvg())[1]
    actual = train(Workers(Vectorised(None), PROCESS, 2, share=True), FedAvg())[1]
    torch.testing.assert_close(actual.messages, expected.messages, rtol=0, atol=1e-12)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=0, atol=1e-12)


# --- death


@dataclass(frozen=True, kw_only=True)
class Dying(FedAvg):
    """Kills its process before a client's training, `times` times in total."""

    notes: str  # a directory: one file for each death
    times: int

    def client_setup(self, net, data, ctx):
        directory = os.open(self.notes, os.O_RDONLY)
        # both workers may count at the same time; free again with the process
        fcntl.flock(directory, fcntl.LOCK_EX)
        if len(os.listdir(self.notes)) < self.times:
            (Path(self.notes) / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(directory)
        return {}


@pytest.fixture
def messages():
    """Messages of the logger, which pytest's handlers do not receive."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("fedexp")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_a_worker_that_dies_is_replaced(tmp_path, messages, pair_of_workers):
    cohort, trained = train(pair_of_workers[0], Dying(notes=str(tmp_path), times=1), close=False)
    expected = train(Sequential(), FedAvg())[1]
    torch.testing.assert_close(trained.messages, expected.messages, rtol=0, atol=1e-12)
    (line,) = messages
    (pid,) = os.listdir(tmp_path)
    assert line.startswith("round 1, training client ")
    assert int(line.split("client ")[1].split(":")[0]) in cohort.clients
    assert f"(process {pid}) ended by signal 9 (SIGKILL" in line


@pytest.mark.slow
def test_a_client_that_kills_two_workers_stops_the_run(tmp_path, messages):
    engine = Workers(Sequential(), PROCESS, 1, share=False)
    with pytest.raises(
        WorkerDied,
        match=r"round 1, training client \d+: worker 0 .* this order also died",
    ):
        train(engine, Dying(notes=str(tmp_path), times=2))
    assert len(messages) == 1
    for pid in os.listdir(tmp_path):
        assert not Path("/proc", pid).exists()


@dataclass(frozen=True, kw_only=True)
class Failing(FedAvg):
    def finish(self, net, params, data, ctx):
        raise ArithmeticError("the sum is wrong")


def test_an_exception_names_client_hook_and_line(pair_of_workers):
    with pytest.raises(
        ClientFailure, match=r"round 1, client \d+, in finish of Failing: the sum is wrong"
    ) as caught:
        train(pair_of_workers[0], Failing(), close=False)
    assert 'raise ArithmeticError("the sum is wrong")' in "".join(caught.value.__notes__)
