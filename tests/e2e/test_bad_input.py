"""Bad input ends with one message, exit code 2, no traceback and no files.

tests/test_build.py checks the ranges and types of values.
"""

import json

import numpy as np
import pytest
from helpers import SMALL, summary_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedexp import ConfigError, run
from fedexp.config.options import conf_directory, known_keys

# arguments => parts of the message
CASES = """
algorithm=fedntdd => algorithm=fedntdd | nearest: 'fedntd' | fedmultihead, fednova, fedntd
algoritm=fedntd => algoritm | nearest: 'algorithm'
local.lrr=0.1 => local.lrr | nearest: 'local.lr'
lr=0.1 => lr: no such option or key (nearest: 'local.lr')
algorithm.beta=1 => algorithm.beta | only exists with | algorithm=fedntd
dataset=cifar10 algorithm=flashback => Flashback needs a public set | public.fraction=0.025
model.hidden=[1000000000000] => model: the parameters need | must fit into the free memory of
num_clients=2000 => num_clients=2000 | 1437
++dataset.augmentation._target_=os.system => dataset.augmentation._target_=os.system | not a fedexp
hardware=cpu hardware.precision=tf32 => tf32 | on a CPU
forgetting_metric=all eval_interval=2 local_evaluation.every=3 => multiple of eval_interval=2
partition=file partition.path=nowhere.npz => nowhere.npz
dataset=image_folder => image_folder | dataset.root
num_clients=${nothing} => num_clients | nothing
partition=[iid,lda] => must be one option of the group | algorithm=fedntd
--multrun seed=0,1 => fedexp: --multrun: no such flag (nearest: '--multirun'); flags: --help, --
--cfg nothing => fedexp: argument --cfg/-c: invalid choice: 'nothing'
alpha=[ => alpha=[
rounds => rounds: is neither key=value nor a subcommand
seed=0,1,2 => seed=0,1,2: several values | needs --multirun | a list is written in brackets
resume=nowhere => resume=nowhere | not a run directory
--multirun resume=nowhere => resume | single run
--multirun seed=0,1 algorithm=fedavg,fedxx => algorithm=fedxx
rounds=0 algorithm.beta=-1 algorithm=fedntd alpha=0 hydra.run.dir=run => rounds | beta | alpha=0
algorithm= => fedexp: algorithm=: must be one option of the group
tracker=[] => fedexp: tracker=[]: must name options; use tracker=none or leave it out
tracker=[wandb,none] => fedexp: tracker=[wandb,none]: none cannot be combined with other
tracker=[wandb,tensorbord] => fedexp: tracker=tensorbord: no such option (nearest: 'tensorboard')
hydra.output_subdir=own => fedexp: hydra.output_subdir=own: cannot be set | .hydra/
hydra={output_subdir:own} => fedexp: hydra={output_subdir:own}: cannot be set
tracker=wandb tracker.project=x => is now written with the name of the option: tracker.wandb.project
hydra.run.dir= => fedexp: hydra.run.dir=: must name a directory
seeds=3 => fedexp: seeds=3: must be a node with the keys seeds.partition, seeds.sampling,
hydra/job_logging=foo => fedexp: hydra/job_logging=foo: no such option; options: default,
objective=nothing => fedexp: objective=nothing: summary.json has no such number
figures=false figures.titles=false => fedexp: figures.titles: cannot be combined with
preview=true => fedexp: preview=true: needs --multirun
sweep=fedntd_table1 => fedexp: sweep=fedntd_table1: needs --multirun
--multirun sweep=nothing => sweep=nothing: no such sweep
-m hydra/sweeper=optuna preview=true => preview=true: cannot be used with hydra/sweeper=optuna
-m seed=0,1 hydra.sweep.subdir=a/${seed} => fedexp: hydra.sweep.subdir=a/0: must be the name of
-m seed=0,1 hydra.sweep.subdir=.. => fedexp: hydra.sweep.subdir=..: must be the name of
--multirun preview=maybe => preview=maybe: must be true or false
--multirun sweep=cfed_table1,cfed_table2 hydra.sweep.dir=x => x: cannot be used with several sweeps
-m alpha=1,2 partition.alpha=1,3 => alpha=1,2 and partition.alpha=1,3: both set alpha; give only one
min_size=5 partition.min_size=9 => min_size=5 and partition.min_size=9: both set min_size
-m sweep=cfed_table1 seed=0,1 seed=2 => seed=0,1 and seed=2: both set
-m seed=2 seed=0,1 => seed=2 and seed=0,1: both set
-m hydra/sweeper=optuna objective=accuracy seed=0,1 seed=2 => seed=0,1 and seed=2: both set
-m local.lr=interval(0.1,0.2) => fedexp: local.lr=interval(0.1,0.2): an interval needs hydra/sweeper
-m algorithm=glob(fedav*) => fedexp: algorithm=glob(fedav*): patterns are not supported; list the
--multirun seed=0,1 dataset=mnist dataset.url=http://me:secret@host/ => dataset.url: an address must
"""
MORE = """
model=resnet10 => pixels
rounds=5;6 => rounds=5;6 | is not quoted, as in 'key="a;b"'
resume= => fedexp: resume=: must name a directory
algorithm=3 => group | algorithm=fedntd
tracker=wandb tracker.tensorboard.logdir=x => tracker.tensorboard.logdir: only exists with tracker=t
clients=10 => fedexp: clients: no such option or key (nearest: 'num_clients');
+foo=1 => foo | no such key
surrogate.dataset={_target_:os.system} => surrogate.dataset._target_=os.system | a fedexp class
algorithm._target_=os.system => algorithm._target_=os.system | not a fedexp class | --config-dir
dataset=mnist dataset.url=ftp://x => dataset.url
partition=natural => natural
partition=file => partition.path
hardware.engine=distributed => hardware.engine=distributed | auto, sequential, workers, vectorised
algorithm=fedka dataset=thucnews model=textcnn => dataset=thucnews contains text | for images
public.fraction=0.0001 => public.fraction=0.0001 | 1437
dataset.test_fraction=1e-300 => dataset.test_fraction=1e-300 | 1797
data_dir=${oc.env:NO_SUCH_VARIABLE} => data_dir | NO_SUCH_VARIABLE
hydra.run.dir=${nothing} => fedexp: Interpolation key 'nothing' not found
partition=sharding alpha=0.1 => alpha | only exists with partition=domains or partition=lda
shards_per_client=2 => only exists with partition=equal_shards or partition=sharding
model={a:1} => model={a:1} | one option of the group
figures=3 => figures=3: must be a node with the keys figures.draw
figures.format=[jpg] figures.style=nowhere.mplstyle => =jpg | png, pdf, svg | nowhere.mplstyle
rounds=0 hydra/job_logging=default => rounds=0
rounds=0 hydra.job.chdir=true => rounds=0
seed=range(3) => seed=range(3): several values | --multirun
targets=[é] => targets=[é] | is not quoted
model=torchvision model.name=resnet81 => model.name=resnet81 | nearest: 'resnet18'
model=torchvision model.weights=nowhere.pth => model.weights=nowhere.pth | a file that exists
model=torchvision model.freeze=[layer9] => model.freeze=layer9 | nearest: 'layer
model=torchvision model.name=vit_b_32 => cannot process images of 1 x 8 x 8 | 224
algorithm=feddyn server.optimizer=adam => server.optimizer=adam: cannot be used with FedDyn
local.warmup=30 => local.warmup=30 | less than the number of rounds, 30
local.schedule=cos local.lr_min=1 => local.schedule=cos | nearest: 'cosine'
local.lr_min=1 => local.lr_min=1 | at most local.lr
local.optimizer=nesterov local.momentum=0 => local.momentum=0 | nesterov
local.optimizer=adam local.keep_optimizer=true => local.keep_optimizer=True | adam
algorithm=scaffold local.optimizer=adam => local.optimizer=adam | Scaffold
server.lr=0.5 => server.lr=0.5: must be omitted unless server.optimizer is set
server.optimizer=adam server.momentum=0.5 => server.momentum=0.5: must be 0
algorithm=lwf scenario=class_incremental server.optimizer=adam => paradigm=centralized has one
algorithm=cfed scenario=class_incremental => CFeD needs unlabelled examples | surrogate.fraction=0.1
algorithm=fedlwf => FedLwF
algorithm=l2p scenario=class_incremental partition=iid => transformer
"""


