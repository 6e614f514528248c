"""What a run records of its command, packages and the user's own files."""

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fedexp
from fedexp.analysis.compare import compare_runs
from fedexp.cli.main import main
from fedexp.rundir import origin
from fedexp.training import own_files
from quick_runs import SMALL

SMOOTHED = """
import torch.nn.functional as F
from fedexp.algorithms.base import FedAvg
from own_package import helper
from .constants import SHARE
import own_beside


class Smoothed(FedAvg):
    smoothing: float = SHARE

    def example_loss(self, net, params, batch, ctx):
        logits = net(params, batch.x).logits
        return F.cross_entropy(logits, batch.y, reduction="none", label_smoothing=self.smoothing)
"""
FILES = {
    "own_package/__init__.py": "",
    "own_package/smoothed.py": SMOOTHED,
    "own_package/helper.py": "import json, numpy\n",
    "own_package/constants.py": "SHARE = 0.1\n",
    "own_package/unused.py": "",
    "own_beside.py": "",
    "conf_own/algorithm/smoothed.yaml": "_target_: own_package.smoothed.Smoothed\nsmoothing: 0.1\n",
    "conf_own/outputs/run/config.yaml": "seed: 0\n",
}
USED = sorted({*FILES} - {"own_package/unused.py", "conf_own/outputs/run/config.yaml"})
OWN = ["--config-dir", "conf_own", "algorithm=smoothed"]
RUN = [*SMALL, "hardware=cpu", "hydra.run.dir=run"]


