"""Learning curves of committed runs: what a picture shows, and that it and the report follow from
the files alone."""

import re
import xml.etree.ElementTree as ET

import pandas as pd
import pytest

from fedexp.analysis.sweep import load_sweep
from fedexp.cli.commands import call
from fedexp.core.errors import ConfigError
from fedexp.papers import curves
from fedexp.papers.svg import HIGH, LEFT, TOP, WIDE, Curve, Panel, chart, path, ticks
from fedexp.rundir import evidence
from fedexp.rundir.sweeps import SweepDirectory
from test_evidence import remove_runs
from test_reproduction import run_directory
from test_status import in_both_views
from toy_federation import CONF

SVG = "{http://www.w3.org/2000/svg}"
HARDWARE = {"name": "CPU", "device": "cpu", "precision": "fp32"}


def add_run(sweep, name, algorithm, *options):
    run = {
        "rounds": "mnist_s2_fedavg_rounds.csv",
        "overrides": ["experiment=fedntd/mnist_s2", f"algorithm={algorithm}", *options],
        "commit": "abcdef0",
        "hardware": HARDWARE,
    }
    run_directory(sweep / name, run)


def committed(tmp_path, *runs):
    """A checkout with the files of runs of Table 1: (name, algorithm, options)."""
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    sweep = tmp_path / "multirun" / "fedntd_table1"
    for name, algorithm, *options in runs:
        add_run(sweep, name, algorithm, *options)
    SweepDirectory(sweep).mark("fedntd_table1")
    return sweep


def keep(sweep):
    evidence.keep_runs(sweep)
    remove_runs(sweep)


def test_corners_are_rounds_and_values():
    """Rounds 0, 5, 10 of 10 at 0.25, 1 and 0 in a panel of 760 x 420 at (90, 80): corners (90,
    395), (470, 80) and (850, 500); the band of 0.1 at the first round from 353 to 437, and cut at
    the panel's edges."""
    line = Curve(0, [(0, 0.25), (5, 1.0), (10, 0.0)], [0.1, 0.5, 0.5])
    root = ET.fromstring(
        chart("a < b", [Panel("accuracy", [line])], [(0, "FedAvg & co", False)], 1)
    )
    paths = [each.get("d") for each in root.iter(f"{SVG}path")]
    assert (WIDE, HIGH, LEFT, TOP) == (760, 420, 90, 80)
    assert f"M{90} {395}l380 -315 380 420" in paths
    assert "M90 353l380 -273 380 210 0 210 -380 -210 -380 147z" in paths
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert {"a < b", "accuracy", "FedAvg & co", "0", "10"} <= {*texts}


def test_the_order_of_options_makes_no_other_setting(tmp_path):
    """The same two options, given in both orders; the third run is there so that they are not
    shared by all."""
    options = ("local.batch_size=50", "local.epochs=5")
    keep(
        committed(
            tmp_path,
            ("a", "fedavg", *options),
            ("b", "fedntd", *reversed(options)),
            ("c", "fedavg"),
        )
    )
    runs = list(curves.kept_runs(tmp_path / "multirun" / "fedntd_table1"))
    found = {setting: sorted(methods) for setting, methods in curves.settings(runs).items()}
    assert found == {
        "fedntd/mnist_s2": ["fedavg"],
        "fedntd/mnist_s2 local.batch_size=50 local.epochs=5": ["fedavg", "fedntd"],
    }


@pytest.mark.parametrize(
    ("last", "expected"), [(1, [0, 1]), (20, [0, 2, 4]), (200, [0, 20, 40]), (45, [0, 5, 10])]
)
def test_ticks(last, expected):
    assert ticks(last)[: len(expected)] == expected
    assert len(ticks(last)) <= 11


def test_a_path_of_one_corner():
    assert path([(3, 4)]) == "M3 4"


