"""Bad input: one clear message, exit code 2, no traceback, nothing left behind."""

import json

import numpy as np
import pytest
from helpers import SMALL, assert_same_run

from fedexp import ConfigError, run
from fedexp.config.options import conf_directory

CASES = [
    # (arguments, words that the message must have)
    (
        "algorithm=fedntdd",
        ["algorithm=fedntdd", "nearest: 'fedntd'", "fedmultihead, fednova, fedntd"],
    ),
    ("dataset=cifar", ["dataset=cifar", "cifar10"]),
    ("algoritm=fedntd", ["algoritm", "nearest: 'algorithm'"]),
    ("local.lrr=0.1", ["local.lrr", "nearest: 'local.lr'"]),
    ("+foo=1", ["foo", "no such key"]),
    ("+algorithm.foo=1", ["algorithm.foo", "no such key"]),
    ("algorithm.beta=1", ["algorithm.beta", "only exists with", "algorithm=fedntd"]),
    ("algorithm=flashback", ["Flashback needs a public set", "public.fraction=0.025"]),
    # before anything is downloaded
    ("dataset=cifar10 algorithm=flashback", ["Flashback needs a public set"]),
    ("model.hidden=[1000000000000]", ["model: its parameters take", "of memory are free"]),
    ("num_clients=2000", ["num_clients=2000", "1437"]),
    (
        "algorithm._target_=fedexp.no.Class",
        ["algorithm._target_=fedexp.no.Class", "cannot be imported"],
    ),
    (
        "algorithm._target_=os.system",
        ["algorithm._target_=os.system", "outside fedexp", "--config-dir"],
    ),
    (
        "++dataset.augmentation._target_=os.system",
        ["dataset.augmentation._target_=os.system", "outside fedexp"],
    ),
    ("+hydra.callbacks.x={_target_:os.system}", ["hydra.callbacks.x", "_target_", "--config-dir"]),
    ("hardware=cpu hardware.precision=tf32", ["tf32", "CUDA"]),
    ("forgetting_metric=all eval_interval=2", ["eval_interval=2", "must be 1"]),
    ("model=resnet10", ["pixels"]),
    ("partition=file partition.path=nowhere.npz", ["nowhere.npz"]),
    ("dataset=image_folder", ["image_folder", "dataset.root"]),
    ("num_clients=${nothing}", ["num_clients", "nothing"]),
    ("algorithm=3", ["group", "algorithm=fedntd"]),
    (
        "forgetting_metric=[round_drop,degree]",
        ["group", "forgetting_metric=all measures all of them"],
    ),
    ("--multrun seed=0,1", ["--multrun", "nearest: '--multirun'"]),
    ("--cfg nothing", ["fedexp: --cfg=nothing: must be one of job, hydra, all"]),
    ("alpha=[", ["alpha=["]),
    ("rounds", ["rounds: not of the form key=value, and no subcommand"]),
    (
        "rounds=5;6",
        [
            "rounds=5;6",
            "key=value (the character ; needs quotes around the value, as in 'key=\"a;b\"')",
        ],
    ),
    (
        "seed=0,1,2",
        [
            "seed=0,1,2: several values",
            "fedexp --multirun seed=0,1,2",
            "a list is written seed=[0,1,2]",
        ],
    ),
    ("lr=0.1", ["lr: no such option or key (nearest: 'local.lr')"]),
    ("partition=Dirichlett", ["partition=Dirichlett: no such option"]),
    ("resume=nowhere", ["resume=nowhere", "not a run directory"]),
    ("--multirun resume=nowhere", ["resume", "single run"]),
    # Several errors are shown at once.
    (
        "rounds=0 algorithm=fedntd algorithm.beta=-1 algorithm.tau=0 alpha=0",
        ["rounds", "beta", "tau", "alpha=0"],
    ),
]
MORE = [  # of the same kinds, and one that makes a large model
    ("dataset=mnist dataset.url=ftp://x", ["dataset.url"]),
    ("partition=natural", ["natural"]),
    ("partition=file", ["partition.path"]),
    ("--cfg job --package nowhere", ["package 'nowhere' not found"]),
    ("hardware.engine=distributed", ["hardware.engine=distributed", "torchrun"]),
    (
        "algorithm=fedka dataset=thucnews model=textcnn",
        ["dataset=thucnews has text", "FedKA is defined for images"],
    ),
    ("public.fraction=0.0001", ["public.fraction=0.0001", "1437"]),
    ("targets=high", ["targets=high", "list"]),
    ("scenario.rounds_per_task=0", ["scenario.rounds_per_task=0: must be at least 1"]),
    ("data_dir=${oc.env:NO_SUCH_VARIABLE}", ["data_dir", "NO_SUCH_VARIABLE"]),
    ("partition=sharding alpha=0.1", ["alpha", "only exists with partition=lda"]),
    ("model=resnet18 model.weights=nowhere.pth", ["model.weights=nowhere.pth: must be a file"]),
    ("model={a:1}", ["model={a:1}", "group"]),
    ("algorithm=[0]", ["algorithm=[0]", "group", "algorithm=fedntd"]),
    (
        "surrogate.dataset={_target_:os.system}",
        ["surrogate.dataset._target_=os.system", "outside fedexp"],
    ),
    ("algorithm._target_=fedexp.models.cnn.CNN", ["must be fedexp.algorithms.base.FedAvg"]),
    ("algorithm=fedalign model=resnet18", ["algorithm=fedalign", "resnet56_bottleneck"]),
    ("algorithm=feddf algorithm.lr=0", ["algorithm.lr=0", "greater than 0"]),
    ("public.fraction=1", ["public.fraction=1", "less than 1"]),
    ("dataset.test_fraction=1e-300", ["dataset.test_fraction=1e-300", "1797"]),
    ("model.hidden=[9223372036854775807]", ["model: its parameters take"]),
    ("rounds=0 hydra/job_logging=default", ["rounds=0"]),  # Hydra has made a log by then
    ("rounds=0 hydra.output_subdir=own", ["rounds=0"]),
    ("rounds=0 hydra.job.chdir=true", ["rounds=0"]),
    ("algorithm=scaffold algorithm.divisor=step", ["algorithm.divisor=step", "nearest: 'steps'"]),
    ("algorithm=fednova algorithm.variant=ccvr_frosen", ["nearest: 'ccvr_frozen'"]),
    ("algorithm=fedka algorithm.dominance=0", ["algorithm.dominance=0", "null"]),
    ("partition=iid min_size=3", ["min_size", "only exists with partition=lda"]),
    (
        "shards_per_client=2",
        ["shards_per_client", "only exists with partition=equal_shards or partition=sharding"],
    ),
    ("algorithm=fedavg,fedntd", ["fedexp --multirun algorithm=fedavg,fedntd"]),
    ("seed=range(3)", ["seed=range(3): several values", "--multirun seed=range(3)"]),
    ("targets=[é]", ["the character é needs quotes"]),
    ("figures=3", ["figures=3: must be a node"]),
    (
        "figures.format=[jpg] figures.style=nowhere.mplstyle",
        ["figures.format=jpg", "png, pdf, svg", "nowhere.mplstyle"],
    ),
    ("rounds=abc", ["rounds=abc", "an integer"]),
    ("rounds=1.5", ["rounds=1.5", "an integer"]),
    ("rounds=0", ["rounds=0", "at least 1"]),
    ("alpha=0", ["alpha=0", "greater than 0"]),
    ("alpha=-1", ["alpha=-1", "greater than 0"]),
    ("alpha=nan", ["alpha=nan", "greater than 0"]),
    ("min_size=0", ["min_size=0", "at least 1"]),
    ("participation=0", ["participation=0", "greater than 0"]),
    ("participation=1.1", ["participation=1.1", "at most 1"]),
    ("num_clients=0", ["num_clients=0", "at least 1"]),
    ("local.batch_size=0", ["local.batch_size=0", "at least 1"]),
    ("local.epochs=0", ["local.epochs=0", "at least 1"]),
    ("local.lr=0", ["local.lr=0", "greater than 0"]),
    ("local.momentum=1", ["local.momentum=1", "less than 1"]),
    ("local.lr_decay=2", ["local.lr_decay=2", "at most 1"]),
    ("local=3", ["local=3"]),
    ("rounds=[5", ["rounds=[5", "a bracket or quote is open"]),
    ("hydra.run.dir=${nothing}", ["fedexp: Interpolation key 'nothing' not found"]),
    ("weighting=equal", ["weighting=equal", "examples, uniform"]),
    ("targets=[2]", ["targets=2", "at most 1"]),
    ("seed=-1", ["seed=-1", "at least 0"]),
    ("algorithm=fedntd algorithm.beta=-1", ["algorithm.beta=-1", "at least 0"]),
    ("algorithm=fedntd algorithm.tau=0", ["algorithm.tau=0", "greater than 0"]),
    ("algorithm=fedntd algorithm.distance=l2", ["algorithm.distance=l2", "kl, mse"]),
    ("algorithm=fedprox algorithm.mu=-0.1", ["algorithm.mu=-0.1", "at least 0"]),
    ("hardware.precision=fp16", ["hardware.precision=fp16", "fp32, tf32, bf16, fp64"]),
    ("hardware.engine=workers2", ["hardware.engine=workers2", "workers", "vectorised"]),
    ("hardware.workers=0", ["hardware.workers=0", "at least 1"]),
    ("model=torchvision model.name=resnet81", ["model.name=resnet81", "nearest: 'resnet18'"]),
    (
        "model=torchvision model.weights=nowhere.pth",
        ["model.weights=nowhere.pth", "a file that exists"],
    ),
    ("model=torchvision model.freeze=[layer9]", ["model.freeze=layer9", "nearest: 'layer"]),
    (
        "model=torchvision model.name=vit_b_32",
        ["model: its network cannot read images of 1 x 8 x 8", "224"],
    ),
    ("server.optimizer=adamm", ["server.optimizer=adamm", "nearest: 'adam'"]),
    ("algorithm=feddyn server.optimizer=adam", ["server.optimizer=adam: not with FedDyn"]),
    ("local.schedule=cosinus", ["local.schedule=cosinus", "nearest: 'cosine'"]),
    ("local.warmup=30", ["local.warmup=30", "less than the 30 rounds"]),
    ("tracker=[none,tensorbord]", ["tracker.members=tensorbord", "nearest: 'tensorboard'"]),
]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(*case, id=case[0], marks=() if case in CASES else pytest.mark.slow)
        for case in (*CASES, *MORE)
    ],
)
def test_one_message_and_nothing_left(fedexp, tmp_path, arguments, words):
    answer = fedexp(*arguments.split())
    assert answer.code == 2, answer.err
    assert "Traceback" not in answer.err + answer.out
    assert "Error executing job" not in answer.err
    for word in words:
        assert word in answer.err
    assert answer.err.count("fedexp:") == 1
    assert [str(path) for path in tmp_path.rglob("*")] == []


