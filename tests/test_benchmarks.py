"""Test that the reference of the benchmarks trains as fedexp does, and test their reports."""

import argparse
import contextlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is not part of the package

from benchmarks import __main__ as engines
from benchmarks import (
    bare,
    captured,
    convolutions,
    day,
    gpu,
    growth,
    measure,
    pairs,
    ranks,
    scale,
    timeline,
    w1,
)
from benchmarks import peers as peer_options
from benchmarks.measure import Contestant
from benchmarks.peers import __main__ as peers

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedntd import FedNTD
from fedexp.algorithms.local_training import LocalTraining
from fedexp.cli.main import main
from fedexp.data.augment import Augmentation, Normalise, load_batch
from fedexp.data.types import ImageData
from fedexp.engine.base import ClientRuntime, Cohort, Shared
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.schedule import make_schedule
from fedexp.engine.sequential import Sequential
from fedexp.models.cnn import CNN
from fedexp.training import prepare
from fedexp.training.simulation import Simulation
from toy_federation import LOCAL, Normed, assemble, assert_close, make_simulation, play

NTD = FedNTD(beta=1.0, tau=1.0, lambda_=1.0, distance="kl", tau_squared=True, mse_reduction="sum")
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
MODEL = CNN(channels=(32, 64), kernel=5, padding=2, hidden=(512,))


def pixels(n: int) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    )


FEW = (
    "num_clients=100",
    "participation=0.02",
    "local.epochs=1",
    "augment=false",
    "partition.min_size=1",
)


@pytest.mark.slow
def test_workload_has_the_examples_of_a_fedexp_run(tmp_path):
    chosen = [f"data_dir={tmp_path}", "dataset=few_random_pixels", *FEW]
    command = measure.fedexp(
        *w1.OVERRIDES, *chosen, "rounds=2", "hardware=cpu", "model.channels=[2,2]", "figures=false"
    )
    subprocess.run(
        [part.replace("OUT", str(tmp_path / "run")) for part in command], cwd=w1.ROOT, check=True
    )
    clients = pd.read_csv(tmp_path / "run" / "clients.csv")
    assert w1.prepare_workload(2, chosen).sizes.ravel().tolist() == clients.examples.tolist()


def test_workload_leaves_out_what_batch_norm_leaves_out(monkeypatch):
    """A last batch of one example. The sizes are those that fedexp trains on."""
    simulation = make_simulation(model=Normed(), sizes=(2, 3, 5, 8, 9))
    monkeypatch.setattr(w1, "make_simulation", lambda extra: simulation)
    monkeypatch.setattr(w1, "BATCH", 4)
    work, state = w1.prepare_workload(2, []), simulation.initial_state()
    for number in (1, 2):
        schedules = assemble(simulation, state, number).schedules
        assert work.examples(number) == sum(schedule.examples for schedule in schedules)
    assert not set(work.sizes.ravel().tolist()) & {5, 9}


@pytest.mark.slow
def test_bare_loop_trains_networks_with_running_statistics(tmp_path):
    """In a round of two clients without steps, the model does not change, and it is tested."""
    images = pixels(4)
    numbers = {"mean": MEAN, "std": STD, "indices": [0, 1], "sizes": [[1, 1]], "epochs": 0}
    arrays = {name: np.array(value) for name, value in numbers.items()}
    arrays |= {name: np.array(numbers[name], dtype=np.float32) for name in ("mean", "std")}
    arrays |= {"x_train": images.numpy(), "x_test": images.numpy()}
    arrays |= {"y_train": np.arange(4), "y_test": np.arange(4)}
    w1.Workload(**arrays).save(tmp_path)
    options = ["--model=resnet18", "--rounds=1", "--global-evaluation"]
    (row,) = bare.run(bare.parse([str(tmp_path), "unused", *options]))
    assert 0 <= row["test_accuracy"] <= 1
    assert row["evaluation_seconds"] > 0


def test_bare_augmentation_equals_fedexp():
    augmentation = Augmentation(
        crop_padding=4, padding_mode="zero", flip=True, cutout=16, rotation=0.0
    )
    images, draws = (
        pixels(20),
        torch.from_numpy(augmentation.draw(np.random.default_rng(1), 20, 32, 32)),
    )
    expected = load_batch(images, torch.arange(20), draws, augmentation, Normalise(MEAN, STD))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    actual = bare.augment(images, draws[:, :5].T, mean, std)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", [FedAvg(), NTD], ids=["fedavg", "fedntd"])
