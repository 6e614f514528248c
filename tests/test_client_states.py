"""Client states in memory and in files; the traffic of algorithms."""

import re

import pytest
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedfomo import FedFOMO
from fedexp.algorithms.fedgkd import FedGKD
from fedexp.algorithms.fedpac import FedPAC
from fedexp.algorithms.fedproto import FedProto
from fedexp.algorithms.fedrep import FedRep
from fedexp.algorithms.flashback import Flashback
from fedexp.algorithms.local_only import LocalOnly
from fedexp.algorithms.scaffold import Scaffold
from fedexp.core import memory
from fedexp.core.memory import free_memory, size_of
from fedexp.rundir import checkpoint
from fedexp.rundir.checkpoint import ClientStates, choose_place
from fedexp.training.rounds import play_round
from fedexp.training.run import place_states
from method_rows import declared
from test_algorithms import SHIPPED
from test_golden import RUNS, golden
from toy_federation import (
    CONF,
    PLAIN,
    flat,
    make_simulation,
    play,
)


def state(value):
    return {"c": {"w": torch.full((3, 2), float(value))}, "n": torch.tensor(value)}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("resident", [True, False])
def test_states_are_restored_from_files(tmp_path, resident):
    states = ClientStates()
    states.place(torch.device("cpu"), resident)
    states.update({3: state(3), 7: state(7)})
    versions = states.save(tmp_path, 1)
    assert versions == {3: 1, 7: 1}
    again = ClientStates(tmp_path, versions)
    again.place(torch.device("cpu"), resident)
    for source in (states, again):
        assert list(source) == [3, 7]
        torch.testing.assert_close(dict(source), {3: state(3), 7: state(7)}, rtol=0, atol=0)
    assert 4 not in again
    with pytest.raises(KeyError):
        again[4]


def test_only_changed_states_are_written_and_old_files_remain_until_tidy(tmp_path):
    states = ClientStates()
    states.update({0: state(0), 1: state(1)})
    first = states.save(tmp_path, 1)
    states[1] = state(5)
    assert states.save(tmp_path, 2) == {0: 1, 1: 2}
    assert names(tmp_path) == ["0.1.pt", "1.1.pt", "1.2.pt"]
    # If the run ended here, before its checkpoint, the previous checkpoint would still be complete.
    assert ClientStates(tmp_path, first)[1]["n"] == 1
    states.tidy()
    # the latest checkpoint may be damaged
    assert names(tmp_path) == ["0.1.pt", "1.1.pt", "1.2.pt"]
    states[1] = state(6)
    states.save(tmp_path, 3)
    states.tidy()
    assert names(tmp_path) == ["0.1.pt", "1.2.pt", "1.3.pt"]


def test_states_in_files_do_not_change_the_run(tmp_path):
    (row,) = [
        row
        for row in SHIPPED
        if row.cls.__name__ == "Scaffold" and row.live["divisor"] == "effective"
    ]
    simulation = row.simulation(rounds=4)
    before = play(simulation, 4)
    state = simulation.initial_state()
    state.clients.place(torch.device("cpu"), resident=False)
    for number in range(1, 5):
        state.advance(play_round(simulation, state))
        state.clients.save(tmp_path, number)
        state.clients.tidy()
    assert torch.equal(flat(state.server["params"]), flat(before.server["params"]))
    assert len({name.split(".")[0] for name in names(tmp_path)}) == len(state.clients) > 2


@pytest.mark.parametrize("keeps", [True, False])
def test_place_of_states_is_logged_if_clients_keep_any(keeps, caplog):
    algorithm = Scaffold(divisor="steps", variates="uniform") if keeps else FedAvg()
    simulation = make_simulation(algorithm)
    with caplog.at_level("INFO", logger="fedexp"):
        place_states(simulation, simulation.initial_state())
    assert ("client states: " in caplog.text) == keeps


def test_large_states_are_kept_in_files(monkeypatch):
    monkeypatch.setattr(checkpoint, "free_memory", lambda: 4_000_000_000)
    cpu = torch.device("cpu")
    assert choose_place(9_000_000, 100, cpu)[1:] == (
        True,
        "client states: 9.0 MB each, 900.0 MB in total for 100 clients; in memory",
    )
    home, resident, sentence = choose_place(9_000_000, 3432, cpu)
    assert (home, resident) == (cpu, False)
    assert sentence.startswith(
        "client states: 9.0 MB each, 30.89 GB in total for 3,432 clients; in memory-mapped files"
    )
    assert free_memory() > 0


@pytest.mark.parametrize(
    ("group", "folder", "limit", "used"),
    [
        ("0::/job/step", "job", "memory.max", "anon 200\nshmem 100\nfile 900"),
        ("4:memory:/job", "memory/job", "memory.limit_in_bytes", "total_rss 300\ncache 900"),
    ],
)
def test_a_limit_of_slurm_or_a_container_counts(tmp_path, monkeypatch, group, folder, limit, used):
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text(f"1:name=systemd:/\n{group}\n")
    assert free_memory() > 700
    (tmp_path / folder / "step").mkdir(parents=True)
    (tmp_path / folder / "step" / limit).write_text("max\n")
    (tmp_path / folder / limit).write_text("1000\n")
    (tmp_path / folder / "memory.stat").write_text(used)
    assert free_memory() == 700  # the kernel can free the cache of files
    assert size_of(1_500_000) == "1.5 MB"