def write_json(path, value):
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"0": [0, 1], "1": [1, 2]}, ["1"]),
        ({"0": [0, 1], "1": [2, 5000]}, ["5000"]),
        ({"0": [0, 1], "1": [-1]}, ["-1"]),
        ({"0": [0, 1], "1": []}, ["client 1", "no examples"]),
        ({"0": [0, 1.5], "1": [2]}, ["1.5"]),
        ({"0": [0, 1]}, ["num_clients=2"]),
        ("not a mapping", ["parts.json"]),
        ({"0": [0, 10**400], "1": [1]}, ["client 0", "out of range"]),
        (None, ["cannot be read as JSON"]),
    ],
)
def test_partition_files(fedexp, tmp_path, parts, words):
    if parts is None:
        (tmp_path / "parts.json").write_text("[" * 100_000)
    else:
        write_json(tmp_path / "parts.json", parts)
    answer = fedexp(
        "partition=file", "partition.path=parts.json", "num_clients=2", "participation=1"
    )
    assert answer.code == 2, answer.err
    assert "parts.json" in answer.err
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["parts.json"]


def test_a_partition_that_cannot_be_drawn(fedexp, tmp_path):
    answer = fedexp("alpha=0.01", "num_clients=100", "partition.max_draws=50")
    assert answer.code == 2
    assert "min_size=" in answer.err
    assert "Would work" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written(fedexp, tmp_path):
    (tmp_path / "file").write_text("in the way")
    answer = fedexp("rounds=1", "hydra.run.dir=file/run")
    assert answer.code == 2
    assert "file" in answer.err
    assert "Traceback" not in answer.err


