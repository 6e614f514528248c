"""`fedexp compare A B`: whether two runs are equal, and where they differ first."""

import json
import shutil

import pandas as pd

import fedexp
from fedexp.analysis.compare import first_difference
from fedexp.cli.main import main
from fedexp.core.storage import read_table
from fedexp.rundir import files
from quick_runs import SMALL


def test_first_difference_and_its_reasons_are_named(tmp_path, capsys):
    """Times do not count. The versions are from another machine, and the third run has another
    option from the first round on."""
    runs = [tmp_path / name for name in ("one", "two", "three")]
    fedexp.run([*SMALL, "rounds=2"], directory=runs[0])
    shutil.copytree(runs[0], runs[1])
    (runs[1] / "checksums.json").unlink()  # its files are changed below
    table = read_table(runs[1] / "rounds.csv")
    table["seconds"] += 1
    table.to_csv(runs[1] / "rounds.csv", index=False)

    def compared(*two):
        capsys.readouterr()
        code = main(["compare", *map(str, two)])
        return code, "".join(capsys.readouterr()).splitlines()

    assert compared(*runs[:2]) == (0, ["equal"])
    origin = json.loads((runs[1] / "origin.json").read_text())
    origin["parts"].append(origin["parts"][0] | {"first_round": 2})  # resumed, nothing else changed
    (runs[1] / "origin.json").write_text(json.dumps(origin))
    changed = [
        "options, versions and machines that differ",
        "  parts.1.first_round: (absent) and 2",
    ]
    assert compared(*runs[:2]) == (0, ["equal", *changed])
    del origin["parts"][1]
    origin["parts"][0]["versions"]["torch"] = "1.0"
    (runs[1] / "origin.json").write_text(json.dumps(origin))
    table.loc[2, "train_loss"] = 7.5
    table.to_csv(runs[1] / "rounds.csv", index=False)
    code, lines = compared(*runs[:2])
    assert code == 1
    assert lines[0] == "different"
    assert lines[1].startswith("  round 2, rounds.csv, train_loss: ")
    assert lines[1].endswith(" and 7.5")
    assert lines[2] == "options, versions and machines that differ"
    assert lines[3].startswith("  parts.0.versions.torch: ")
    assert lines[3].endswith(" and 1.0")
    fedexp.run([*SMALL, "rounds=1", "local.lr=0.2", "alpha=9"], directory=runs[2])
    code, lines = compared(runs[0], runs[2])
    assert (code, lines[1]) == (1, "  partition.npz: the clients have different examples")
    assert any(line.startswith("  local.lr: ") and line.endswith(" and 0.2") for line in lines)
    table[:2].to_csv(runs[1] / "rounds.csv", index=False)
    missing = "  round 2, rounds.csv: is missing in the second run"
    assert compared(*runs[:2])[1][1] == missing
    code, lines = compared(runs[0], tmp_path)
    assert (code, "is not a run directory" in lines[0]) == (2, True)
    for name in (*files.TABLES, files.SUMMARY):  # as if both had ended before round 0
        for run in runs[:2]:
            (run / name).unlink(missing_ok=True)
    code, lines = compared(*runs[:2])
    assert code == 2
    assert "one/rounds.csv: is missing" in lines[0]


def test_a_missing_value_differs_from_a_number_only():
    one = pd.DataFrame({"round": [0, 1], "forgetting": [None, 0.25]})
    other = one.assign(forgetting=[None, float("nan")])
    assert first_difference("rounds.csv", other, other.copy()) == []
    line = "round 1, rounds.csv, forgetting: 0.25 and nan"
    assert first_difference("rounds.csv", one, other) == [(1, line)]