def test_bare_training_equals_fedexp(algorithm):
    """One client in float64, with 2 epochs of 3 batches."""
    torch.manual_seed(0)
    settings = dict(
        epochs=2, batch_size=4, optimizer="sgd", lr=0.05, lr_decay=1.0, momentum=w1.MOMENTUM
    )
    settings |= dict(weight_decay=w1.WEIGHT_DECAY)
    local, module = LocalTraining(**settings), MODEL.build((3, 32, 32), 10).double()
    module = module.to(memory_format=torch.channels_last)  # as in fedexp.training.prepare
    labels = torch.arange(10)
    data = ImageData(
        "noise", pixels(10), labels, pixels(10), labels, tuple("abcdefghij"), MEAN, STD
    )
    workbench = ClientRuntime(FunctionalNetwork(module, "fp64"), data, None, local, torch.float64)
    schedule = make_schedule(np.arange(10), local, None, (32, 32), seed=0, round=1, client=0)
    server = {
        "params": {k: v.detach().clone() for k, v in module.named_parameters()},
        "buffers": {},
    }
    cohort = Cohort(1, [0], [FedAvg()], [schedule], [{}], [{}], [{}])
    trained = Sequential().train(Shared(algorithm, workbench, server, local.lr), cohort, False)

    nets = [bare.Net().double().to(memory_format=torch.channels_last) for _ in range(2)]
    for net in nets:  # the parameters have the same order
        net.load_state_dict(dict(zip(net.state_dict(), server["params"].values(), strict=True)))
    rows = [row[:length] for row, length in zip(schedule.index, schedule.lengths, strict=True)]
    batches = [(*workbench.load_train(row, None),) for row in rows]
    assert [len(y) for _, y in batches] == [4, 4, 2, 4, 4, 2]
    bare.descend(
        nets[0], nets[1] if algorithm is NTD else None, iter(batches), local.lr, bf16=False
    )
    for actual, expected in zip(
        nets[0].parameters(), trained.messages["params"].values(), strict=True
    ):
        torch.testing.assert_close(actual.detach(), expected[0], rtol=0, atol=1e-12)


def write(folder: Path, seconds: list[float], examples: float = 100.0) -> None:
    rows = [
        {"round": n, "train_samples_per_second": examples / s, "train_seconds": s, "seconds": 2 * s}
        for n, s in enumerate(seconds, start=1)
    ]
    rows[-1]["test_accuracy"] = 0.25
    measure.write_rounds(folder, rows)


def test_first_round_is_not_counted(tmp_path: Path):
    write(tmp_path, [50.0, 1.0, 3.0])
    rep = measure.read_rounds(tmp_path)
    assert (rep.rate, rep.all_in, rep.seconds, rep.accuracy, rep.total) == (50, 25, 4, 0.25, 108)
    assert rep.examples == (100, 100)
    assert measure.read_rounds(tmp_path, last=2).seconds == 2


def test_table_takes_ratios_within_a_repetition(tmp_path: Path):
    """If the machine is slower in the second repetition, rates vary but ratios do not."""
    reps: dict[str, list[measure.Rep]] = {"floor": [], "ours": []}
    for slow in (1.0, 2.0):
        for name, seconds in (("floor", 3.0), ("ours", 2.0)):
            write(tmp_path, [9.0, slow * seconds])
            reps[name].append(measure.read_rounds(tmp_path, pss=slow, rss=3.0))
    floor, ours = Contestant("floor", ()), Contestant("ours", (), reference="floor")
    lines = measure.table([floor, ours], reps).splitlines()
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells == [
        *("ours", "2", "38 (25 to 50)", "6.00 (4.00 to 8.00)", "floor"),
        *("1.50 (1.50 to 1.50)", "1.50 (1.50 to 1.50)", "2.00 (3.00)", "0.250"),
    ]
    without = measure.table([floor, replace(ours, reference="skipped")], reps)
    assert "| ours | 2 | 38 (25 to 50) | 6.00 (4.00 to 8.00) |  |  |" in without


# --- the commands of all benchmarks


FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")


