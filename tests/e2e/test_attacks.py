"""A run directory from another person runs no code when it is resumed (see SECURITY.md).

An attack that succeeds creates a folder named `stolen`.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers import SMALL

from fedexp.rundir import files

RUN = ("algorithm=scaffold", "rounds=1", *SMALL)
MKDIR = "{_target_:os.mkdir,path:stolen}"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture
def theirs(fedexp, shelf, tmp_path) -> Path:
    """The directory of an unfinished run from another person."""
    if not (shelf / "run").exists():
        assert fedexp(*RUN, f"hydra.run.dir={shelf}/run").code == 0
        (shelf / "run/summary.json").unlink()
    return Path(shutil.copytree(shelf / "run", tmp_path / "theirs"))


def assert_rejected(answer, *words: str) -> None:
    """Assert exit code 2, one message, and no effect."""
    assert answer.code == 2, answer.err
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err
    assert not Path("stolen").exists()


# ---- overrides in someone else's directory ----


def option_of(path: Path) -> str:
    """Return the option of a group that leads from conf/<group>/ to a file."""
    from fedexp.config.options import conf_directory

    return os.path.relpath(path.with_suffix(""), conf_directory() / "experiment")


CALLBACK = {"_target_": "os.mkdir", "path": "stolen"}
SETTINGS = {
    "hydra.callbacks": {"hydra": {"callbacks": {"x": CALLBACK}}},
    "hydra.job_logging": {
        "hydra": {"job_logging": {"handlers": {"x": {"()": "os.mkdir", "path": "stolen"}}}}
    },
}


@pytest.mark.parametrize("node", SETTINGS)
@pytest.mark.parametrize("complete", [True, False])
def test_stored_override_cannot_load_a_preset_of_the_directory(fedexp, theirs, node, complete):
    preset = theirs / "innocent.yaml"
    preset.write_text("# @package _global_\n" + yaml.safe_dump(SETTINGS[node]))
    (theirs / ".hydra/overrides.yaml").write_text(
        yaml.safe_dump([f"experiment={option_of(preset)}"])
    )
    if not complete:  # it ran even where the answer was "not a run directory"
        (theirs / "config.yaml").unlink()
    assert_rejected(
        fedexp("resume=theirs"),
        "is not an override for a single run" if complete else "not a run directory",
    )


NOT_OF_A_RUN = r"""
+dataset@hydra.callbacks.x=digits
+dataset@hydra.callbacks.x=../../x
+dataset@other=digits
experiment=/tmp/x
experiment=a/../../b
'experiment="../x"'
experiment=${oc.env:HOME}/x
experiment=a,../x
experiment=choice(a,../x)
experiment=[a,../x]
dataset=..\x
tuned=/x
hydra.callbacks.x={_target_:os.mkdir}
 hydra.callbacks.x=1
++hydra.searchpath=[theirs]
hydra/launcher=joblib
--config-dir=theirs
--experimental-rerun=x
~hydra.callbacks
[
a b
"""


@pytest.mark.parametrize(
    "override", [*NOT_OF_A_RUN.strip("\n").split("\n"), "a \x1b]0;title\x07 b"]
)
def test_stored_override_that_is_not_for_a_single_run_is_rejected(fedexp, theirs, override):
    (theirs / ".hydra/overrides.yaml").write_text(yaml.safe_dump(["rounds=1", override]))
    answer = fedexp("resume=theirs")
    assert_rejected(answer, "overrides.yaml")
    assert answer.err.rstrip("\n").isprintable()


def test_directory_without_a_run_is_rejected_before_composing(fedexp, tmp_path, monkeypatch):
    monkeypatch.setattr("hydra.main", None)
    folder = tmp_path / "theirs"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/overrides.yaml").write_text("[rounds=1]")
    assert_rejected(fedexp("resume=theirs"), "not a run directory (config.yaml is missing)")
    os.mkfifo(folder / "config.yaml")
    assert_rejected(fedexp("resume=theirs"), "not a run directory (config.yaml is missing)")
    (tmp_path / "circle").symlink_to("circle")
    assert_rejected(fedexp("resume=circle"), "resume=circle: not a run directory")


# ---- values in someone else's directory that refer to other files ----


@pytest.mark.parametrize(
    "override",
    [
        "tracker.name=${oc.env:SECRET_KEY}",
        'tracker.name="a ${oc.env:SECRET_KEY}"',
        r"tracker.name=$\{oc.env:SECRET_KEY\}",
        "tracker.tags=[mine,${oc.env:SECRET_KEY}]",
        "+surrogate.options={root: {x: '${oc.env:SECRET_KEY}'}}",
        "tracker.name=str(${oc.env:SECRET_KEY})",
        'tracker.name="${oc.select:${oc.env:SECRET_KEY}}"',
        "tracker.name=${now:%Y}",
    ],
)
def test_stored_override_cannot_read_the_environment(fedexp, theirs, monkeypatch, override):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    store(theirs, "tracker=wandb", "tracker.mode=offline", override)
    assert_rejected(fedexp("resume=theirs"), "overrides.yaml", "calls a resolver")


def store(directory: Path, *more: str) -> None:
    """Write the overrides of RUN and further ones to a run directory."""
    (directory / ".hydra/overrides.yaml").write_text(yaml.safe_dump([*RUN, *more]))


def test_stored_references_and_typed_overrides_are_allowed(fedexp, theirs, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    store(theirs, "seeds.sampling=${seed}", "data_dir=${oc.env:SECRET_KEY}")
    answer = fedexp("resume=theirs", "data_dir=data", "tracker=none")
    assert answer.code == 0, answer.err


def test_stored_class_must_be_of_fedexp_or_named_by_this_command(fedexp, theirs, tmp_path):
    """The module's file is where Python finds it, but only `--config-dir` allows its class."""
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('stolen').mkdir()\n")
    for override in ("algorithm._target_=evil.Class", "model._target_=os.mkdir"):
        store(theirs, override)
        assert_rejected(fedexp("resume=theirs", "tracker=none"), "is not a fedexp class")


def test_checkpoint_that_is_a_program_is_rejected(fedexp, theirs):
    for name in (files.CHECKPOINT, files.PREVIOUS):
        torch.save({"x": Thief()}, theirs / name)
    assert_rejected(fedexp("resume=theirs", "tracker=none"), "no checkpoint can be read")


class Thief:
    def __reduce__(self):
        return os.mkdir, ("stolen",)
