"""`fedexp report --appendix`: what the appendix of a sweep says, and that LaTeX can read it."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from fedexp.analysis.groups import WITHIN
from fedexp.analysis.layout import Section, latex_appendix, latex_text
from fedexp.cli.main import main
from fedexp.data.partitioned import Partition
from fedexp.rundir import origin
from quick_runs import SMALL, change_summary, make_run


def sections(text: str) -> dict[str, dict[str, list[str]]]:
    """Return the rows of appendix.md by title: first cell -> the other cells."""
    found = {}
    for part in text.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        cells = [re.split(r" \| ", line[2:-2]) for line in lines if line.startswith("| ")]
        found[title] = {row[0]: row[1:] for row in cells[2:]}
    return found


def read(directory) -> dict[str, dict[str, list[str]]]:
    return sections((directory / "appendix.md").read_text())


# what LaTeX reads: a command, a character with a meaning, or text
TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|[&%$#_{}~^]|[^\\&%$#_{}~^]+", re.DOTALL)
OF_TABLES = {
    "toprule",
    "midrule",
    "bottomrule",
    "endhead",
    "endfirsthead",
    "endfoot",
    "endlastfoot",
}
OF_TABLES |= {"multicolumn", "raggedright", "arraybackslash", "linewidth", "begin", "end"}
OF_TABLES |= {"dimexpr", "tabcolsep", "par", "ifdim", "pagegoal", "pagetotal", "baselineskip"}
OF_TABLES |= {"newpage", "fi"}
OF_TEXT = {"section", "subsection", "texttt", "textbf", "pm", "dagger", "textless", "textgreater"}
OF_TEXT |= {"allowbreak", "textbar", "textbackslash", "textasciitilde", "textasciicircum"}


def read_latex(text: str) -> list[str]:
    """Check the syntax of appendix.tex, and return its environments.

    Commands that tables consist of, and those of `latex_text`, are known; others fail.
    """
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    tokens = [(found[0], body[found.end() :]) for found in TOKEN.finditer(body)]
    depth, math = 0, False
    for token, _ in tokens:
        depth += (token == "{") - (token == "}")
        assert depth >= 0, "a brace closes nothing"
        math ^= token == "$"
        assert math or token != "^", "^ outside math"
        assert token not in ("%", "#", "_", "~"), f"{token} is not escaped"
        assert token.startswith("\\") or "--" not in token, "would be a dash"
        command = token[1:] if token[0] == "\\" else "begin"
        assert command in OF_TABLES | OF_TEXT or command in "&%$#_{}\\", f"unknown: {token}"
    assert (depth, math) == (0, False)
    return read_tables(tokens)


def read_tables(tokens: list[tuple[str, str]]) -> list[str]:
    """Check the environments and the numbers of cells in their rows."""
    names, opened, columns, cells = [], [], 0, 1
    for token, rest in tokens:
        if token == "\\begin":
            names.append(re.match(r"\{(\w+)\}", rest)[1])
            opened.append(names[-1])
            columns = rest.split("\n", 1)[0].count("p{")
        elif token == "\\end":
            assert opened.pop() == re.match(r"\{(\w+)\}", rest)[1]
        elif token == "\\multicolumn":
            cells += int(rest[1]) - 1
        elif token == "&":
            cells += 1
        elif token == "\\\\":
            assert opened, "a row outside a table"
            assert cells == columns, "a row has another number of cells"
            assert not re.match(r"\s*[\[*]", rest), "would be an argument of the end of the row"
            cells = 1
    assert (opened, cells) == ([], 1)
    return names


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return a sweep of two methods and two seeds, with its appendix."""
    directory = tmp_path_factory.mktemp("appendix") / "swept"
    methods = ["algorithm=fedavg,fedprox", "seed=0,3", "rounds=1"]
    place = [f"hydra.sweep.dir={directory}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", "/my lib")
        assert main(["--multirun", *methods, *SMALL, *place]) == 0
    assert main(["report", str(directory), "--no-figures", "--appendix"]) == 0
    return directory


