"""Test the page of `fedexp view`: its data, their escaping, and what a browser shows."""

import base64
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from browser import Page, chromium, find_chromium
from fedexp.analysis.sweep import load_sweep
from fedexp.analysis.view import render
from fedexp.analysis.view.collect import LEVELS, MOST_POINTS, collect
from fedexp.cli.commands import call
from fedexp.papers.aggregate import comparison_table, write_tables
from toy_federation import CONF

NAMES = ("FedNTD", "FedAvg")  # the better one first
NASTY = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>'\"&<!--"


def write_run(
    directory: Path,
    overrides: dict[str, str],
    rounds: int = 6,
    classes: int = 3,
    status: str = "completed",
    names: list[str] | None = None,
) -> Path:
    """Write a run directory in which the accuracy of class c after round r is known."""
    groups = {"algorithm": "fedavg", "dataset": "digits", "partition": "lda"}
    chosen = groups | {"seed": "0"} | overrides
    groups = {key: chosen[key] for key in groups}
    (directory / ".hydra").mkdir(parents=True)
    given = [f"{key}={value}" for key, value in overrides.items()]
    (directory / ".hydra/overrides.yaml").write_text(yaml.safe_dump(given))
    config = {key: yaml.safe_load(chosen[key]) for key in chosen.keys() - groups.keys()}
    config |= {"rounds": rounds, "local": {"epochs": 5}, "choices": groups}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    seed, number = int(chosen["seed"]), np.arange(rounds + 1)
    shift = 0.01 * seed + 0.05 * (chosen["algorithm"] != "fedavg")
    accuracy = np.minimum(1, number[:, None] / (rounds + 1 + np.arange(classes)) + shift)
    table = pd.DataFrame(accuracy).rename_axis("round").rename_axis("class", axis="columns")
    table.stack().rename("accuracy").to_csv(directory / "class_accuracy.csv")
    columns = {"round": number, "test_accuracy": accuracy.mean(1), "test_loss": 2.3, "lr": 0.1}
    columns |= {"forgetting": np.where(number > 1, 0.1 * number, np.nan)}
    columns |= {"bytes_up": 5, "seconds": 1.5}
    pd.DataFrame(columns).to_csv(directory / "rounds.csv", index=False)
    names = names or [f"class {c}" for c in range(classes)]
    np.savez(directory / "partition.npz", classes=np.array(names))
    summary = groups | {"status": status, "seed": seed, "rounds": rounds, "seconds": 1.5 * rounds}
    summary |= {"accuracy": accuracy[-1].mean(), "best_accuracy": accuracy.mean(1).max()}
    summary |= {"forgetting": 0.1 * rounds, "rounds_to_target": {"0.5": None}}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def change_summary(directory: Path, **values) -> None:
    path = directory / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_sweep(
    folder: Path, algorithms=("fedavg", "fedntd"), alphas=("0.1", "1"), seeds=2, **options
) -> Path:
    for algorithm in algorithms:
        for alpha in alphas:
            for seed in range(seeds):
                overrides = {"algorithm": algorithm, "alpha": alpha, "seed": str(seed)}
                write_run(folder / f"{algorithm}_{alpha}_{seed}", overrides, **options)
    return folder


def add_augmented(directory: Path) -> list[float]:
    """Add a second test view with half of each accuracy; return the accuracies of the first."""
    table = pd.read_csv(directory / "class_accuracy.csv")
    table.assign(accuracy=table["accuracy"] / 2).to_csv(
        directory / "class_accuracy_augmented.csv", index=False
    )
    return table["accuracy"].tolist()


def page_data(page: str) -> dict:
    """Return the data of a page as the browser reads them."""
    return json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])


def level(value: float) -> int:
    return round(min(max(value, 0), 1) * LEVELS)


# --- the data