# --- traffic

# Numbers that one client sends and receives in round 3. The model has 290 parameters: a convolution
# of 3 filters of 9 weights and a bias (30), a hidden layer of 8 x 27 + 8 (224), and a classifier of
# 4 x 8 + 4 (36). Sent numbers: by a client with one class of four, and by one with all classes.
FOMO = FedFOMO(models=2, validation=0.3, epsilon=0.0, epsilon_decay=0.05, distance="l1")
FLASHBACK = Flashback(gamma=0.1, epochs_on_server=1, on_clients=True, on_server=True)
NUMBERS = {
    "FedAvg": (FedAvg(), (290, 290), 290),
    # the model and a control variate, both ways
    "SCAFFOLD": (Scaffold(divisor="steps", variates="uniform"), (580, 580), 580),
    "FedRep": (FedRep(head_epochs=1), (254, 254), 254),  # the body, 30 + 224
    # a d_j for each of two models with the model; two models
    "FedFOMO": (FOMO, (292, 292), 580),
    # 8 numbers of a prototype and the count of its class; down, that it is known
    "FedProto": (FedProto(lambda_=1.0), (9, 36), 36),
    # with the model: of each class held a prototype, count, mean and mean square, 1 x or 4 x 18;
    # body 254, the client's classifier 36 and four known prototypes 4 x 9
    "FedPAC": (FedPAC(lambda_=1.0, head_lr=0.1, head_epochs=1), (308, 362), 326),
    # one number says whether there is distillation; the teacher of one model is the model itself
    "FedGKD of 1": (FedGKD(gamma=0.1, tau=1.0, models=1), (290, 290), 291),
    "FedGKD of 5": (FedGKD(gamma=0.1, tau=1.0, models=5), (290, 290), 581),
    "Flashback": (FLASHBACK, (294, 294), 294),  # four label counts
    "LocalOnly": (LocalOnly(), (0, 0), 0),
    **dict(declared("NUMBERS")),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_bytes_up_and_down_equal_hand_calculation(name):
    algorithm, up, down = NUMBERS[name]
    simulation = make_simulation(
        algorithm, PLAIN, (1, 12, 12), participation=1.0, public=0.2, rounds=3
    )
    assert (simulation.stages[0].partition.counts > 0).sum(1).tolist() == [1, 4, 4]
    result = play_round(simulation, play(simulation, 2))
    assert (result.bytes_up, result.bytes_down) == (8 * (up[0] + 2 * up[1]), 8 * 3 * down)


# their golden runs have another model or number of clients than FedAvg's, fewer than the default
# number of models, or the default variant
OTHERS = {"afcl", "fedfomo", "finetuning", "fednova"}
OTHERS |= {k for k, v in RUNS.items() if {"model=drawn_adapted", "model=drawn_transformer"} & {*v}}


def test_table_of_traffic_equals_the_counted_bytes():
    """In docs/algorithms/index.md: what each algorithm sends more than FedAvg, in models W.

    If a row has traffic in words too, its W are only the least that must be counted.
    """
    page = (CONF.parent / "docs" / "algorithms" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\([^|]*\| [^|]*\| ([^|]*)\|", page, re.MULTILINE)
    table = {name: cell.strip() for name, cell in rows if name not in OTHERS}
    assert len(table) > 35
    assert sum(" W" in cell for cell in table.values()) > 10
    for name, cell in table.items():
        for key, direction in (("bytes_up", "up"), ("bytes_down", "down")):
            size = re.compile(rf"\b{direction} (?:(\d+) )?W(?=[,;]|$)")
            more = float(found[1] or 1) if (found := size.search(cell)) else 0.0
            words = re.search(rf"\b{direction}\b|sent|images", size.sub("", cell))
            more -= "no model" in cell or "nothing sent" in cell
            sent, of_fedavg = (golden()[each]["rounds"][key][-1] for each in (name, "fedavg"))
            assert sent / of_fedavg > 1 + more - (0.34 if words else 0.05), (name, key)
            assert words or sent / of_fedavg < 1 + more + 0.05, (name, key)


def test_missing_models_and_prototypes_are_not_counted_as_traffic():
    """In round 1, there are no models of other clients and no prototypes."""
    found = []
    for algorithm in (FOMO, FedProto(lambda_=1.0)):
        simulation = make_simulation(algorithm, PLAIN, participation=1.0)
        found.append(play_round(simulation, simulation.initial_state()))
    assert [each.bytes_down for each in found] == [0, 0]
    assert found[0].bytes_up == 5 * 8 * 290


# --- models with running statistics
