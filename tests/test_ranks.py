"""Ranks: what they send each other, that their number changes no bit, and ranks that die."""

import math
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fedexp
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.ditto import Ditto
from fedexp.algorithms.flashback import Flashback
from fedexp.algorithms.scaffold import Scaffold
from fedexp.core.errors import INTERRUPTED, ConfigError, RankDied
from fedexp.core.launch import first_host, given, is_launched, launch_of, named
from fedexp.engine.base import Shared
from fedexp.engine.ranks import objects, world
from fedexp.engine.ranks.objects import pack, share, signature
from fedexp.engine.ranks.rank import Rank
from fedexp.engine.ranks.workers import Workers
from fedexp.engine.ranks.world import Location, World
from fedexp.engine.sequential import ClientFailure, Sequential
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.models.cnn import CNN
from fedexp.models.own import OwnModel
from fedexp.testing import assert_equal, record
from toy_federation import LARGER, NOISE, PROCESS, Noise, assemble, make_simulation, play


def engine_of(count, inner=None, share=False):
    return Workers(inner or Sequential(), PROCESS, count, share)


def train(engine, algorithm, **options):
    simulation = make_simulation(algorithm, test_views=["plain", "augmented"], **options)
    state = simulation.initial_state()
    cohort = assemble(simulation, state, 1)
    shared = Shared(algorithm, simulation.runtime, state.server, 0.1)
    return engine.train(shared, cohort, True)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Three ranks for this file. Those that a test ends are started again when needed.

    They start in a directory with modules of the same names as those that they import.
    """
    folder, before = tmp_path_factory.mktemp("modules"), os.getcwd()
    for name in ("fedexp", "random", "torch"):
        (folder / f"{name}.py").write_text("import os; os.mkdir('stolen'); raise SystemExit(1)")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with world.keeping_ranks():
        os.chdir(folder)
        try:
            world.start(3, threads=1)
        finally:
            os.chdir(before)
        yield folder
    torch.set_num_threads(threads)


# --- objects

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


def echo(rank, value):
    return value


@pytest.mark.parametrize("way", ["file", "rank"])
def test_values_arrive_unchanged(way):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    network.to(memory_format=torch.channels_last)
    value = {"tensors": TENSORS, "network": network, "text": "text", "again": BLOCK}
    stored, file = share(value)
    with file:
        sent = stored if way == "file" else value
        received = world.start(3, 1).ask(2, "a test", partial(echo, value=sent))
    assert received["text"] == "text"
    assert received["again"] is received["tensors"]["plain"]
    for name, sent in TENSORS.items():
        found = received["tensors"][name]
        torch.testing.assert_close(found, sent.detach(), rtol=0, atol=0)
        assert not found.requires_grad
        if name in ("plain", "channels last", "transposed"):
            assert found.stride() == sent.stride()
    copy = received["network"]
    assert all(isinstance(p, nn.Parameter) for p in copy.parameters())
    assert copy[0].weight.stride() == network[0].weight.stride()
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(copy(x), network(x))


def file_around(rank, value):
    """Return the mapping of this process that contains the elements of a tensor."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(address, 16) for address in line.split()[0].split("-"))
        if first <= value.data_ptr() < last:
            return line
    return "none"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists what a process has mapped")
def test_a_stored_value_is_mapped_and_not_copied():
    stored, file = share(torch.zeros(100_000))
    with file:
        assert "memfd:fedexp" in world.start(3, 1).ask(
            2, "a test", partial(file_around, value=stored)
        )


def test_tensors_are_not_pickled():
    packed = pack({"model": torch.zeros(1000), "part": torch.zeros(1000)[:10]})
    assert [len(tensor) for tensor in packed.tensors] == [1000, 10]
    assert len(packed.text) < 200


def test_modules_of_the_current_directory_are_not_imported(folder):
    assert not (folder / "stolen").exists()


# --- engines (every algorithm on two ranks: test_algorithms.py)


@dataclass(frozen=True, kw_only=True)
class Dropping(OwnModel):
    freeze: tuple[str, ...] = ("1.bias",)

    def network(self, shape, num_classes):
        layers = nn.Linear(math.prod(shape), 6), nn.Dropout(0.5), nn.Linear(6, num_classes)
        return nn.Sequential(nn.Flatten(), *layers)


