"""The distributed engine without a second process; e2e/test_torchrun.py runs whole commands."""

import socket
import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from fedexp.algorithms.base import FedAvg
from fedexp.core.errors import ConfigError
from fedexp.engine.base import Shared
from fedexp.engine.hardware import Hardware
from fedexp.engine.processes import distributed
from fedexp.engine.processes.channel import NetworkChannel
from fedexp.engine.processes.ranks import Ranks, find_ranks
from fedexp.engine.processes.worker import Worker, serve
from fedexp.engine.sequential import ClientFailure, Sequential
from fedexp.testing import PROCESS, assert_equal
from toy_federation import HARDWARE, assemble, make_simulation

MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
TORCHRUN = MASTER | {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = MASTER | {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (TORCHRUN, Ranks(3, 8, 1)),
        (SLURM, Ranks(2, 4, 0)),
        (SLURM | TORCHRUN, Ranks(3, 8, 1)),  # torchrun inside a Slurm job
        ({}, None),
        (MASTER, None),
        # independent runs of one Slurm job
        ({k: v for k, v in SLURM.items() if k != "MASTER_ADDR"}, None),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, None),
        (TORCHRUN | {"RANK": "first"}, None),
    ],
)
def test_ranks_are_found_in_the_environment(environment, found):
    assert find_ranks(environment) == found


def resolve(**changes):
    hardware = Hardware(**HARDWARE | changes)
    return hardware.resolve(vectorises=True, cohort_size=4)


def test_several_processes_use_the_distributed_engine(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for engine in ("auto", "distributed"):
        chosen = resolve(engine=engine)
        assert (chosen.engine, chosen.trainer) == ("distributed", Sequential())
        assert (chosen.workers, chosen.threads) == (8, 1)
    for engine in ("sequential", "workers", "vectorised"):
        with pytest.raises(ConfigError, match=f"hardware.engine={engine}: must be auto or"):
            resolve(engine=engine)
    with pytest.raises(ConfigError, match=r"hardware\.workers=3: must be null, because 8"):
        resolve(engine="auto", workers=3)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert resolve(engine="sequential").engine == "sequential"


class Failing(FedAvg):
    def finish(self, net, params, data, ctx):
        raise ArithmeticError("by the test")


@pytest.fixture
def rank_1(monkeypatch):
    """Rank 1 as a thread."""
    ours, theirs = map(NetworkChannel, socket.socketpair())
    monkeypatch.setattr(distributed, "connected", {1: ours})

    def work():
        with suppress(EOFError), theirs.connection:
            serve(theirs, Worker(1))

    thread = threading.Thread(target=work)
    thread.start()
    yield
    distributed.dismiss()
    thread.join()


def test_a_failed_run_leaves_a_rank_ready_for_the_next_run(rank_1):
    """The answers to the failed run are ignored."""
    simulation = make_simulation(FedAvg())
    state = simulation.initial_state()
    cohort = assemble(simulation, state, 1)
    shared = Shared(FedAvg(), simulation.runtime, state.server, 0.1)
    engine = distributed.Distributed(Sequential(), replace(PROCESS, engine="distributed"))
    with pytest.raises(ClientFailure, match="in finish of Failing: by the test"):
        engine.train(replace(shared, algorithm=Failing()), cohort, False)
    found = engine.train(shared, cohort, False)
    engine.close()
    expected = Sequential().train(shared, cohort, False)
    assert_equal(found.messages, expected.messages, 1e-12)


def test_a_lost_rank_is_named(rank_1):
    simulation = make_simulation(FedAvg())
    state = simulation.initial_state()
    engine = distributed.Distributed(Sequential(), PROCESS)
    distributed.connected[1].connection.shutdown(socket.SHUT_WR)
    with pytest.raises(distributed.RankLost, match="the connection to rank 1 is broken"):
        engine.start(simulation.runtime, state.server)


def test_processes_that_cannot_meet_are_a_wrong_setting(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "not a port")
    with pytest.raises(ConfigError, match=r"MASTER_PORT=127\.0\.0\.1:not a port: 2"):
        distributed.connect(Ranks(1, 2, 1))