def test_page_has_the_results_of_a_sweep(tmp_path):
    sweep = write_sweep(tmp_path / "mine")
    data = page_data(render(collect([sweep])))
    assert (data["title"], len(data["runs"])) == ("mine", 8)
    assert data["methods"] == ["FedAvg", "FedNTD"]
    assert data["settings"] == ["digits lda alpha=0.1", "digits lda alpha=1"]
    run = next(run for run in data["runs"] if run["name"] == "fedntd_1_1")
    assert (run["status"], run["seed"], run["problems"]) == ("completed", 1, [])
    assert (data["methods"][run["method"]], data["settings"][run["setting"]]) == (
        "FedNTD",
        "digits lda alpha=1",
    )
    assert data["axes"][run["axis"]] == list(range(7))
    expected = [np.mean([min(1, r / (7 + c) + 0.06) for c in range(3)]) for r in range(7)]
    assert run["curves"]["test_accuracy"] == [float(f"{value:.4g}") for value in expected]
    assert run["curves"]["forgetting"] == [None, None, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert data["measures"][:2] == ["test_accuracy", "forgetting"]
    assert not {"bytes_up", "seconds", "lr"} & set(data["measures"])
    levels = np.frombuffer(base64.b64decode(run["heat"]["data"]), np.uint8).reshape(7, 3)
    assert levels.tolist() == [[level(r / (7 + c) + 0.06) for c in range(3)] for r in range(7)]
    assert data["classes"][run["heat"]["classes"]] == ["class 0", "class 1", "class 2"]


def test_differing_options_come_first(tmp_path):
    keys = collect([write_sweep(tmp_path / "mine", seeds=1)])["keys"]
    assert [key["key"] for key in keys if "of" in key] == ["alpha", "choices.algorithm"]
    assert keys[0] == {"key": "alpha", "values": ["0.1", "1"], "of": [0, 1, 0, 1]}
    assert {"key": "local.epochs", "values": ["5"]} in keys


def test_tables_equal_those_of_the_report(tmp_path):
    """Columns without information are omitted."""
    sweep = write_sweep(tmp_path / "mine")
    write_tables(sweep)
    (table,) = collect([sweep])["tables"]
    for name, kind in (("table.csv", "means"), ("rounds_to_target.csv", "targets")):
        written = pd.read_csv(sweep / name)
        columns = table[kind]["columns"][1:]
        left_out = written.drop(columns=["setting", "method", *columns]).dropna(axis=1, how="all")
        left_out = left_out.drop(columns="rounds_to_target_0.5_reached", errors="ignore")
        assert set(left_out) <= {"target", "diverged", "pruned", "seeds", "commits", "hardware"}
        values = pd.DataFrame([row[1:] for row in table[kind]["rows"]], columns=columns)
        pd.testing.assert_frame_equal(
            values.fillna(np.nan), written[columns], check_dtype=False, rtol=5e-4
        )
    names = [f"alpha={alpha} {name}" for alpha in ("0.1", "1") for name in NAMES]
    assert [row[0] for row in table["means"]["rows"]] == names, "the better one of a setting first"
    assert table["means"]["best"]["accuracy"] == [0, 2]
    assert table["means"]["best"]["forgetting"] == [0, 1, 2, 3], "equal"


def test_diverged_runs_are_counted_if_there_are_any(tmp_path):
    sweep = write_sweep(tmp_path / "mine")
    assert "diverged" not in collect([sweep])["tables"][0]["means"]["columns"]
    change_summary(sweep / "fedntd_1_1", status="diverged")
    assert collect([sweep])["tables"][0]["means"]["columns"][-2:] == ["n", "diverged"]


def test_named_sweep_is_compared_with_published_values(tmp_path):
    sweep = tmp_path / "fedntd_table1"
    for seed in ("0", "1"):
        write_run(
            sweep / f"run{seed}",
            {"experiment": "fedntd/mnist_s2", "algorithm": "fedavg", "seed": seed},
        )
    data = collect([sweep], comparison_table)
    (table,) = data["tables"]
    assert data["title"] == load_sweep("fedntd_table1", [CONF]).title
    accuracy, forgetting = table["cells"]["FedAvg"]["MNIST s=2"]
    assert (accuracy["printed"], accuracy["n"], accuracy["verdict"]) == (
        "78.63",
        2,
        "not judged: no augmented view",
    )
    assert accuracy["ours"] == "76.29", (
        "plain test, last round: mean of 6/7, 6/8 and 6/9, and 1 point more"
    )
    assert (forgetting["metric"], forgetting["printed"]) == ("forgetting", "0.20")
    empty = table["cells"]["FedNTD"]["MNIST s=2"][0]
    assert (empty["n"], empty["verdict"], empty["ours"]) == (0, "not run", "")


def test_page_can_show_single_runs_or_several_directories(tmp_path, capsys):
    sweep = write_sweep(tmp_path / "mine", seeds=1)
    other = write_sweep(tmp_path / "other", algorithms=["fedprox"], seeds=1)
    runs = sorted(path for path in sweep.iterdir())[:2]
    assert [run["name"] for run in collect(runs)["runs"]] == [path.name for path in runs]
    assert [run["name"] for run in collect([runs[0]])["runs"]] == [runs[0].name]
    both = collect([sweep, other])
    assert [table["title"] for table in both["tables"]] == ["mine", "other"]
    assert {run["name"].split("/")[0] for run in both["runs"]} == {"mine", "other"}
    assert call("view", [str(runs[0])]) == 0
    assert (runs[0] / "view.html").exists()
    assert call("view", [str(path) for path in runs]) == 0
    assert (sweep / "view.html").exists(), "the directory that they share"


def test_page_lists_missing_and_damaged_files_and_failed_runs(tmp_path):
    sweep = write_sweep(tmp_path / "mine", alphas=["1"], seeds=3)
    (sweep / "fedavg_1_0/class_accuracy.csv").unlink()
    (sweep / "fedavg_1_1/summary.json").write_text('{"status": "comp')
    (sweep / "fedavg_1_2/rounds.csv").write_text("")
    (sweep / "fedntd_1_0/config.yaml").write_text("a: [")
    with (sweep / "fedntd_1_1/rounds.csv").open("a") as file:
        file.write("7,0.9")  # killed while it wrote
    (sweep / "fedntd_1_2/summary.json").unlink()
    failed = sweep / "went_wrong"
    failed.mkdir()
    (failed / "summary.json").write_text('{"status": "failed", "algorithm": "fedavg"}')
    (failed / "error.txt").write_text("Traceback\nValueError: boom")
    runs = {run["name"]: run for run in collect([sweep])["runs"]}
    problems = {name: ", ".join(run["problems"]) for name, run in runs.items()}
    assert problems["fedavg_1_0"] == "class_accuracy.csv: is missing"
    assert problems["fedavg_1_1"].startswith("summary.json: is not json (")
    assert problems["fedavg_1_2"] == "rounds.csv: is empty"
    assert problems["fedntd_1_0"].startswith("config.yaml: is not yaml (")
    assert problems["fedntd_1_1"] == "rounds.csv: ends in the middle of a row"
    assert problems["fedntd_1_2"] == "summary.json: is missing"
    assert {runs[f"fedavg_1_{seed}"]["status"] for seed in range(3)} == {"damaged"}
    assert runs["fedavg_1_0"]["heat"] is None
    assert "curves" not in runs["fedavg_1_2"]
    assert len(runs["fedntd_1_1"]["curves"]["test_accuracy"]) == 7  # without half of a row
    assert runs["fedntd_1_2"]["status"] == "unfinished"
    failed = {"status": "failed", "error": "Traceback\nValueError: boom", "setting": None}
    assert runs["went_wrong"] == runs["went_wrong"] | failed


def test_command_is_quoted_for_a_shell(tmp_path):
    """The run may come from another person."""
    path = write_run(tmp_path / "run", {"tracker.name": "$(touch stolen); x", "seed": "1"})
    (run,) = collect([path])["runs"]
    assert run["command"] == "fedexp 'tracker.name=$(touch stolen); x' seed=1"


def test_long_runs_are_thinned(tmp_path):
    (run,) = collect([write_run(tmp_path / "long", {}, rounds=700, classes=30)])["runs"]
    assert run["every"] == 3
    assert len(run["curves"]["test_accuracy"]) <= MOST_POINTS + 1
    assert run["heat"]["every"] == 2
    assert len(base64.b64decode(run["heat"]["data"])) == 30 * 351, "with the last round"


def test_runs_are_named_by_the_options_in_which_they_differ(tmp_path):
    """Settings have data set and partition. A run without overrides has no name."""
    write_run(tmp_path / "run0", {"dataset": "a", "x": "1", "y": "1", "algorithm": "fedntd"})
    write_run(tmp_path / "run1", {"dataset": "a", "x": "2", "y": "1", "algorithm": "fedavg"})
    write_run(tmp_path / "run2", {"dataset": "b", "y": "1", "algorithm.mu": "3"})
    (tmp_path / "run3").mkdir()
    (tmp_path / "run3/error.txt").write_text("ValueError")
    data = collect([tmp_path])
    assert data["settings"] == ["a lda x=1", "a lda x=2", "b lda"]
    assert data["methods"] == ["FedAvg", "FedAvg mu=3", "FedNTD"]
    assert [run["setting"] for run in data["runs"]] == [0, 1, 2, None]
    assert [run["method"] for run in data["runs"]] == [2, 0, 1, None]


def test_text_in_results_cannot_break_out_of_the_html_page(tmp_path):
    run = write_run(tmp_path / "bad", {"note": NASTY}, names=[NASTY, "b", "c"])
    data = collect([run])
    page = render(data | {"title": NASTY})
    assert page.count("</script>") == 2, "of the data and of the script"
    assert "<img" not in page
    assert page_data(page)["classes"] == [[NASTY, "b", "c"]]


def test_page_contains_no_external_address(tmp_path):
    page = render(collect([write_run(tmp_path / "run", {})]))
    for address in ("http:", "https:", "//cdn", "@import", "src=", "url("):
        assert address not in page.replace("http://www.w3.org/2000/svg", ""), address


# --- the command


def test_command_prints_the_path_of_the_page(tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    sweep = write_sweep(tmp_path / "mine", seeds=1)
    assert call("view", [str(sweep), "--out", str(tmp_path / "page.html"), "--open"]) == 0
    assert capsys.readouterr().out.strip().endswith("page.html")
    assert opened == [(tmp_path / "page.html").as_uri()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "page.html"]


@pytest.mark.parametrize("case", ["missing", "a file", "empty", "unwritable"])
def test_unusable_paths_are_rejected(case, tmp_path, capsys):
    sweep = write_sweep(tmp_path / "sweeps" / "mine", seeds=1, alphas=["1"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    arguments, message = {
        "missing": ([str(tmp_path / "sweeps/mien")], "mien: no such directory (nearest: 'mine')"),
        "a file": ([str(next(sweep.glob("*/rounds.csv")))], "rounds.csv: is not a directory"),
        "empty": ([str(tmp_path / "empty")], "empty: contains no runs; a run directory contains"),
        "unwritable": (
            [str(sweep), "--out", str(tmp_path / "taken")],
            "taken: cannot be written (Is a directory)",
        ),
    }[case]
    before = sorted(tmp_path.rglob("*"))
    assert call("view", arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_both_test_views_have_heat_maps(tmp_path):
    """The values of the selector are the names of a run's heat maps in the data."""
    sweep = write_sweep(tmp_path / "mine", seeds=1)
    accuracies = add_augmented(sweep / "fedavg_0.1_0")
    call("view", [str(sweep)])
    text = (sweep / "view.html").read_text(encoding="utf-8")
    selector = text.partition('<select id="view">')[2].partition("</select>")[0]
    values = re.findall(r'value="(\w+)"', selector)
    assert values == ["heat", "heat_augmented"]
    runs = {run["name"]: run for run in page_data(text)["runs"]}
    both = [name for name, run in runs.items() if values[1] in run]
    assert both == ["fedavg_0.1_0"]
    first, second = (
        np.frombuffer(base64.b64decode(runs[both[0]][name]["data"]), np.uint8) for name in values
    )
    assert second.tolist() == [level(value / 2) for value in accuracies]
    assert first.tolist() == [level(value) for value in accuracies]


# --- a real browser


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Open the page of a sweep with hostile names, a diverged run and a failed run."""
    folder = tmp_path_factory.mktemp("view")
    sweep = write_sweep(folder / "mine", algorithms=["fedavg", "fedntd"], seeds=3, classes=4)
    write_run(
        sweep / "hostile",
        {"algorithm": "fedprox", "alpha": "1", "note": NASTY},
        names=[NASTY, "b", "c"],
    )
    write_run(sweep / "off", {"algorithm": "moon", "alpha": "1"}, status="diverged")
    (sweep / "broken").mkdir()
    (sweep / "broken/summary.json").write_text(json.dumps({"status": "failed", "error": NASTY}))
    (sweep / "broken/error.txt").write_text(NASTY)
    add_augmented(sweep / "fedavg_0.1_0")
    change_summary(sweep / "fedntd_0.1_1", personal_accuracy=0.8125)
    assert call("view", [str(sweep)]) == 0
    with chromium() as page:
        page.look(1200, 900)
        page.open(sweep / "view.html")
        page.settle()
        yield page


browser = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="needs chromium (apt-get install chromium)"),
]


def choose(page: Page, selector: str, value: str, event: str = "change") -> None:
    page.run(
        f"(s => {{ s.value = {value!r}; s.dispatchEvent(new Event({event!r}));"
        f" }})(document.querySelector({selector!r}))"
    )
    page.settle()


def click(page: Page, selector: str, text: str) -> None:
    page.run(
        f"[...document.querySelectorAll({selector!r})]"
        f".find(b => b.textContent === {text!r}).click()"
    )
    page.settle()


def show(page: Page, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).scrollIntoView()")
    page.settle()


def texts(page: Page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({selector!r})].map(node => node.textContent)")


class TestInBrowser:
    pytestmark = browser

    def test_page_is_shown_without_requests(self, shown):
        assert "15 runs" in shown.run("document.querySelector('#about').textContent")
        assert texts(shown, "#statuses button") == ["13 completed", "1 diverged", "1 failed"]
        assert len(texts(shown, "#runs tbody tr")) == 15
        assert len(texts(shown, "#results tbody tr")) == 6
        assert [address.split(":")[0] for address in shown.requests] == ["file"]
        assert shown.errors == []

    def test_columns_are_shown_if_a_run_has_them(self, shown):
        heads = texts(shown, "#runs thead th")
        assert "validation" not in heads
        column = heads.index("personal")
        cells = texts(shown, f"#runs tbody tr td:nth-child({column + 1})")
        assert sorted(set(cells)) == sorted(["0.8125", "–"])
        assert cells[texts(shown, "#runs button.link").index("fedntd_0.1_1")] == "0.8125"

    def test_hostile_text_is_shown_as_text(self, shown):
        click(shown, "#runs button.link", "broken")
        assert NASTY in shown.run("document.querySelector('#details').textContent")
        shown.run("document.querySelector('#details').close()")
        assert NASTY in shown.run("document.querySelector('#configuration').textContent")
        assert shown.run("typeof window.hacked") == "undefined"
        assert shown.run("document.images.length") == 0
        assert shown.run("document.scripts.length") == 2

    def test_selectors_change_the_curves(self, shown):
        choose(shown, "#setting", "0")  # alpha=0.1
        lines = "#curves .charts .panel:first-child path[stroke-dasharray]"
        assert len(texts(shown, lines)) == 2
        assert len(texts(shown, "#heat canvas")) == 2
        choose(shown, "#seeds", "lines")
        assert len(texts(shown, lines)) == 6
        choose(shown, "#setting", "1")  # alpha=1: also MOON, which ends with a cross
        assert len(texts(shown, lines)) == 3 + 3 + 2
        choose(shown, "#seeds", "band")
        assert len(texts(shown, lines)) == 2 + 2
        click(shown, "#methods button", "FedNTD")
        assert len(texts(shown, lines)) == 1 + 2
        assert "hidden=1" in shown.run("location.hash")
        click(shown, "#methods button", "all")
        assert shown.errors == []

    def test_test_view_can_be_chosen(self, shown):
        """The second view has half of each accuracy."""
        choose(shown, "#setting", "0")
        choose(shown, "#seed", "0")
        show(shown, "#heat")
        picture = "document.querySelector('#heat canvas').toDataURL()"
        assert not shown.run("document.querySelector('#view').parentElement.hidden")
        before = shown.run(picture)
        choose(shown, "#view", "heat_augmented")
        assert shown.run(picture) != before
        assert "view=heat_augmented" in shown.run("location.hash")
        choose(shown, "#view", "heat")
        assert shown.run(picture) == before
        choose(shown, "#seed", "mean")

    def test_heat_maps_have_the_colours_of_their_values(self, shown):
        """The colours are those of viridis."""
        choose(shown, "#setting", "0")
        show(shown, "#heat")
        look = (
            "(c => [...c.getContext('2d').getImageData(c.width - 3, {row}, 1, 1).data].slice(0, 3))"
            "(document.querySelector('#heat canvas'))"
        )
        last = shown.run(look.format(row=4))  # class 0, last round: mean of 6/7 + 0, 0.01, 0.02
        place = (6 / 7 + 0.01) * 9
        assert 7 < place < 8
        low, high = np.array([0x6E, 0xCE, 0x58]), np.array([0xB5, 0xDE, 0x2B])
        assert np.abs(np.array(last) - (low + (high - low) * (place - 7))).max() < 4
        raw = shown.run(look.format(row=60))
        choose(shown, "#scale", "normalised")
        assert shown.run(look.format(row=60)) != raw
        choose(shown, "#scale", "raw")

    def test_search_finds_runs(self, shown):
        choose(shown, "#find", "fedntd alpha=1 seed=2", "input")
        assert texts(shown, "#runs tbody tr:not([hidden]) button.link") == ["fedntd_1_2"]
        assert texts(shown, "#found") == ["1 of 15 runs"]
        shown.run("document.querySelector('#statuses button.diverged').click()")
        assert texts(shown, "#runs tbody tr:not([hidden]) button.link") == ["off"]

    def test_page_can_be_used_with_the_keyboard(self, shown):
        choose(shown, "#setting", "0")
        shown.run("document.querySelector('#setting').focus()")
        shown.press("ArrowDown")
        assert shown.run("document.querySelector('#setting').value") == "1"
        assert "setting=1" in shown.run("location.hash")
        shown.run("document.querySelector('#methods button').focus()")
        shown.press(" ")
        assert (
            shown.run("document.querySelector('#methods button').getAttribute('aria-pressed')")
            == "false"
        )
        shown.press(" ")
        show(shown, "#curves")
        shown.run("document.querySelector('#curves svg.chart').focus()")
        shown.press("ArrowRight")
        assert shown.run("document.querySelector('#tip').textContent").startswith("round 0")
        shown.press("ArrowRight")
        assert shown.run("document.querySelector('#tip').textContent").startswith("round 1")

    def test_address_restores_the_selection(self, shown, tmp_path):
        source = shown.run("decodeURI(location.pathname)")
        page = shutil.copy(source, tmp_path / "copy.html")
        shown.open(Path(page), "#setting=1&seeds=lines&scale=normalised&hidden=0")
        shown.settle()
        values = [
            shown.run(f"document.querySelector('#{name}').value")
            for name in ("setting", "seeds", "scale")
        ]
        assert values == ["1", "lines", "normalised"]
        assert texts(shown, "#methods [aria-pressed=false]") == ["FedAvg"]