def test_appendix_says_what_the_files_of_the_runs_say(swept):
    found, jobs = read(swept), sorted(path.parent for path in swept.glob("*/origin.json"))
    data, clients, model = (found[title] for title in ("Data", "Clients and partition", "Model"))
    assert [data[key] for key in ("classes", "training examples", "test examples")] == [
        *(["10"], ["1437"], ["360"])
    ]
    assert data["validation examples"] == ["0"]
    assert data["`dataset.mean`"] == ["[0.3054]"]
    assert data["`dataset.augmentation.flip`"] == ["false"]
    partitions = [Partition.load(job / "partition.npz") for job in jobs]
    sizes = np.concatenate([each.sizes for each in partitions])
    low, middle, high = sizes.min(), np.median(sizes), sizes.max()
    assert clients["examples of a client"] == [f"{low} to {high} (median {middle:g})"]
    assert clients["divisions"] == ["2"]
    assert clients["`num_clients`"] == ["8"]
    # 25 weights and a bias of 4 channels, 4 x 4 pixels of them to 8 units, and these to 10
    assert model["trained parameters"] == [str((25 + 1) * 4 + (64 + 1) * 8 + (8 + 1) * 10)]

    values = {job.name: origin.read(job)["values"] for job in jobs}
    differ, equal = found["Settings that differ"], found["Settings that are equal"]
    assert differ["`algorithm.mu`"][1] == "FedProx"
    every = sorted({key for of_run in values.values() for key in of_run})
    same = [k for k in every if len({json.dumps(v.get(k, "-")) for v in values.values()}) == 1]
    shown = {*equal, *data, *clients, *model}
    assert {f"`{key}`" for key in same if not key.startswith(WITHIN)} <= shown
    assert {f"`{key}`" for key in every if key not in same and key[:4] != "seed"} == differ.keys()
    assert equal["`local.lr`"] == [str(values[jobs[0].name]["local.lr"])]
    assert not equal.keys() & differ.keys()

    assert found["Seeds"]["FedAvg"] == ["2", "0, 3", "2 completed"]
    tests = found["Tests"]
    assert [tests["test sets"], tests["`evaluate`"]] == [["plain"], ['["global"]']]
    (hardware,) = found["Hardware and time"].values()
    seconds = [json.loads((job / "summary.json").read_text())["seconds"] for job in jobs]
    assert hardware[:4] == ["sequential", "1", "1", "4"]
    assert float(hardware[5]) == pytest.approx(sum(seconds) / 3600, abs=0.005)
    part = origin.read(jobs[0])["parts"][0]
    assert found["Software"]["torch"] == [part["versions"]["torch"]]
    many = f"{len(part['packages'])} packages, in `origin.json` of each run"
    assert found["Software"]["all packages"] == [many]
    ((command, number),) = found["Commands"].items()
    assert command.startswith("`PYTHONPATH='/my lib' fedexp --multirun algorithm=fedavg,fedprox")
    assert number == ["4"]
    assert "Own files" not in found


def test_appendix_for_latex_has_all_tables(swept):
    text = (swept / "appendix.tex").read_text()
    titles = re.findall(r"\\subsection\{(.*)\}", text)
    assert titles == list(read(swept))
    assert read_latex(text) == ["longtable"] * len(titles)
    assert r"fedexp -{}-multirun" in text


def test_appendix_stays_up_to_date_and_is_not_written_unasked(swept, tmp_path):
    (swept / "appendix.md").unlink()
    assert main(["report", str(swept), "--no-figures"]) == 0
    assert (swept / "appendix.md").exists()  # since appendix.tex is there
    make_run(tmp_path, ["algorithm=fedavg", "seed=0"], [0.1, 0.5])
    assert main(["report", str(tmp_path), "--no-figures"]) == 0
    assert not list(tmp_path.glob("appendix*"))


def test_appendix_says_what_earlier_versions_did_not_record(tmp_path):
    """Their origin.json has neither commands nor packages nor parameters, or there is none."""
    strange = "my_{50%}~#&$^<a>|--b\\c"
    for seed, name in enumerate(["algorithm=fedavg", f"algorithm={strange}"]):
        make_run(tmp_path, [name, f"seed={seed}", "alpha=[1]"], [0.1, 0.5], seed=seed)
    (tmp_path / "run0/origin.json").unlink()
    assert main(["report", str(tmp_path), "--no-figures", "--appendix"]) == 0
    found = read(tmp_path)
    assert found["Model"]["parameters"] == ["not recorded"]
    assert found["Data"]["training examples"] == ["not recorded"]
    assert found["Clients and partition"]["examples of a client"] == ["not recorded"]
    assert found["Software"]["all packages"] == ["not recorded"]
    assert found["Commands"] == {"not recorded": ["2"]}
    assert "0.00" not in json.dumps(found["Hardware and time"])
    read_latex((tmp_path / "appendix.tex").read_text())


