"""The command that fills papers' tables on a GPU, with tiny jobs on the CPU."""

import re

import pytest
from tools import gpu_day

from fedexp_papers.evidence import read_table

SMALL = (
    *("hardware=cpu", "hardware.precision=fp32", "hardware.threads=1", "dataset=digits"),
    *("num_clients=5", "participation=0.4", "rounds=3", "local.epochs=1", "model.channels=[4,4]"),
    *("model.hidden=[8]", "test_views=[plain]"),
)
BLOCK = ("fedntd_table1", "experiment=fedntd/cifar10_s2 algorithm=fedavg,fedntd seed=0")


@pytest.mark.slow
def test_jobs_are_measured_run_and_collected(tmp_path, monkeypatch, capfd):
    """The two jobs of a block, measured one by one. A second call has nothing left to run."""
    monkeypatch.setattr(gpu_day, "BLOCKS", (BLOCK,))
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    arguments = [*folders, "--minutes", "9", "--seconds", "1", "--sizes", "1", "--", *SMALL]
    assert gpu_day.main(arguments) == 0
    text = capfd.readouterr().out
    assert re.search(r"^1 jobs: \d+\.\d\d rounds/s, 0\.0 GiB$", text, re.MULTILINE)
    assert "used from now on: 1 jobs" in text
    assert len(re.findall(r"completed, accuracy 0\.\d{4}, forgetting \S+, 3 rounds", text)) == 2
    before = read_table(tmp_path / "out" / "fedntd_table1")
    assert sorted(line["summary"]["algorithm"] for line in before.values()) == ["fedavg", "fedntd"]
    assert all(line["origin"]["started"] for line in before.values())
    assert gpu_day.main(arguments) == 0
    assert "completed" not in capfd.readouterr().out
    assert read_table(tmp_path / "out" / "fedntd_table1") == before


def test_bad_input_ends_the_day_with_its_message(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "BLOCKS", (BLOCK,))
    arguments = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--", "rouns=3"]
    with pytest.raises(SystemExit, match="rouns"):
        gpu_day.main(arguments)
    assert not (tmp_path / "out").exists()