class Previews:
    """Check the commands of a benchmark, instead of running them, and write tables of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path):
        self.commands: list[list[str]] = []
        self.checked: list[list[str]] = []
        monkeypatch.chdir(folder)  # Hydra's default folders
        monkeypatch.setenv("FEDEXP_DATA", str(folder))
        monkeypatch.setattr(measure, "run_once", self.run_once)
        monkeypatch.setattr(gpu, "run_once", self.run_once)
        monkeypatch.setattr(gpu.subprocess, "run", self.run)
        monkeypatch.setattr(gpu.Day, "run", lambda *given: self.run_jobs(*given))
        monkeypatch.setattr(gpu, "multi_process_service", contextlib.nullcontext)
        for module in (engines, gpu, peers):
            monkeypatch.setattr(module, "prepare_workload", lambda *given: Saved())
        # a small simulation of the same algorithm, once the configuration has been built
        monkeypatch.setattr(prepare, "prepare", self.prepare)
        monkeypatch.setattr(pairs, "prepare", self.prepare)

    def prepare(self, built: Any) -> Simulation:
        self.commands.append(["prepare", str(built.algorithm)])
        return make_simulation(built.algorithm)

    def run_once(
        self,
        contestant: Contestant,
        out: Path,
        timeout: float,
        environment: Mapping[str, str],
        samples: list[float] | None = None,
    ) -> measure.Rep:
        self.run(contestant.command)
        write(out, [1.0, 2.0, 3.0, 4.0])
        path = out / "rounds.csv"
        pd.read_csv(path).assign(evaluation_seconds=0.5, bytes_down=8).to_csv(path, index=False)
        pd.DataFrame({"round": [4, 4], "client": [0, 1]}).to_csv(out / "clients.csv")
        if samples is not None:
            samples += [1.0, 1.0, 1.0]
        return measure.read_rounds(out)

    def run_jobs(self, day: gpu.Day, name: str, overrides: Sequence[str], jobs: int) -> None:
        self.run(day.command(name, overrides, jobs))
        day.known |= {Path(name, str(number)) for number in range(jobs)}

    def run(self, command: Sequence[str], **others: Any) -> None:
        self.commands.append([str(part) for part in command])
        module, *arguments = self.commands[-1][self.commands[-1].index("-m") + 1 :]
        if module == "benchmarks.bare":
            bare.parse(arguments)
        if module != "fedexp":  # of the tests of a peer's commands
            return
        folders = dict(each.split("=") for each in arguments if each.startswith("hydra."))
        settings = [each for each in arguments if each.partition("=")[0] not in FOLDERS]
        if settings not in self.checked:
            flags = [] if "--multirun" in settings else ["--multirun"]
            assert main([*flags, *settings, "preview=true"]) == 0, settings
            self.checked.append(settings)
        if (out := Path(folders.get("hydra.run.dir", ""))).is_absolute():  # of benchmarks.gpu
            out.mkdir(exist_ok=True)
            (out / "class_accuracy.csv").write_text("")


class Saved:
    """Stands for the images of a workload, which no preview reads."""

    def save(self, folder: Path) -> None:
        folder.mkdir()


@pytest.fixture
def previews(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Previews:
    return Previews(monkeypatch, tmp_path)


def fedexps(previews: Previews) -> list[list[str]]:
    return [command for command in previews.commands if "fedexp" in command]


def test_engine_benchmark_has_valid_commands(previews, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--no-results", "--precisions=fp32"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--repeats=1", "--local-evaluation"])
    assert engines.main() == 0
    assert len(fedexps(previews)) == 9  # three engines, three algorithms
    assert "left out" not in capsys.readouterr().out


def test_gpu_benchmark_has_valid_commands(previews, monkeypatch, capsys):
    """All parts with the default options. The times of single steps are not measured."""
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "machine", lambda: "a machine")
    monkeypatch.setattr(measure, "write_section", lambda *given: None)
    assert gpu.main(["--repeats=1", "--rounds-of-steps=1", "--jobs=1,2"]) == 0
    said = capsys.readouterr().out
    assert "not measured" not in said
    for model in gpu.RESNETS:
        assert f"| {model} vectorised | 1 |" in said
    assert len(fedexps(previews)) == 3 + 5 + 6 + 6 + 4
    assert len([each for each in previews.commands if each[0] == "prepare"]) == 6  # of `step`


def test_day_runs_its_parts_in_time(monkeypatch, capsys):
    """A part that reaches its limit or fails does not stop the next one."""
    sleep = "import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))"
    assert day.run("slow", [sys.executable, "-c", sleep, "60", "0"], 0.2).startswith(
        "slow: stopped after its 0 s"
    )
    assert day.run("bad", [sys.executable, "-c", sleep, "0", "3"], 60).startswith(
        "bad: exit code 3 in"
    )
    calls: list[tuple[str, float]] = []

    def run(name: str, command: Sequence[str], limit: float) -> str:
        calls.append((name, limit))
        return f"{name}: ended in 0 s"

    monkeypatch.setattr(day, "run", run)
    assert day.main(["--minutes=5"]) == 0
    assert [name for name, _ in calls] == [*day.PARTS]
    assert calls[0][1] == day.PARTS["captured"][0]
    assert calls[2][1] < day.PARTS["peers"][0]  # what is left
    assert day.main(["--minutes=0", "--parts=jobs"]) == 1
    assert "jobs: left out" in capsys.readouterr().out
    assert sum(limit for limit, *_ in day.PARTS.values()) <= 25 * 60


@pytest.mark.parametrize("quick", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize("name", day.PARTS)
def test_day_has_valid_arguments(name, quick, monkeypatch):
    """The parser of each part takes the part's arguments."""
    module, *arguments = day.PARTS[name][1 + quick].split()
    parsed: list[argparse.Namespace] = []

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, given: Any = None) -> Any:
        parsed.append(parse(parser, given))
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    modules = {"peers": peers, "gpu": gpu, "captured": captured, "timeline": timeline}
    with pytest.raises(Parsed):
        (modules | {"convolutions": convolutions})[module].main()
    assert len(parsed) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_peers_have_valid_commands(previews, monkeypatch, device):
    """The commands of all contestants, as if all simulators were installed."""
    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    monkeypatch.setattr(peers, "version", lambda name: "1.0")
    given = ["peers", f"--device={device}", "--blazefl=python", "--workers=2", "--repeats=1"]
    monkeypatch.setattr(sys, "argv", [*given, "--precisions=fp32", "--only=workers, fedavg"])
    monkeypatch.setattr(peers, "blazefl_of", lambda python: "BlazeFL 3.0.0")
    monkeypatch.setattr(measure, "write_section", lambda *given: None)
    monkeypatch.setattr(measure, "machine", lambda: "a machine")
    assert peers.main() == 0
    names = {command[command.index("-m") + 1 :][0] for command in previews.commands}
    modules = [each for each in previews.commands if any("benchmarks.peers." in x for x in each)]
    for command in modules:
        index = next(i for i, x in enumerate(command) if x.startswith("benchmarks.peers."))
        options = peer_options.make_parser("a peer", None).parse_args(command[index + 1 :])
        assert options.workers == 2
    assert len(modules) == (4 if device == "cpu" else 3)
    assert len(fedexps(previews)) == 1
    assert ("benchmarks.bare" in names) == (device == "cuda")