RUNS = {
    "dropout and a frozen parameter": {"model": Dropping()},
    "scaffold": {"algorithm": Scaffold(divisor="effective", variates="uniform")},
    "flashback": {
        "algorithm": Flashback(gamma=0.5, epochs_on_server=2, on_clients=True, on_server=True),
        "public": 0.15,
    },
    "two exchanges": {"algorithm": Ditto(lambda_=0.1)},
    "batch norm": {
        "model": CNN(channels=(3,), kernel=3, padding=1, hidden=(8,), batch_norm=True),
        "sizes": LARGER,
    },
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_the_number_of_ranks_changes_no_bit(options):
    simulation = make_simulation(**options)
    expected = play(simulation, 2)
    for count in (1, 2, 3):
        found = play(replace(simulation, engine=engine_of(count)), 2)
        assert_equal(found.server, expected.server)
        assert_equal(dict(found.clients), dict(expected.clients))


def test_a_run_is_resumed_with_another_number_of_ranks(tmp_path):
    scaffold = Scaffold(divisor="effective", variates="uniform")

    def run(folder, count, rounds, resume=False):
        simulation = make_simulation(scaffold, rounds=rounds)
        engine = engine_of(count) if count else Sequential()
        return record(replace(simulation, engine=engine), tmp_path / folder, resume)

    expected = run("whole", 0, 3)
    run("parts", 3, 1)
    run("parts", 2, 2, resume=True)
    found = run("parts", 1, 3, resume=True)
    assert_equal(found.server, expected.server)
    assert_equal(dict(found.clients), dict(expected.clients))


def test_ranks_evaluate_like_one_process():
    simulation = make_simulation(test_views=["plain", "augmented"])
    server = simulation.initial_state().server
    for view in ("plain", "augmented"):
        engines = engine_of(3), Sequential()
        found, expected = (
            engine.evaluate(simulation.runtime, server, view, 1) for engine in engines
        )
        assert_equal(found.class_correct, expected.class_correct)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-12)


def test_local_models_are_tested_on_ranks():
    found, expected = train(engine_of(2), FedAvg()), train(Sequential(), FedAvg())
    assert_equal(found.class_correct, expected.class_correct)


def test_runs_in_a_block_use_the_same_ranks():
    """The second run has other data and needs one of the two ranks."""
    before = world.start(3, 1)
    for count, options in ((3, {}), (2, {"sizes": LARGER})):
        engine = engine_of(count)
        found, expected = (
            train(each, FedAvg(), **options).messages for each in (engine, Sequential())
        )
        assert_equal(found, expected)
        engine.close()
    assert world.start(2, 1) is before


class Elsewhere(Noise):
    """Other images than in the process `server`. They are no images if `breaks`."""

    server: int
    breaks: bool

    def read(self):
        arrays = super().read()
        if os.getpid() == self.server:
            return arrays
        if self.breaks:
            raise ConfigError("data_dir=here: has no images")
        return arrays | {"x_train": arrays["x_train"][::-1].copy()}


@pytest.fixture
def another_node(monkeypatch, request):
    """The last of three ranks seems to run on another node, or in another container."""
    ranks, other = world.start(3, 1), {getattr(request, "param", "node"): "b"}
    monkeypatch.setattr(ranks, "places", [*ranks.places[:2], ranks.places[2]._replace(**other)])


@pytest.mark.parametrize(
    ("another_node", "gpus"), [("node", [1]), ("namespaces", [1, 2])], indirect=["another_node"]
)
def test_a_node_loads_the_data_of_its_ranks(another_node, gpus, monkeypatch):
    @wraps(objects.map_value)  # so that it can be pickled
    def elsewhere(text, path):
        raise FileNotFoundError(path)

    def asked(self, rank, what, *orders):
        numbers.append(orders[-1].keywords.get("number"))
        return ask(self, rank, what, *orders)

    numbers, ask = [], World.ask
    monkeypatch.setattr(World, "ask", asked)
    monkeypatch.setattr(objects, "map_value", elsewhere)  # only in this process, rank 0
    expected = train(Sequential(), FedAvg())
    assert_equal(train(engine_of(3), FedAvg()).messages, expected.messages)
    assert sorted(filter(None, numbers)) == gpus  # containers on one node share its GPUs


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (
            False,
            r"rank 2 on .*: the loaded data differ from those of rank 0 \(checksum \w+, not \w+\)",
        ),
        pytest.param(
            True, r"rank 2 on .*: data_dir=here: has no images", marks=pytest.mark.slow
        ),  # each ends the ranks
    ],
)
def test_a_node_with_other_data_is_named(another_node, breaks, words):
    data = Elsewhere(**NOISE, server=os.getpid(), breaks=breaks)
    with pytest.raises(ConfigError, match=words):
        train(engine_of(3), FedAvg(), dataset=data)