def test_a_picture_has_all_methods_of_its_setting(tmp_path):
    """FedAvg with two seeds, FedNTD, FedCurv of before its correction; released code of FedAvg and
    FedNTD."""
    runs = [
        ("a", "fedavg"),
        ("b", "fedavg", "hardware.precision=bf16"),
        ("c", "fedntd"),
        ("d", "fedcurv"),
    ]
    sweep = committed(tmp_path, *runs)
    rounds = pd.read_csv(sweep / "b" / "rounds.csv")
    rounds["test_accuracy"] *= 0.5
    rounds.to_csv(sweep / "b" / "rounds.csv", index=False)
    summary = sweep / "b" / "summary.json"
    summary.write_text(summary.read_text().replace('"seed": 0', '"seed": 1'))
    keep(sweep)
    found = curves.pictures(tmp_path, load_sweep("fedntd_table1", [CONF]))
    assert [path.as_posix() for path in found] == [
        "docs/reproduction/curves/fedntd_table1_fedntd_mnist_s2.svg"
    ]
    (svg,) = found.values()
    assert len(svg) < 40_000
    root = ET.fromstring(svg)
    texts = [each.text for each in root.iter(f"{SVG}text")]
    for words in (
        "fedavg, 2 seeds",
        "fedntd",
        "fedcurv (older code)",
        "fedavg, released code",
        "fedntd, released code",
        "test accuracy, plain test",
        "forgetting F, plain test",
    ):
        assert words in texts
    assert not any("augmented" in words for words in texts)
    released = curves.released_curves("fedntd/mnist_s2")
    assert released["fedavg"][0] == (20, 0.435)
    assert len(list(root.iter(f"{SVG}circle"))) == sum(map(len, released.values())) + 2
    # The line of FedAvg: the mean of x and x / 2, at round 200 of 200.
    original = rounds["test_accuracy"].iloc[-1] / 0.5
    steps = next(
        each.get("d") for each in root.iter(f"{SVG}path") if each.get("stroke-width") == "3"
    )
    numbers = list(map(int, re.findall(r"-?\d+", steps)))
    assert (sum(numbers[::2]), sum(numbers[1::2])) == (
        LEFT + WIDE,
        TOP + HIGH - round(HIGH * 0.75 * original),
    )


def test_both_views_and_the_run_that_has_them(tmp_path):
    """A seed that was run again in both views is drawn once, from that run."""
    sweep = committed(tmp_path, ("a", "fedavg"), ("b", "fedavg"))
    in_both_views(sweep, "b")
    keep(sweep)
    (svg,) = curves.pictures(tmp_path, load_sweep("fedntd_table1", [CONF])).values()
    texts = [each.text for each in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {"test accuracy, augmented test", "forgetting F, augmented test", "fedavg"} <= {*texts}


def test_a_run_of_another_sweep_is_drawn(tmp_path):
    sweep = committed(tmp_path, ("a", "fedavg"))
    other = tmp_path / "multirun" / "fedntd_table8"
    add_run(other, "b", "fedavg")
    for name in ("summary.json", "rounds.csv"):
        (other / "b" / name).unlink()
    (other / "b" / "elsewhere.json").write_text('{"run": "../../fedntd_table1/a"}')
    keep(sweep)
    keep(other)
    assert len(curves.pictures(tmp_path, load_sweep("fedntd_table8", [CONF]))) == 1
    (sweep / evidence.FOLDER / "a.json.xz").unlink()
    assert curves.pictures(tmp_path, load_sweep("fedntd_table8", [CONF])) == {}


def test_the_report_shows_them_and_is_checked(tmp_path, capsys):
    sweep = committed(tmp_path, ("a", "fedavg"))
    keep(sweep)
    root = ["--root", str(tmp_path)]
    assert call("reproduction", root) == 0
    picture = tmp_path / "docs" / "reproduction" / "curves" / "fedntd_table1_fedntd_mnist_s2.svg"
    first = picture.read_bytes()
    assert call("reproduction", [*root, "--check"]) == 0
    picture.write_text("x")
    (picture.parent / "gone.svg").write_text("x")
    assert call("reproduction", [*root, "--check"]) == 1
    assert "gone.svg is not current" in capsys.readouterr().out
    assert call("reproduction", root) == 0
    assert picture.read_bytes() == first
    assert [path.name for path in picture.parent.iterdir()] == [picture.name]


def test_a_damaged_file_is_one_message(tmp_path, capsys):
    sweep = committed(tmp_path, ("a", "fedavg"))
    keep(sweep)
    (sweep / evidence.FOLDER / "b.json.xz").write_bytes(b"x")
    assert call("reproduction", ["--root", str(tmp_path)]) == 2
    assert not (tmp_path / "REPRODUCTION.md").exists()
    with pytest.raises(ConfigError):
        curves.pictures(tmp_path, load_sweep("fedntd_table1", [CONF]))