def test_other_benchmarks_have_valid_commands(previews, monkeypatch, capsys):
    assert scale.main(["--images=4", "--no-results"]) == 0
    assert len(fedexps(previews)) == 4
    monkeypatch.setattr(sys, "argv", ["growth", "--no-results", "--sampled=10,500"])
    assert growth.main() == 0
    # two numbers of clients a round and ResNet-18, on two engines, and two numbers in all
    assert len(fedexps(previews)) == 4 + 2 * 2 + 2 + 2
    assert "left out" not in capsys.readouterr().out


def test_growth_draws_its_picture(tmp_path):
    found = {}
    for number, point in enumerate(growth.points([1, 10], [100], 100)):
        found[point] = growth.Measured(8.6, 50.0, 1.0 + number, 2.0 + number, 1.0)
    growth.draw(found, tmp_path / "growth.svg")
    first = (tmp_path / "growth.svg").read_bytes()
    growth.draw(found, tmp_path / "growth.svg")
    assert (tmp_path / "growth.svg").read_bytes() == first
    assert b"<svg" in first
    assert [point.name for point in found][:2] == [
        "1 of 100, cnn, sequential",
        "10 of 100, cnn, sequential",
    ]
    assert [point.engine for point in found].count("2 ranks") == 3


def test_simulations_of_benchmarks_can_be_built(previews):
    """Those of `pairs`, of the ranks, and of the convolutions."""
    data = [*w1.OVERRIDES, *w1.data_overrides()]
    for name, make in pairs.PAIRS.items():
        assert len(make(data)) == 2, name
    options = argparse.Namespace(other=None, only="")
    for version in ranks.versions(options):
        for command in version.commands(w1.data_overrides()):
            w1.make_simulation(command[command.index(ranks.PROGRAM) + 1 :])
    for precision, algorithm in product(convolutions.PRECISIONS, ("fedntd", "fedavg")):
        convolutions.Steps(precision, algorithm, "cuda")
    assert len(previews.commands) == 2 + 1 + 2 + 1 + 5 + 6