def cases(text, *marks):
    lines = [line.split(" => ") for line in text.strip().splitlines()]
    return [
        pytest.param(typed.split(), words.split(" | "), id=typed, marks=marks)
        for typed, words in lines
    ]


@pytest.mark.parametrize(("arguments", "words"), [*cases(CASES), *cases(MORE, pytest.mark.slow)])
def test_bad_input_is_one_message_and_writes_nothing(fedexp, tmp_path, arguments, words):
    answer = fedexp.rejected(*arguments)
    assert "Error executing job" not in answer.err
    for word in words:
        assert word in answer.err
    assert tmp_path.exists()
    assert not list(tmp_path.iterdir())


def test_unwritable_output_is_rejected(fedexp, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "file" in fedexp.rejected("rounds=1", "hydra.run.dir=file/run").err


def test_missing_and_corrupt_data_are_rejected(fedexp, tmp_path):
    pictures = ("dataset=image_folder", "dataset.root=pictures")
    assert "pictures" in fedexp.rejected(*pictures).err
    for split in ("train", "test"):
        (tmp_path / "pictures" / split / "cat").mkdir(parents=True)
        (tmp_path / "pictures" / split / "cat" / "1.png").write_bytes(b"no picture")
    assert "1.png" in fedexp.rejected(*pictures, "num_clients=1", "participation=1").err
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "bad.npz").write_bytes(np.random.default_rng(0).bytes(100))
    assert "bad.npz" in fedexp.rejected("partition=file", "partition.path=bad.npz").err