def test_missing_and_corrupt_data(fedexp, tmp_path, monkeypatch):
    answer = fedexp("dataset=image_folder", "dataset.root=pictures")
    assert answer.code == 2
    assert "pictures" in answer.err
    for split in ("train", "test"):
        (tmp_path / "pictures" / split / "cat").mkdir(parents=True)
        (tmp_path / "pictures" / split / "cat" / "1.png").write_bytes(b"no picture")
    answer = fedexp(
        "dataset=image_folder", "dataset.root=pictures", "num_clients=1", "participation=1"
    )
    assert answer.code == 2
    assert "1.png" in answer.err
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "bad.npz").write_bytes(np.random.default_rng(0).bytes(100))
    answer = fedexp("partition=file", "partition.path=bad.npz")
    assert answer.code == 2
    assert "bad.npz" in answer.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"_target_: [1, 2", ["mine.yaml"]),
        (b"---\n---\na: 1\n", ["mine.yaml", "single document"]),
        (b"\xff\xfe", ["mine.yaml"]),
        (
            b"!!python/object/apply:os.system ['touch stolen']",
            ["mine.yaml", "could not determine a constructor"],
        ),
        (b"- " * 1000, ["mine.yaml"]),
        (
            b"_target_: os.system\ncommand: touch stolen",
            ["algorithm._target_=os.system: must be a dataclass"],
        ),
    ],
)
def test_options_of_ones_own_that_cannot_be_read(fedexp, tmp_path, content, words):
    option = tmp_path / "conf_mine" / "algorithm" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_bytes(content)
    answer = fedexp("--config-dir", "conf_mine", "algorithm=mine")
    assert answer.code == 2, answer.err
    for word in words:
        assert word in answer.err
    assert answer.err.count("fedexp:") == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mine.yaml"]