def test_a_node_without_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    hardware = SimpleNamespace(device=torch.device("cuda"))
    words = r"hardware.device=cuda: rank 5 on .* has 0 CUDA devices; all machines need one"
    with pytest.raises(ConfigError, match=words):
        Rank().begin(hardware, 0, Sequential(), None)


@pytest.mark.parametrize(("divided", "sizes"), [(False, [1, 1, 1, 1]), (True, [2, 2])])
def test_a_rank_takes_one_client_at_a_time_or_its_share(divided, sizes, monkeypatch):
    taken, run = [], Workers._do

    def noted(engine, runtime, orders, server=None):
        taken.extend(order.positions for order in orders)
        return run(engine, runtime, orders, server)

    monkeypatch.setattr(Workers, "_do", noted)
    train(engine_of(2, share=divided), FedAvg())
    assert sorted(map(len, taken)) == sizes
    assert sorted(position for positions in taken for position in positions) == [0, 1, 2, 3]


@pytest.mark.slow
def test_ranks_can_vectorise_their_shares():
    expected = train(Sequential(), FedAvg())
    actual = train(engine_of(2, Vectorised(None), share=True), FedAvg())
    torch.testing.assert_close(actual.messages, expected.messages, rtol=0, atol=1e-12)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=0, atol=1e-12)


# --- failures


@dataclass(frozen=True, kw_only=True)
class Failing(FedAvg):
    server: int  # the process that does not fail

    def finish(self, net, params, data, ctx):
        if os.getpid() != self.server:
            raise ArithmeticError("the sum is wrong")
        return super().finish(net, params, data, ctx)


def test_an_exception_names_client_hook_line_and_rank():
    where = r"in finish of Failing \(test_ranks.py, line \d+\)"
    with pytest.raises(ClientFailure, match=f"{where}: ArithmeticError: the sum is") as caught:
        train(engine_of(2), Failing(server=os.getpid()))
    (note,) = caught.value.__notes__
    assert note.startswith("in rank 1 (process ")
    assert 'raise ArithmeticError("the sum is wrong")' in note


class OnlyHere:
    def __reduce__(self):
        return import_module, ("only_on_rank_0",)


def test_a_rank_without_a_module_is_named():
    words = r"^rank 1 on .*: No module named 'only_on_rank_0'; all ranks must import the same code"
    with pytest.raises(ConfigError, match=words):
        world.start(2, 1).ask(1, "a test", OnlyHere())


@dataclass(frozen=True, kw_only=True)
class Dying(FedAvg):
    server: int  # the process that does not die

    def client_setup(self, net, data, ctx):
        if os.getpid() != self.server:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_and_its_other_ranks():
    processes = [process.pid for process in world.start(2, 1).processes]
    words = r"^round 1, training client \d+: rank 1 \(process \d+ on .*\) ended by signal 9 \(SIGKI"
    with pytest.raises(RankDied, match=words):
        train(engine_of(2), Dying(server=os.getpid()))
    assert not any(Path("/proc", str(pid)).exists() for pid in processes)
    assert_equal(train(engine_of(2), FedAvg()).messages, train(Sequential(), FedAvg()).messages)


@pytest.mark.slow
def test_a_rank_refuses_objects_with_another_signature(capfd):
    forged = replace(world.start(2, 1), key=b"guessed")
    try:
        with pytest.raises(RankDied, match=r"rank 1 .* ended by exit code 0"):
            forged.ask(1, "a test", partial(echo, value=1))
    finally:
        world.stop()


# --- ranks of torchrun and Slurm


