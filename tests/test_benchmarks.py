"""Test that the reference of the benchmarks trains as fedexp does, and test their reports."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is not part of the package

from benchmarks import bare, gpu, measure, pairs, scale, w1
from benchmarks.measure import Contestant
from benchmarks.peers import __main__ as peers

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedntd import FedNTD
from fedexp.algorithms.local_training import LocalTraining
from fedexp.data.augment import Augmentation, Normalise, load_batch
from fedexp.data.types import ImageData
from fedexp.engine.base import ClientRuntime, Cohort, Shared
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.schedule import make_schedule
from fedexp.engine.sequential import Sequential
from fedexp.models.cnn import CNN

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


SMALL_SCALE = ["--clients=200", "--partitions=iid", "--client-rounds=3", "--rounds=4"]
SMALL_SCALE += ["--images=300"]


@pytest.mark.slow
def test_gpu_benchmark_prints_every_figure(capsys, monkeypatch):
    """Run two small rounds on a CPU and check the form of the output."""
    arguments = ["--device=cpu", "--rounds=2", "--bare-rounds=2", "--repeats=1"]
    small = ["dataset=few_random_pixels", "num_clients=20", "local.epochs=1"]
    small += ["model.channels=[4,4]", "model.hidden=[8]"]
    arguments += ["--rounds-of-steps=2", "--precisions=fp32", "--models=resnet10"]
    monkeypatch.setattr(gpu, "SEEDS", "0,1")
    monkeypatch.setattr(gpu, "JOBS", (2,))
    assert gpu.main([*arguments, "--", *small, "hardware.threads=1"]) == 0
    text = capsys.readouterr().out
    for row in ("fedntd fp32 | 2 |", "fp32 | 1 |", "scaffold fp32 | 1 |", "fp32 | yes", "2 | "):
        assert f"| {row}" in text
    assert all(goal in text for goal in gpu.GOALS.values())


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