def test_transformers_of_benchmarks_are_the_ones_named(monkeypatch):
    """An option of a group replaces its keys, so the network's name must come after it."""
    models = []
    monkeypatch.setattr(pairs, "prepare", lambda built: models.append(built.model) or built)
    pairs.vit(w1.data_overrides())
    pairs.transformer([], "model=timm", *pairs.TINY, "model.freeze=[backbone]")
    options = argparse.Namespace(quick=False, device="cpu", precision="fp32", overrides=[])
    models.append(w1.built(captured.settings_of("vit", "fedavg", options)).model)
    assert {model.name for model in models} == {"vit_tiny_patch16_224"}
    assert [model.lora.rank for model in models if hasattr(model, "lora")] == [8, 8, 8]


def test_later_values_replace_earlier_ones():
    given = ["seed=0", "model=cnn", "model.hidden=[8]", "local.lr=1", "model=t_cnn", "seed=1,2"]
    assert measure.last_values(given) == ["local.lr=1", "model=t_cnn", "seed=1,2"]


SMALL_SCALE = ["--clients=200", "--partitions=iid", "--client-rounds=3", "--rounds=4"]
SMALL_SCALE += ["--images=300"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gpu_benchmark_prints_its_figures(capsys, monkeypatch):
    """Run two small rounds on a CPU and check the form of the output. The other two parts have the
    commands that are checked above, and read the same files."""
    parts = ("step", "rounds", "repeat", "jobs")
    arguments = ["--device=cpu", "--rounds=2", "--bare-rounds=2", "--repeats=1"]
    arguments += [f"--parts={','.join(parts)}"]
    small = ["dataset=few_random_pixels", "num_clients=20", "local.epochs=1"]
    small += ["model.channels=[4,4]", "model.hidden=[8]"]
    arguments += ["--rounds-of-steps=2", "--precisions=fp32"]
    assert gpu.main([*arguments, "--jobs=2", "--", *small, "hardware.threads=1"]) == 0
    text = capsys.readouterr().out
    for row in ("fedntd fp32 | 2 |", "fp32 | 1 |", "fp32 | yes", "fedavg | 2 | "):
        assert f"| {row}" in text
    assert all(gpu.GOALS[part] in text for part in parts)


@pytest.mark.slow
def test_scale_benchmark_prints_its_tables(capsys):
    assert scale.main([*SMALL_SCALE, "--no-results"]) == 0
    text = capsys.readouterr().out
    assert "| iid | 2 |" in text
    assert "| ms a round |" in text
    assert "trains on 0.0 GiB of images" in text


@pytest.mark.parametrize(
    "name",
    [
        name if name == "views" else pytest.param(name, marks=pytest.mark.slow)
        for name in pairs.PAIRS
    ],
)
def test_pairs_train_the_same_model(name, capsys):
    """Testing more changes no weight, and the other pairs differ only by rounding (fp32)."""
    if name in ("vit", "head"):
        pytest.importorskip("timm")
    small = ["--set=participation=0.03", "--set=model.channels=[4,8]", "--set=model.hidden=[16]"]
    assert pairs.main([name, "--quick", "--rounds=1", *small]) == 0
    found = capsys.readouterr().out
    assert found.startswith(f"{name}: ")
    apart = float(found.partition("largest difference of a weight ")[2].split()[0])
    assert apart == 0 if name == "views" else apart < 1e-4


@pytest.mark.parametrize(
    "case",
    [
        {"algorithm": NTD},
        {"model": Normed(), "algorithm": NTD},
        {"local": replace(LOCAL, keep_optimizer=True)},
        {"local": replace(LOCAL, optimizer="adam")},
    ],
    ids=["fedntd", "batch norm", "kept optimizer", "adam"],
)
def test_captured_clients_train_as_the_sequential_engine_does(case):
    """Two rounds, in which four clients share two slots, whose steps read the memory of a slot."""
    simulation = make_simulation(**case)
    expected = play(simulation, 2).server
    for exact in (True, False):
        engine = captured.Captured(streams=2, exact=exact)
        found = play(replace(simulation, engine=engine), 2).server
        assert engine.recorded >= 2
        assert_close(found, expected, 0 if exact else 1e-12)


def test_decision_follows_its_rule():
    """Without the control, captured must be at least as fast everywhere, and nothing missing."""
    names = [*captured.NETWORKS]
    ratios: dict[str, float | None] = {f"{name} fedavg bf16": 0.9 for name in names}
    ratios["cnn fedavg bf16"] = 2.0
    gone = captured.decide(ratios, names)
    assert "can go: captured takes at most 0.90" in gone
    counted = [int(line.split()[-1]) for line in gone.partition(" lines: ")[2].split(", ")]
    assert f"; {sum(counted)} lines:" in gone
    assert min(counted) > 5
    assert "can go" not in captured.decide(ratios, names[1:])
    assert "none: not measured: vit" in captured.decide(ratios | {"vit fedavg bf16": None}, names)
    slower = captured.decide(ratios | {"vit fedavg bf16": 1.1}, names)
    assert slower.endswith("stays: captured is slower on vit fedavg bf16 1.10")


@pytest.mark.slow
def test_captured_benchmark_prints_its_lines(capsys):
    small = ["--device=cpu", "--precision=fp32", "--quick", "--exact", "--rounds=1"]
    small += ["--budget=inf"]  # the default is for a day on a GPU, and a busy machine reaches it
    assert captured.main([*small, "--networks=textcnn", "--algorithms=fedntd"]) == 0
    text = capsys.readouterr().out
    exact = "textcnn fedntd fp32 captured, exact: models compared: to its steps without graphs"
    assert f"{exact} equal bits, to sequential equal bits" in text
    assert "textcnn fedntd fp32 captured: 0." in text
    # one network of ten: not enough to let the general part go, whichever is faster here
    assert re.search(r"decision: (none: not measured: |the general part stays: )", text)


def test_timeline_counts_each_second_once(monkeypatch):
    """The time of a call that is listed does not count for its caller, and the first call is one
    row."""
    times = iter(range(100))
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: next(times))
    clock = timeline.Clock()  # 0 s
    inner = clock.timed(lambda: None, "inner")
    outer = clock.timed(lambda: inner(), "outer")
    outer()  # imports until 1, outer until 2, inner until 3, outer until 4
    assert clock.seconds == {"imports": 1, "outer": 2, "inner": 1}
    once = clock.split_first(outer)
    once()
    before = dict(clock.seconds)
    assert before["first round's training"] == 5  # four laps of `outer`, and the end
    assert before["inner"] == 1
    once()
    assert clock.seconds["inner"] == 2