@pytest.mark.parametrize(
    ("kind", "content", "word"),
    [
        ("algorithm", b"_target_: [1, 2", "mine.yaml"),
        ("algorithm", b"---\n---\na: 1\n", "single document"),
        ("algorithm", b"\xff\xfe", "mine.yaml"),
        (
            "algorithm",
            b"!!python/object/apply:os.system ['touch stolen']",
            "could not determine a constructor",
        ),
        ("algorithm", b"- " * 1000, "mine.yaml"),
        (
            "algorithm",
            b"_target_: os.system\ncommand: touch stolen",
            "algorithm._target_=os.system: must be a dataclass",
        ),
        ("sweep", b"\xb6\xeb", "mine.yaml: not a valid sweep file"),
    ],
)
def test_unreadable_user_options_are_rejected(fedexp, tmp_path, kind, content, word):
    option = tmp_path / "conf_mine" / kind / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_bytes(content)
    more = ["--multirun", "preview=true"] if kind == "sweep" else []
    assert word in fedexp.rejected("--config-dir", "conf_mine", f"{kind}=mine", *more).err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mine.yaml"]


@pytest.mark.parametrize(
    "arguments", [["algorithm=fedavg"], ["--multirun", "seed=0,1"], ["--cfg", "job"]]
)
def test_user_option_with_a_name_of_fedexp_is_rejected(fedexp, tmp_path, arguments):
    """Hydra would use fedexp's option without a message."""
    for name in ("algorithm/fedavg.yaml", "sweep/fedka.yaml"):  # a sweep may have the same name
        (tmp_path / "conf_mine" / name).parent.mkdir(parents=True)
        (tmp_path / "conf_mine" / name).write_text("")
    answer = fedexp.rejected("--config-dir", "conf_mine", *arguments)
    theirs = conf_directory() / "algorithm" / "fedavg.yaml"
    assert f"conf_mine/algorithm/fedavg.yaml: has the same name as fedexp's {theirs}" in answer.err
    assert "rename your file" in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["conf_mine"]
    with pytest.raises(ConfigError, match=r"algorithm/fedavg\.yaml: has the same name"):
        run(["algorithm=fedavg"], config_dir="conf_mine")


@pytest.mark.parametrize(
    ("overrides", "config", "word"),
    [
        (b"\xff", b"{}", "overrides.yaml: cannot be read"),
        (b"a: 1\n", b"{}", "overrides.yaml: is not a list of strings"),
        (b"[]\n", b"\xff", "config.yaml: cannot be read"),
        (b"[]\n", b"[1]\n", "config.yaml: is not a mapping"),
        (b"[]\n", b"{a: " * 10_000, "config.yaml: cannot be read ("),
    ],
)
def test_invalid_run_directories_are_rejected(fedexp, tmp_path, overrides, config, word):
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_bytes(overrides)
    (tmp_path / "run" / "config.yaml").write_bytes(config)
    origin = {"format": 2, "identity": "", "directory": ".", "shape": [], "parts": [], "values": {}}
    (tmp_path / "run" / "origin.json").write_text(json.dumps(origin))
    assert word in fedexp.rejected("resume=run").err
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    # the lock file stays, see fedexp.rundir.lock
    assert left - {".lock"} == {"config.yaml", "overrides.yaml", "origin.json"}


KEYS = [key for key, owners in known_keys().items() if not owners]
ODD = (
    *("null", "true", "-1", "0", "1", "2", "0.5", "1e-300", "nan", "inf", "abc", "''", "a=b"),
    *("1,2", "[]", "[1]", "[0.5,a]", "[[1]]", "{}", "{a:1}", "???", "${rounds}", "${nothing}"),
    *("{_target_:os.system}", "${oc.env:NO_SUCH}", "${seed", "[", "'", "'../x'", "range(3)", "kl"),
)
VALUES = st.one_of(
    st.sampled_from(ODD), st.integers(-2, 5), st.floats(), st.text("ab=[]{}()'\",:;$\\~+@./#% é☃")
)


@settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(key=st.sampled_from(sorted({*KEYS} - {"resume"})), value=VALUES)
def test_any_value_of_any_key_gives_a_run_or_one_message(fedexp, tmp_path, key, value):
    before = sorted(tmp_path.iterdir())
    directory = f"run{len(before)}"
    answer = fedexp(*SMALL, "rounds=1", f"hydra.run.dir={directory}", f"{key}={value}")
    assert "Traceback" not in answer.err + answer.out
    if answer.code == 0:
        assert summary_of(tmp_path / directory)["status"] in ("completed", "diverged")
    else:
        assert (answer.code, answer.err.count("fedexp:")) == (2, 1), answer.err
        assert sorted(tmp_path.iterdir()) == before