@pytest.fixture
def own(here, monkeypatch):
    """Change to a directory with an own algorithm."""
    for name, text in FILES.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    monkeypatch.syspath_prepend(here)
    yield here
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def copies(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_run_keeps_its_own_files_its_command_and_all_packages(own, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "./lib")
    monkeypatch.setenv("SECRET", "correct-horse-battery")
    assert main([*OWN, *RUN, "rounds=1"]) == 0
    assert copies(own / "run/source") == {name: FILES[name] for name in USED}
    found = origin.read(own / "run")
    (part,) = found["parts"]
    assert sorted(part["own_files"]) == USED
    assert part["own_files"]["own_beside.py"] == own_files.hashlib.sha256(b"").hexdigest()
    assert part["packages"]["torch"] == metadata.version("torch")
    assert {"fedexp", "hydra-core", "pillow"} <= part["packages"].keys()
    command = {"argv": ["fedexp", *OWN, *RUN, "rounds=1"], "directory": str(own)}
    assert found["commands"] == [{"first_round": 0, **command, "PYTHONPATH": "./lib"}]
    assert found["parameters"]["all"] == found["parameters"]["trained"] > 0
    for path in (own / "run").rglob("*"):
        assert not path.is_file() or b"correct-horse" not in path.read_bytes(), path


def test_resumed_run_keeps_what_has_changed(own):
    assert main([*OWN, *RUN, "rounds=1"]) == 0
    again = ["--config-dir", "conf_own", "resume=run"]
    assert main([*again, "rounds=2"]) == 0  # with equal files
    assert not list((own / "run").glob("source_*"))
    (own / "own_package/helper.py").write_text("import json\n")
    assert main([*again, "rounds=3"]) == 0
    assert copies(own / "run/source_from_round3") == {"own_package/helper.py": "import json\n"}
    assert copies(own / "run/source")["own_package/helper.py"] == FILES["own_package/helper.py"]
    found = origin.read(own / "run")
    assert [each["first_round"] for each in found["commands"]] == [0, 2, 3]
    assert found["commands"][2]["argv"] == ["fedexp", *again, "rounds=3"]
    assert [each["first_round"] for each in found["parts"]] == [0, 3]
    summary = json.loads((own / "run/summary.json").read_text())
    assert [part["first_round"] for part in summary["parts"]] == [0, 3]
    assert not {"packages", "own_files"} & summary["parts"][1].keys()


def test_own_files_are_no_part_of_the_identity(own):
    identities = []
    for number in range(2):
        (own / "own_package/helper.py").write_text(f"import json  # {number}\n")
        run = fedexp.run([*SMALL, "algorithm=smoothed"], own / str(number), own / "conf_own")
        identities.append(run.summary["identity"])
        assert origin.read(own / str(number))["commands"][0]["argv"][:3] == [
            *("fedexp.run", "--config-dir", str(own / "conf_own"))
        ]
    assert identities[0] == identities[1]
    _, facts = compare_runs(own / "0", own / "1")
    (line,) = facts
    assert line.startswith("parts.0.own_files.own_package/helper.py: ")


def test_large_own_files_are_named_and_not_copied(own, monkeypatch, capsys):
    monkeypatch.setattr(own_files, "LIMIT", 400)
    assert main([*OWN, *RUN, "rounds=1"]) == 0
    (part,) = origin.read(own / "run")["parts"]
    assert part["not_copied"] == ["own_package/smoothed.py"]
    assert sorted(part["own_files"]) == USED
    assert sorted(copies(own / "run/source")) == sorted({*USED} - {"own_package/smoothed.py"})
    assert "may have 400 bytes: own_package/smoothed.py; origin.json has" in capsys.readouterr().err


def test_run_without_own_parts_has_no_copies(here):
    run = fedexp.run([*SMALL, "rounds=1"], here / "run")
    assert not (here / "run/source").exists()
    known = origin.read(run.directory)
    assert "own_files" not in known["parts"][0]
    fedexp.run([*SMALL, "rounds=1"], here / "run", overwrite=True)


def test_own_copies_are_removed_with_a_replaced_run(own):
    fedexp.run([*SMALL, "algorithm=smoothed"], own / "run", own / "conf_own")
    fedexp.run(SMALL, own / "run", overwrite=True)
    assert not (own / "run/source").exists()


def test_packages_of_a_run_of_an_earlier_version_do_not_differ(here):
    for name in ("old", "new"):
        fedexp.run([*SMALL, "rounds=1"], here / name)
    path = here / "old/origin.json"
    known = json.loads(path.read_text())
    del known["parts"][0]["packages"], known["commands"], known["parameters"]
    path.write_text(json.dumps(known))
    assert compare_runs(here / "old", here / "new") == ([], [])
    known["parts"][0]["packages"] = origin.read(here / "new")["parts"][0]["packages"] | {
        "rich": "0"
    }
    path.write_text(json.dumps(known))
    (line,) = compare_runs(here / "old", here / "new")[1]
    assert line.startswith("parts.0.packages.rich: 0 and ")


@pytest.mark.parametrize(
    ("name", "package", "text", "expected"),
    [
        ("a.b", False, "from . import c", {"a", "a.c"}),
        ("a.b", False, "from ..x import c", {"a", "x", "x.c"}),
        ("a", True, "from .b import c\nimport d.e", {"", "a.b", "a.b.c", "d.e"}),
        ("a.b", True, "def f():\n    from ..c import d", {"a", "a.c", "a.c.d"}),
    ],
)
def test_imported_names(tmp_path, name, package, text, expected):
    (tmp_path / "m.py").write_text(text)
    assert set(own_files.imported(name, tmp_path / "m.py", package)) == expected


UNFINISHED = """

class Unfinished(FedAvg):
    def agregate(self, server, replies, ctx):
        return server


class Counting(Callback):
    def after_rounds(self, record):
        pass


class Count(CallbackConfig):
    def create(self):
        return Counting()
"""


def test_misspelt_hook_matters_only_if_the_run_uses_its_class(own, capsys):
    """The other classes are in the module of a used one."""
    more = "from fedexp.trackers.base import Callback, CallbackConfig\n"
    (own / "own_package/smoothed.py").write_text(more + SMOOTHED + UNFINISHED)
    (own / "conf_own/algorithm/unfinished.yaml").write_text(
        "_target_: own_package.smoothed.Unfinished\n"
    )
    (own / "conf_own/callback").mkdir()
    (own / "conf_own/callback/count.yaml").write_text(
        "# @package callback.count\n_target_: own_package.smoothed.Count\n"
    )
    assert main([*OWN, *RUN, "rounds=1"]) == 0
    capsys.readouterr()
    place = "hydra.run.dir=other"
    wrong = {
        "Unfinished.agregate": "algorithm=unfinished",
        "Counting.after_rounds": "callback=count",
    }
    for name, choice in wrong.items():
        assert main([*OWN, *RUN, place, "rounds=1", choice]) == 2
        message = capsys.readouterr().err
        assert f"{name}: is not used by fedexp (nearest" in message
        assert "Traceback" not in message
        assert not (own / "other/config.yaml").exists(), "the run did not start"