def test_time_of_a_resumed_run_is_divided_among_its_machines(tmp_path):
    """Rounds 0 to 2 take 1 s each on two threads, rounds 3 and 4 take 2 h each in four ranks."""
    make_run(tmp_path, ["algorithm=fedavg", "seed=0"], [0.1, 0.2, 0.3, 0.4], seed=0)
    directory = tmp_path / "run0"
    table = pd.read_csv(directory / "rounds.csv").assign(seconds=[1, 1, 1, 7200, 7200])
    table.to_csv(directory / "rounds.csv", index=False)
    known = json.loads((directory / "origin.json").read_text())
    machine = {"name": "A", "device": "cpu", "precision": "fp32", "engine": "vectorised"}
    other = machine | {"name": "B", "engine": "workers", "workers": 4, "threads": 2}
    known["parts"] = [
        {"first_round": 0, "hardware": machine | {"workers": 1, "threads": 2}},
        {"first_round": 3, "hardware": other},
    ]
    (directory / "origin.json").write_text(json.dumps(known))
    change_summary(directory, seconds=14403)
    assert main(["report", str(tmp_path), "--no-figures", "--appendix"]) == 0
    assert read(tmp_path)["Hardware and time"] == {
        "A (cpu, fp32)": ["vectorised", "1", "2", "1", "0.00", "0.00"],
        "B (cpu, fp32)": ["workers", "4", "2", "1", "4.00", "32.00"],
    }


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("a_b & 50%", r"a\_b \& 50\%"),
        ("`--config-dir` <x>", r"\texttt{-{}-config-dir} \textless{}x\textgreater{}"),
        ("[1, 2]", "{}[1, 2]"),
        ("**1.0 ± 0.1**", r"\textbf{1.0 $\pm$ 0.1}"),
        ("-1.5 [-2, 1e-3], n=-1", "$-$1.5 [$-$2, 1e-3], n=$-$1"),
        ("2026-11-28 a-1 `mu=-1` -", r"2026-11-28 a-1 \texttt{mu=-1} -"),
    ],
)
def test_text_for_latex_is_escaped(text, latex):
    assert latex_text(text) == latex


@pytest.mark.parametrize(
    "wrong",
    [
        "a_b",
        "50# x",
        "{",
        r"\unknown",
        r"\begin{longtable}{p{1}p{1}}" + "\n" + r"a & b & c \\" + "\n" + r"\end{longtable}",
        r"\begin{longtable}{p{1}}" + "\n" + r"a \\" + "\n[b]" + "\n" + r"\end{longtable}",
        r"\begin{longtable}{p{1}}",
        "fedexp --help",
    ],
)
def test_reader_of_latex_finds_errors(wrong):
    with pytest.raises(AssertionError):
        read_latex(wrong)


def test_long_words_of_an_appendix_may_be_broken():
    """Others would overlap the next column. The widths follow the texts and add up to the line."""
    texts = {"value": ["fedexp.data.Digits_of_us", "0.125"], "hash": ["0123456789" * 4, "1"]}
    names = ["`dataset.augmentation.flip`", "mu"]
    part = Section("Data", pd.DataFrame(texts, names), "key")
    text = latex_appendix("mine", [], [part])
    read_latex(text)
    assert r"\texttt{dataset.\allowbreak{}augmentation.\allowbreak{}flip}" in text
    assert r"fedexp.\allowbreak{}data.\allowbreak{}Digits\_\allowbreak{}of\_\allowbreak{}us" in text
    assert text.count(r"0123456789\allowbreak{}") == 3
    assert "mu & 0.125 & 1 " in text
    widths = [float(each) for each in re.findall(r"dimexpr ([\d.]+)", text)]
    assert sum(widths) == pytest.approx(1, abs=2e-3)
    assert widths[2] > widths[0] > widths[1]