def test_timeline_finds_its_parts():
    for module, name, _ in timeline.PARTS:
        assert callable(timeline.replaced(module, name)[2])


@pytest.mark.slow
def test_timeline_adds_up(capsys):
    small = ["dataset=digits", "num_clients=5", "participation=0.4", "local.epochs=1"]
    small += ["dataset.augmentation.crop_padding=1", "partition.min_size=1", "hardware.threads=1"]
    small += ["hardware.engine=sequential", "model.channels=[4,4]", "model.hidden=[8]"]
    options = ["--device=cpu", "--precision=fp32", "--rounds=2"]
    assert timeline.main([*options, "--", *small]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if " | " in line]
    rows = {name.strip("| "): float(cell.strip("| ")) for name, cell in lines[2:]}
    total = rows.pop("all in")
    assert sum(rows.values()) == pytest.approx(total, abs=0.2)
    assert {"figures", "tests", "first round's training", "exit"} <= rows.keys()


def test_shares_of_the_limit():
    """A share is limit / own for seconds, and own / limit for examples per second."""
    limit = Contestant("limit", ()), measure.Rep(100.0, 0, 4.0, 0, 0, 0, (), 0, tests=1.0)
    own = Contestant("own", ()), measure.Rep(80.0, 0, 5.0, 0, 0, 0, (), 0, tests=2.0)
    table = peers.shares([own[0]], {c.name: [rep] for c, rep in (limit, own)}, "limit")
    assert table.splitlines()[-1] == "| own | 0.80 | 0.50 | 1.00 | 0.80 |"


def test_section_of_results_is_replaced_where_it_is(tmp_path):
    path = tmp_path / "RESULTS.md"
    for name, text in (("A", "old"), ("A B", "other"), ("A", "new")):
        measure.write_section(name, text, path)
    assert path.read_text().endswith("README.md.\n\n## A\n\nnew\n\n## A B\n\nother\n")