def test_a_rank_names_what_keeps_it_from_the_others(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    def connect(key, check=lambda: None):
        place = "process 7 on b\n1\nfedexp 0.1, torch 1.0"
        store.set("1", f"{signature(b'a secret', place.encode()).hex()}\n{place}")
        return world.connect(store, 0, size, key, check)

    store, size = dist.HashStore(), 2
    with pytest.raises(
        ConfigError, match=r"^FEDEXP_KEY: differs between rank 0 and rank 1 \(process 7 on b"
    ):
        connect(b"another")
    with pytest.raises(
        ConfigError, match=r"rank 1 \(process 7 on b\) has fedexp 0.1, torch 1.0; all machines"
    ):
        connect(b"a secret")
    size = 3
    with pytest.raises(KeyboardInterrupt):
        connect(b"a secret", interrupted)
    monkeypatch.setattr(world, "JOINING", timedelta(0))
    with pytest.raises(ConfigError, match=r"^rank 2 has not started within 0:00:00"):
        connect(b"a secret")


def test_an_address_that_only_one_machine_can_reach_is_refused():
    here, there = (Location(f"process 7 on {name}", name) for name in "ab")
    local = here._replace(address="127.0.1.1")
    world.check_addresses([local, local._replace(node="2")])
    world.check_addresses([here, there._replace(address="10.0.0.2")])
    words = r"^rank 1 \(process 7 on a\): its host name stands for 127.0.1.1, .* GLOO_SOCKET_IFNAME"
    with pytest.raises(ConfigError, match=words):
        world.check_addresses([there, local])


def test_a_missing_interface_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{world.LOOPBACK['GLOO_SOCKET_IFNAME']},eth99")
    words = r"^GLOO_SOCKET_IFNAME=eth99: rank 0 \(process \d+ on .*\) has no such network interface"
    with pytest.raises(ConfigError, match=words):
        world.connect(dist.HashStore(), 0, 1, b"a secret")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the connections")
def test_connections_notice_a_machine_that_is_gone():
    world.start(3, 1)
    seconds = []
    for path in Path("/proc/self/fd").glob("*"):
        if not path.is_socket():
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as end:
            end.getpeername()
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                idle, every, count = (
                    end.getsockopt(socket.IPPROTO_TCP, each)
                    for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                seconds.append(idle + every * count)
    assert seconds.count(300) >= 2  # one for each of the other ranks


def test_an_interrupted_command_does_not_wait_for_ranks(monkeypatch):
    answered, codes = Event(), []
    monkeypatch.setattr(world, "_world", World([], b"", launched=True))
    monkeypatch.setattr(os, "_exit", codes.append)
    thread = Thread(target=answered.wait, daemon=True)
    thread.start()
    world.stop([thread])
    world.stop()  # the end of the run
    world.leave()
    world.ends_with(1)  # another rank has died
    world.leave()
    answered.set()
    thread.join()
    world.leave()
    assert codes == [INTERRUPTED, 1]


STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09],cpu1",
}
SRUN = {"RANK": "3", "GROUP_RANK": "1", "WORLD_SIZE": "4"}
SRUN |= {"MASTER_ADDR": "gpu07", "MASTER_PORT": "26702"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, TORCHRUN),
        (STEP | TORCHRUN, TORCHRUN),  # torchrun in a job of Slurm
        (STEP, STEP | SRUN),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # sbatch
        ({}, None),
    ],
)
def test_torchrun_and_srun_are_recognised(variables, expected):
    assert is_launched(variables := dict(variables)) == (expected is not None)
    assert variables.items() >= (expected or {}).items()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "4"}, "RANK=4: must be less than WORLD_SIZE=4, if .*; otherwise unset RANK"),
        ({"RANK": "x"}, "RANK=x: must be a number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR=: must be the host of rank 0"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: must be from 1 to 65535"),  # it waited for ever
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, "--max-restarts is not supported; .* resume="),
    ],
)
def test_variables_that_no_launcher_sets_are_refused(changed, message):
    assert launch_of(TORCHRUN) == (1, 4, "a", 1)
    with pytest.raises(ConfigError, match=message):
        launch_of(TORCHRUN | changed)


@pytest.mark.parametrize(
    ("variables", "name"),
    [(TORCHRUN, "RANK"), (STEP, "SLURM_STEP_NUM_TASKS"), (STEP | TORCHRUN, "RANK")],
)
def test_without_one_variable_a_process_is_no_rank(variables, name):
    if "TORCHELASTIC_RUN_ID" not in variables and len(variables) > len(STEP):
        variables = variables | {"TORCHELASTIC_RUN_ID": "none"}
    assert is_launched(found := dict(variables))
    assert named(found)[0] == name
    assert f"{name}={found[name]}" in given(found)
    without = {key: value for key, value in variables.items() if key != name}
    assert not is_launched({**without, "SLURM_STEP_NUM_TASKS": "1"})


def test_python_refuses_to_run_in_several_ranks(monkeypatch, tmp_path):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    message = "^fedexp.run: RANK=1 WORLD_SIZE=4 .* each of them would train the whole run"
    with pytest.raises(ConfigError, match=message):
        fedexp.run(["rounds=1"], directory=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a1,b2", "a1"), ("gpu[007,9-12]", "gpu007"), ("r[1-2]n[03-04],c", "r1n03")],
)
def test_the_first_host_of_slurm_has_rank_0(nodes, host):
    assert first_host(nodes) == host
