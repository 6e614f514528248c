"""Attacks: a run directory, command line or preset from another person runs no code and changes no
file outside its run directory. An attack that succeeds creates a folder or file named `stolen`."""

import os
import shlex
import shutil
import time
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
    assert b"hunter2" not in b"".join(contents(theirs).values())


def store(directory: Path, *more: str) -> None:
    """Write the overrides of RUN and further ones to a run directory."""
    (directory / ".hydra/overrides.yaml").write_text(yaml.safe_dump([*RUN, *more]))


def test_stored_references_and_typed_overrides_are_allowed(fedexp, theirs, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    store(theirs, "seeds.sampling=${seed}", "data_dir=${oc.env:SECRET_KEY}")
    answer = fedexp("resume=theirs", "data_dir=data", "tracker=none")
    assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    ("stored", "offline"),
    [
        (["tracker.entity=mallory"], "tracker.mode=offline"),
        (["tracker.project=theirs", "tracker.entity=${weighting}"], None),
        (["++tracker.options.wandb.entity=mallory"], "++tracker.options.wandb.mode=offline"),
        (["++tracker.options={wandb: {entity: mallory}}"], None),
    ],
)
def test_run_is_not_sent_to_an_account_from_its_directory(
    fedexp, theirs, monkeypatch, stored, offline
):
    """The user is logged in, but the server is not contacted. The message has the command that
    allows it."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    several = "options" in stored[0]
    choice = ["tracker=several", "tracker.members=[wandb]"] if several else ["tracker=wandb"]
    store(theirs, *choice, *stored)
    before = contents(theirs)
    answer = fedexp("resume=theirs")
    assert_rejected(answer, "says where the run is tracked")
    command = answer.err.strip().partition("to track it there:  ")[2]
    assert shlex.split(command) == ["fedexp", "resume=theirs", *stored]
    assert contents(theirs) == before | {str(theirs / ".lock"): b""}
    if offline:  # once for each way to name the account
        assert fedexp("resume=theirs", offline).code == 0


# ---- links in someone else's directory ----


@pytest.fixture
def mine(tmp_path) -> Path:
    """The user's own files."""
    folder = tmp_path / "mine"
    (folder / "deeper").mkdir(parents=True)
    for name in ("thesis.txt", "1.1.pt", "deeper/data.csv"):
        (folder / name).write_text("years of work\n")
    return folder


LINKS = [
    *[
        ("checkpoint/clients", "mine"),
        ("checkpoint", "mine"),
        (".hydra", "hydra"),
        ("figures", "mine/deeper"),
    ],
    *[
        (name, "mine/thesis.txt")
        for name in ("clients.csv", "run.log", "error.txt", ".lock", ".owner.json")
    ],
    # to be made
    *[(name, "mine/none") for name in ("summary.json", "tasks.csv", "local_class_accuracy.npz")],
    *[
        ("checkpoint/previous.pt", "mine/thesis.txt"),
        ("rounds.csv", "rounds.csv"),
        ("wandb", "mine"),
    ],
]
# those, a circle, a tracker's
FEW = ("checkpoint/clients", ".hydra", "summary.json", ".lock", "rounds.csv", "wandb")
# a folder, Hydra's, one to be made, an open one
IN_SWEEP = ("checkpoint/clients", ".hydra", "summary.json", ".lock")


@pytest.mark.parametrize(
    ("place", "target", "in_sweep"),
    [
        *(
            pytest.param(*link, False, marks=() if link[0] in FEW else pytest.mark.slow)
            for link in LINKS
        ),
        *(
            pytest.param(*link, True, marks=() if link[0] in IN_SWEEP else pytest.mark.slow)
            for link in LINKS
        ),
    ],
)
def test_link_out_of_a_run_directory_is_rejected(fedexp, theirs, mine, place, target, in_sweep):
    path, before = theirs / place, contents(mine)
    if target == "hydra":
        path.rename(mine.parent / "hydra")
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(mine.parent / target if target != place else path)
    if in_sweep:
        answer = fedexp("--multirun", *RUN, "hydra.sweep.dir=.", "hydra.sweep.subdir=theirs")
    else:
        answer = fedexp("resume=theirs")
    assert_rejected(answer, str(path), "links to a file outside the run directory")
    assert contents(mine) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_links_inside_and_folders_of_editors_are_allowed(fedexp, theirs):
    """W&B's folder has links to logs elsewhere; Jupyter leaves folders behind."""
    (theirs / "checkpoint/clients/.ipynb_checkpoints").mkdir()
    (theirs / "checkpoint/clients/.x.tmp").mkdir()
    (theirs / "checkpoint/clients/notes.txt").write_text("mine")
    (theirs / "checkpoint/clients/0.9.pt").write_bytes(b"of a round that is run again")
    (theirs / "wandb").mkdir()
    (theirs / "wandb/debug.log").symlink_to("/nowhere")
    (theirs / "latest.json").symlink_to("config.yaml")
    answer = fedexp("resume=theirs", "rounds=1")
    assert answer.code == 0, answer.err
    (theirs / "summary.json").unlink()
    for name in (files.CHECKPOINT, files.PREVIOUS):
        (theirs / name).unlink(missing_ok=True)
    # from the beginning, so that states are written and old ones removed
    answer = fedexp("resume=theirs")
    assert answer.code == 0, answer.err
    left = {path.name for path in (theirs / "checkpoint/clients").iterdir()}
    assert {".ipynb_checkpoints", ".x.tmp", "notes.txt"} <= left
    assert "0.9.pt" not in left


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("clients", {"../../../mine/1": 1}, "clients is not valid in a checkpoint"),
        ("lengths", {"../mine/thesis.txt": 1}, "lengths is not valid in a checkpoint"),
    ],
)
def test_path_in_a_checkpoint_is_rejected(fedexp, theirs, mine, key, value, said):
    torch.save({}, mine / "1.1.pt")  # whole, so that only its place is wrong
    state = torch.load(theirs / files.CHECKPOINT, weights_only=True)
    torch.save(state | {key: value}, theirs / files.CHECKPOINT)
    (theirs / files.PREVIOUS).unlink(missing_ok=True)
    before = contents(mine)
    assert_rejected(fedexp("resume=theirs"), said, "no checkpoint can be read")
    assert contents(mine) == before