@pytest.mark.parametrize(
    "arguments", [["algorithm=fedavg"], ["--multirun", "seed=0,1"], ["--cfg", "job"]]
)
def test_an_option_of_ones_own_with_the_name_of_another_is_refused(fedexp, tmp_path, arguments):
    """Hydra would take that of fedexp without a word."""
    option = tmp_path / "conf_mine" / "algorithm" / "fedavg.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: mine.FedAvg\n")
    (tmp_path / "conf_mine" / "sweep").mkdir()
    # a sweep is read from there
    (tmp_path / "conf_mine" / "sweep" / "benchmark.yaml").write_text("")
    answer = fedexp("--config-dir", "conf_mine", *arguments)
    assert answer.code == 2, answer.err
    theirs = conf_directory() / "algorithm" / "fedavg.yaml"
    named = (
        f"fedexp: conf_mine/algorithm/fedavg.yaml: has the name of fedexp's own {theirs}, which"
        " would be taken"
    )
    assert answer.err == f"{named} instead; rename yours, such as to my_fedavg.yaml\n"
    assert [path.name for path in tmp_path.iterdir()] == ["conf_mine"]
    with pytest.raises(ConfigError, match=r"algorithm/fedavg\.yaml: has the name"):
        run(["algorithm=fedavg"], config_dir="conf_mine")


