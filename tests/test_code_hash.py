"""The code of users' classes in marks, fingerprints, resumed runs and tables."""

import json
import logging
import re

import pytest
import yaml

from fedexp.data.marks import checksums, join_marks
from fedexp.rundir import origin
from fedexp.rundir.code_hash import code_mark
from fedexp.rundir.fingerprint import data_marks, fingerprint
from fedexp.rundir.sweeps import find_jobs, without_outdated
from test_compare import make_run
from toy_federation import make_simulation

CONFIG = {
    "algorithm": {"_target_": "plug.decay.Decay", "mu": 1.0},
    "model": {"_target_": "fedexp.models.cnn.CNN"},
}


@pytest.fixture
def plug(tmp_path, monkeypatch):
    """A package in which decay.py imports three modules in three ways; other.py is not imported."""
    folder = tmp_path / "place" / "plug"
    (folder / "deep").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "decay.py": (
            "import torch\nfrom plug.helper import help\nfrom .deep import far\nimport beside\n"
        ),
        "helper.py": "from . import last\ndef help(): return 1\n",
        "last.py": "",
        "deep/__init__.py": "",
        "deep/far.py": "",
        "../beside.py": "",
        "other.py": "",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "decay.py",
        "helper.py",
        "last.py",
        "deep/far.py",
        "deep/__init__.py",
        "__init__.py",
        "../beside.py",
    ],
)
def test_code_mark_covers_all_imported_files(plug, name):
    before = code_mark("plug.decay.Decay")
    assert re.fullmatch(r"plug\.decay\.Decay \(code [0-9a-f]{16}\)", before)
    assert code_mark("plug.decay.Decay") == before
    path = plug / name
    text = path.read_text()
    path.write_text(f"{text}X = 1\n")
    assert code_mark("plug.decay.Decay") != before
    path.write_text(text)
    assert code_mark("plug.decay.Decay") == before


def test_only_user_classes_have_a_code_mark(plug):
    before = code_mark("plug.decay.Decay")
    (plug / "other.py").write_text("X = 1\n")
    assert code_mark("plug.decay.Decay") == before
    for target in (
        "torch.nn.Linear",
        "fedexp.models.cnn.CNN",
        "nowhere.of.Anything",
        "Anything",
        before,
    ):
        assert code_mark(target) is None, target


def test_code_with_a_syntax_error_has_a_mark(plug):
    (plug / "helper.py").write_text("def (:\n")
    assert code_mark("plug.decay.Decay") is not None


def test_fingerprint_depends_on_code_and_recorded_marks_keep_it(plug):
    marks, before = data_marks(CONFIG), fingerprint(CONFIG)
    assert set(marks) == {"algorithm._target_"}
    (plug / "helper.py").write_text("def help(): return 2\n")
    assert fingerprint(CONFIG) != before
    assert fingerprint(CONFIG, marks) == before


def test_class_of_an_installed_package_has_no_mark():
    config = {"model": {"_target_": "torch.nn.Linear"}}
    assert data_marks(config) == {}


def note(directory, config=CONFIG):
    marks = data_marks(config)
    content = {"fingerprint": fingerprint(config, marks), "marks": marks}
    (directory / origin.NAME).write_text(json.dumps(content))


def test_resume_with_changed_code_is_allowed_and_recorded(plug, tmp_path):
    note(tmp_path)
    first = fingerprint(CONFIG)
    (plug / "decay.py").write_text("class Decay: 2\n")
    assert origin.differences(tmp_path, CONFIG, CONFIG) == []
    marks = data_marks(CONFIG)
    ((key, (then, now)),) = origin.find_changes(origin.recorded_marks(tmp_path), marks).items()
    assert key == "algorithm._target_"
    assert then != now
    origin.check_data(tmp_path, marks, CONFIG)
    data = make_simulation().runtime.data
    origin.record(tmp_path, CONFIG, data, marks)
    found = origin.read(tmp_path)
    assert (
        found["marks"][key]
        == join_marks(then, now)
        == f"plug.decay.Decay (code {', then '.join(map(last, (then, now)))})"
    )
    assert found["fingerprint"] not in (
        first,
        fingerprint(CONFIG),
    ), "it stands for a run with neither code"
    assert origin.find_changes(origin.recorded_marks(tmp_path), marks) == {}, "it is noted already"
    origin.record(tmp_path, CONFIG, data, marks)
    assert origin.read(tmp_path) == found
    assert origin.differences(tmp_path, CONFIG, CONFIG) == []
    other = CONFIG | {"algorithm": {"_target_": "plug.helper.Decay", "mu": 1.0}}
    assert len(origin.differences(tmp_path, CONFIG, other)) == 1, (
        "another class is another configuration"
    )


def last(mark):
    return checksums(mark)[-1]


def test_table_has_the_run_with_the_current_code(plug, tmp_path, caplog):
    """Of runs that differ only in their code, one is kept."""
    codes = ["def help(): return 1\n", "def help(): return 2\n"]
    for number, code in enumerate([*codes, codes[0]]):
        (plug / "helper.py").write_text(code)
        make_run(tmp_path / "sweep", ["algorithm=decay", f"seed={number // 2}"], [0.5])
        run = tmp_path / "sweep" / f"run{number}"
        (run / "config.yaml").write_text(yaml.safe_dump({"choices": {}, "rounds": 1} | CONFIG))
        note(run)
    with caplog.at_level(logging.WARNING, "fedexp"):
        assert [run.directory.name for run in without_outdated(find_jobs(tmp_path / "sweep"))] == [
            "run0",
            "run2",
        ]
    assert (
        "runs left out because the code of your own classes or the data have changed: 1"
        in caplog.text
    )
    (plug / "helper.py").write_text(codes[1])
    assert [run.directory.name for run in without_outdated(find_jobs(tmp_path / "sweep"))] == [
        "run1",
        "run2",
    ]