# ---- command lines from someone else ----


CALLS = [
    (f"+evil={MKDIR}", "+hydra.callbacks.x=${evil}"),
    ("+evil=os.mkdir", "+hydra.callbacks.x={a:1}", "+hydra.callbacks.x._target_=${evil}"),
    (f"+evil={{x:{MKDIR}}}", "+hydra.callbacks=${evil}"),
    ("+hydra.callbacks.x='${oc.create:\"{_target_: os.mkdir, path: stolen}\"}'",),
    ("+hydra.job_logging.handlers.x={'()':os.mkdir,path:stolen}",),
    ("+hydra.job_logging.handlers.x={class:logging.StreamHandler,stream:'ext://os.mkdir'}",),
    ("hydra.callbacks.sweeps._target_=os.mkdir", "+hydra.callbacks.sweeps.path=stolen"),
    (f"+evil={MKDIR}", "+hydra.sweeper.x=${evil}", "--multirun"),
    (f"+evil={MKDIR}", "+hydra.callbacks.x=${evil}", "--cfg", "job"),
    ("+dataset@hydra.callbacks.x=digits",),
    (f"data_dir={MKDIR}", "+hydra.callbacks.x=${data_dir}"),
]
MORE_CALLS = [  # of the same kinds
    (f"+evil={MKDIR}", "+between=${evil}", "+hydra.callbacks.x=${between}"),
    (f"+evil={MKDIR}", "+hydra.a=${evil}", "+hydra.callbacks.x=${hydra.a}"),
    (f"+evil={MKDIR}", "+hydra.callbacks.x={a:1}", "+hydra.callbacks.x.a=${evil}"),
    ("+hydra.job_logging.handlers.x={class:os.mkdir,path:stolen}",),
    ("+hydra.hydra_logging.formatters.x={'()':os.mkdir,path:stolen}", "hydra.verbose=true"),
    (f"+evil={MKDIR}", "+hydra.launcher.x=${evil}", "--multirun"),
    (f"+evil={MKDIR}", "+hydra.callbacks.x=${evil}", "--multirun", "seed=1,2"),
    ("+dataset@_global_.hydra.callbacks.x=digits",),
    ("+x@:hydra.callbacks.y=digits",),
]


@pytest.mark.parametrize(
    "arguments",
    [*CALLS, *(pytest.param(arguments, marks=pytest.mark.slow) for arguments in MORE_CALLS)],
)
def test_hydra_calls_known_classes_only(fedexp, arguments):
    assert_rejected(fedexp(*arguments, *SMALL, "rounds=1"))


PATHS = """
dataset=../../x
experiment=../..
experiment=/x
experiment='../x'
model="../x"
dataset=a/../b
surrogate.dataset=../x
scenario.domains=[../x]
algorithm=fedavg,../x
"""


@pytest.mark.parametrize("override", PATHS.split())
def test_option_must_not_be_a_path(fedexp, tmp_path, override):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(CALLBACK))
    more = ["--multirun"] if "," in override else []
    if "surrogate" in override:
        more = ["algorithm=cfed"]
    if "domains" in override:
        more = ["scenario=domain_incremental"]
    assert_rejected(fedexp(override, *more, *SMALL), "is a path")