def test_a_sweep_of_ones_own_that_cannot_be_read(fedexp, tmp_path):
    option = tmp_path / "conf_mine" / "sweep" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_bytes(b"\xb6\xeb")
    answer = fedexp("--config-dir", "conf_mine", "--multirun", "sweep=mine", "preview=true")
    assert answer.code == 2, answer.err
    assert "mine.yaml: not a sweep" in answer.err


@pytest.mark.parametrize(
    ("overrides", "config", "words"),
    [
        (b"\xff", b"{}", ["overrides.yaml: is not text (UTF-8)"]),
        (b"[1, 2", b"{}", ["overrides.yaml: is no yaml"]),
        (b"[rounds=1", b"{}", ["overrides.yaml: is no yaml"]),
        (b"- rounds=1", b"{}", ["overrides.yaml: ends in the middle of a line"]),
        (b"", b"{}", ["overrides.yaml: is empty"]),
        (b"a: 1\n", b"{}", ["overrides.yaml: holds no list of texts"]),
        (b"[1]\n", b"{}", ["overrides.yaml: holds no list of texts"]),
        (b"[--config-dir=theirs]\n", b"{}", ["--config-dir=theirs is not the override of a run"]),
        (
            b"['+hydra.callbacks.x={_target_:os.system}']\n",
            b"{}",
            ["hydra.callbacks.x", "not the override of a run"],
        ),
        (
            b"[algorithm._target_=os.system]\n",
            b"{}",
            ["algorithm._target_=os.system: lies outside fedexp"],
        ),
        (b"[]\n", b"\xff", ["config.yaml: is not text (UTF-8)"]),
        (b"[]\n", b"[1]\n", ["config.yaml: holds no mapping"]),
        (b"[]\n", b"- " * 1000, ["config.yaml: is no yaml (it is nested too deeply)"]),
    ],
)
def test_run_directories_that_are_not_ours(fedexp, tmp_path, overrides, config, words):
    """What somebody else wrote there names no code and no directory with configurations."""
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_bytes(overrides)
    (tmp_path / "run" / "config.yaml").write_bytes(config)
    answer = fedexp("resume=run", "tracker=none")
    assert answer.code == 2, answer.err
    for word in words:
        assert word in answer.err
    assert answer.err.count("fedexp:") == 1
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    # a lock's file stays, see fedexp.rundir.lock
    assert left - {".lock"} == {"config.yaml", "overrides.yaml"}


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_all_of_them(fedexp, tmp_path):
    """Batches are padded to their size, which once asked for 16 GB here."""
    for name, size in (("all", 1437), ("more", 2**31)):
        answer = fedexp(*SMALL, "rounds=1", f"local.batch_size={size}", f"hydra.run.dir={name}")
        assert answer.code == 0, answer.err
    assert_same_run(tmp_path / "all", tmp_path / "more")


def test_the_working_directory_stays(fedexp, tmp_path):
    """Also when it is empty and the run directory would have been in it."""
    assert fedexp("rounds=0", "hydra.run.dir=run").code == 2
    assert tmp_path.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["local.lrr=0.1,0.2"], "local.lrr: no such option"),
        (["seed=0,1", "algorithm=fedavg,fedxx"], "algorithm=fedxx"),
    ],
)
def test_a_refused_sweep_leaves_nothing(fedexp, tmp_path, overrides, message):
    answer = fedexp("--multirun", *overrides)
    assert (answer.code, answer.err.count("fedexp:")) == (2, 1)
    assert message in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_refused_sweep_leaves_a_directory_that_was_there(fedexp, tmp_path):
    """Also where it holds the same as one that this command has made."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "multirun.yaml").write_text("")
    assert fedexp("--multirun", "local.lrr=0.1,0.2", "hydra.sweep.dir=mine").code == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["multirun.yaml"]