def test_option_cannot_leave_the_configuration_directories(fedexp, tmp_path):
    """Not through a defaults list in yaml or a composed name either."""
    (tmp_path / "x.yaml").write_text(
        "# @package _global_\n" + yaml.safe_dump(SETTINGS["hydra.callbacks"])
    )
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("defaults: [/../x]\n")
    assert_rejected(
        fedexp("--config-dir", "conf", "experiment=mine", *SMALL),
        "x: is outside the configuration directories",
    )
    assert_rejected(
        fedexp(
            "--config-dir",
            "conf",
            "experiment=${oc.decode:.}${oc.decode:.}${oc.env:SLASH,/}x",
            *SMALL,
        )
    )


def test_sweep_must_not_be_a_path(fedexp, tmp_path):
    assert_rejected(fedexp("--multirun", f"sweep={tmp_path}/x"), "sweep=", "not a path")


@pytest.mark.parametrize(
    "flag", ["--experimental-rerun", "--experimental-rerun=x.pickle", "--exp=x.pickle"]
)
def test_rerun_from_a_pickle_is_rejected(fedexp, tmp_path, flag):
    (tmp_path / "x.pickle").write_bytes(b"cos\nmkdir\n(S'stolen'\ntR.")
    assert_rejected(
        fedexp(flag, *(["x.pickle"] if "=" not in flag else [])), flag.partition("=")[0]
    )


def test_class_in_the_users_yaml_is_trusted(fedexp, tmp_path):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    node = {"_target_": "hydra.experimental.callback.Callback"}
    text = "# @package _global_\n" + yaml.safe_dump({"hydra": {"callbacks": {"x": node}}})
    (tmp_path / "conf/experiment/mine.yaml").write_text(text)
    answer = fedexp(
        "--config-dir", "conf", "experiment=mine", *SMALL, "rounds=1", "hydra.run.dir=run"
    )
    assert answer.code == 0, answer.err
    assert_rejected(
        fedexp(
            "+hydra.callbacks.x={a:1}", f"+hydra.callbacks.x._target_={node['_target_']}", *SMALL
        )
    )


def test_classes_of_hydra_and_its_plugins_are_known(fedexp):
    for more in (
        ["hydra/job_logging=default"],
        ["hydra/job_logging=stdout"],
        ["hydra/hydra_logging=hydra_debug"],
    ):
        assert fedexp(*more, "--cfg", "all").code == 0
    for launcher in ("joblib", "submitit_local", "submitit_slurm", "basic"):
        answer = fedexp(f"hydra/launcher={launcher}", "--cfg", "hydra")
        assert answer.code == 0, answer.err


# ---- yaml that stands for more than it holds ----

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
BOMB += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


@pytest.mark.parametrize("more", [[], ["--help"], ["algorithm=mine"]])
def test_yaml_bomb_in_an_option_is_rejected(fedexp, tmp_path, more):
    (tmp_path / "conf/algorithm").mkdir(parents=True)
    (tmp_path / "conf/algorithm/mine.yaml").write_text(BOMB)
    began = time.monotonic()
    assert_rejected(
        fedexp("--config-dir", "conf", *more),
        "mine.yaml",
        "aliases expand to more than 10,000 values",
    )
    assert time.monotonic() - began < 10


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["bomb", "pipe"])
def test_bomb_or_pipe_as_a_sweep_is_rejected(fedexp, tmp_path, kind):
    path = tmp_path / "conf/sweep/mine.yaml"
    path.parent.mkdir(parents=True)
    if kind == "bomb":
        path.write_text("# Mine.\npaper: x\ntable: x\nblocks: []\n" + BOMB)
    else:
        os.mkfifo(path)
    words = "aliases expand to more than 10,000 values" if kind == "bomb" else "is not a file"
    assert_rejected(fedexp("--multirun", "--config-dir", "conf", "sweep=mine"), "mine.yaml", words)


@pytest.mark.parametrize("name", [".hydra/overrides.yaml", "config.yaml"])
def test_yaml_bomb_in_a_run_directory_is_rejected(fedexp, theirs, name):
    (theirs / name).write_text(BOMB)
    assert_rejected(fedexp("resume=theirs"), name, "aliases expand to more than 10,000 values")


def test_few_aliases_are_allowed(fedexp, tmp_path):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\nseed: &s 3\nrounds: *s\n"
    )
    answer = fedexp("--config-dir", "conf", "experiment=mine", "--cfg", "job")
    assert "rounds: 3\n" in answer.out


@pytest.mark.parametrize("kind", ["pipe", "nothing", "circle"])
def test_option_that_is_not_a_file_is_rejected(fedexp, tmp_path, kind):
    (tmp_path / "conf/algorithm").mkdir(parents=True)
    path = tmp_path / "conf/algorithm/mine.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere" if kind == "nothing" else path)
    for more in ([], ["--help"], ["algorithm=mine"]):
        assert_rejected(fedexp("--config-dir", "conf", *more), "mine.yaml: is not a file")
