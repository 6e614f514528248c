"""Test named sweeps, previews of jobs, names of runs, and locks."""

import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from filelock import FileLock
from omegaconf import OmegaConf

from fedexp.analysis.means_table import Layout
from fedexp.analysis.report import finish_sweep, write_tables
from fedexp.analysis.sweep import find_sweep, load_named_sweep
from fedexp.cli import main, sweeps
from fedexp.cli.sweeps import Planned, describe_same, job_status
from fedexp.config import composition
from fedexp.config.arguments import hydra_arguments
from fedexp.config.build import build
from fedexp.config.options import conf_directories, read_sweeps
from fedexp.config.values import resolve
from fedexp.core import interrupts
from fedexp.core.errors import INTERRUPTED, ConfigError
from fedexp.rundir import origin
from fedexp.rundir.identity import digest, essential
from fedexp.rundir.lock import LOCK, Occupied, is_occupied, occupied
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import (
    config_folders,
    job_directories,
    own_jobs,
    sweep_name,
    write_sweep_name,
)
from fedexp.training import summary
from fedexp.training.folder import RunFolder
from fedexp.training.job import Job
from fedexp.training.summary import peak_memory
from quick_runs import FEDERATION, change_summary, write_run
from toy_federation import composed


def test_unknown_sweep_is_rejected():
    with pytest.raises(
        ConfigError, match=r"sweep=fedntd_tabel1: no such sweep \(nearest: 'fedntd_table1.?'\)"
    ):
        load_named_sweep("fedntd_tabel1", conf_directories())


def test_overrides_of_a_single_value_are_rejected(tmp_path):
    """Only a block has `with`; as a field of a value it would have no effect."""
    path = tmp_path / "sweep" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("mine: {blocks: [{algorithm: {fedavg: {with: [local.lr=0.1]}}}]}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: .*fedavg: with: must be text or a number"):
        load_named_sweep("mine", [tmp_path])


@pytest.mark.parametrize("value", ["algorithm=fedprox", "[algorithm: fedprox]"])
@pytest.mark.parametrize("key", ["with", "also"])
def test_overrides_that_are_not_a_list_of_texts_are_rejected(tmp_path, key, value):
    """A text was read letter by letter."""
    path = tmp_path / "sweep" / "mine.yaml"
    path.parent.mkdir()
    of_block, of_sweep = ("", f"{key}: {value}\n") if key == "also" else (f", {key}: {value}", "")
    path.write_text(f"{of_sweep}blocks: [{{seed: {{1: {{}}}}{of_block}}}]\n")
    with pytest.raises(ConfigError, match=rf"mine.yaml: .*{key}: must be a list of overrides"):
        load_named_sweep("mine", [tmp_path])


def write_sweeps(folder, **titles):
    """Write sweeps of one job."""
    (folder / "sweep").mkdir(parents=True)
    for name, title in titles.items():
        content = {"title": title, "blocks": [{"seed": {"5": {}}}]}
        (folder / "sweep" / f"{name}.yaml").write_text(json.dumps(content))


def test_all_sweeps_of_a_command_are_loaded_before_the_first_one_starts(here, capsys):
    write_sweeps(here / "own", a="A")
    command = ["--multirun", "--config-dir", "own", "sweep=a,b", "preview=true", "tracker=none"]
    assert main.main(command) == 2
    answer = capsys.readouterr()
    assert "sweep=b: no such sweep" in answer.err
    assert not answer.out


def test_each_sweep_of_a_command_is_run():
    """Of sweep=a and sweep=b, only b was run."""
    calls = hydra_arguments(["--multirun", "sweep=a", "sweep=b,a"])
    assert [each[-1] for each in calls] == [
        "hydra.sweep.dir=multirun/a",
        "hydra.sweep.dir=multirun/b",
    ]


def test_sweep_of_the_user_is_preferred_to_that_of_fedexp(here, capsys):
    """It was not found by that name: 243 jobs of fedexp's benchmark were planned instead."""
    write_sweeps(here / "own", benchmark="Mine")
    command = ["--multirun", "--config-dir", "own", "sweep=benchmark", "preview=true"]
    assert main.main([*command, "tracker=none"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 job: 0 done, 1 new"
    (here / "x").mkdir()
    write_run(here / "x" / "run", {})
    paths = [*conf_directories(), here / "own"]  # in Hydra's order
    sources = [{"path": str(path), "schema": "file"} for path in paths]
    node = {"runtime": {"config_sources": sources}, "sweeper": {"sweep": "benchmark"}}
    node["sweep"] = {"dir": "x"}
    (here / "x" / "multirun.yaml").write_text(json.dumps({"hydra": node}))
    write_tables(here / "x", own_jobs(here / "x"), Layout())
    assert "\nMine\n" in (here / "x" / "table.md").read_text()


@pytest.mark.parametrize(("name", "title"), [(None, None), ("fedntd_table8", "FedNTD Table 8")])
def test_sweep_without_a_name_is_not_that_of_its_directory(tmp_path, name, title):
    """It had the title of fedexp's benchmark, and ended with its function."""
    directory = tmp_path / "benchmark"
    directory.mkdir()
    assert find_sweep(directory, conf_directories()).title.startswith("Nine methods")
    (directory / "multirun.yaml").write_text(json.dumps({"hydra": {"sweeper": {"sweep": name}}}))
    found = find_sweep(directory, conf_directories())
    assert (found and found.title[:14]) == title


def test_directory_that_cannot_be_made_is_named(here, capsys):
    """The launcher was blamed, or a lack of memory."""
    (here / "file").touch()
    assert main.main(["--multirun", *FEDERATION, "hydra.sweep.dir=file/x"]) == 2
    assert "file/x: cannot be written (Not a directory)" in capsys.readouterr().err


def test_first_of_several_sweeps_with_the_same_name_is_used(tmp_path):
    for folder, name, text in [
        ("a", "all", "defaults: {seed: 1, rounds: 3}\none: {rounds: 5}\n"),
        ("b", "all", "one: {rounds: 7}\ntwo: {rounds: 9}\n"),
        ("b", "bad", "[1"),
    ]:
        path = tmp_path / folder / "sweep" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = read_sweeps([tmp_path / "a", tmp_path / "b"])
    assert found["one"] == (tmp_path / "a/sweep/all.yaml", {"seed": 1, "rounds": 5})
    assert found["two"] == (tmp_path / "b/sweep/all.yaml", {"rounds": 9})
    assert found.keys() == {"one", "two", "bad"}
    assert isinstance(found["bad"][1], ValueError)


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ("dataset=mnist algorithm=fedreg", "algorithm.eta_s", 0.2),
        ("dataset=cifar100 algorithm=fedreg", "algorithm.gamma", 0.25),
        ("dataset=mnist algorithm=fedreg algorithm.eta_s=0.3", "algorithm.eta_s", 0.3),
        ("experiment=fedntd/mnist_s2 algorithm=fedreg", "weighting", "uniform"),
        ("dataset=cifar10 algorithm=fedproto", "algorithm.lambda_", 0.1),
    ],
)
def test_tuned_values_are_used_unless_the_command_line_sets_others(options, key, value):
    assert OmegaConf.select(composed(*options.split()), key) == value


def test_command_line_overrides_the_experiment():
    config = composed(
        "experiment=fedntd/cifar10_s3", "dataset=digits", "rounds=2", "shards_per_client=5"
    )
    assert (config.dataset.name, config.rounds, config.shards_per_client) == ("digits", 2, 5)
    assert config.local.epochs == 5


@pytest.mark.parametrize("partition", ["iid", "file", "sharding"])
def test_presets_of_a_replaced_partition_are_dropped(partition):
    """The experiment sets alpha, min_size and partition=lda."""
    arguments = [f"partition={partition}", "experiment=fedka/cifar10", "tracker=none"]
    arguments += ["partition.path=x.json"] if partition == "file" else []
    with composition.composed(arguments) as config:
        values = build(composition.without_hydra(config)).values
    assert values.keys().isdisjoint({"alpha", "min_size"})
    with (
        pytest.raises(
            ConfigError, match=r"^alpha: only exists with partition=domains or partition=lda$"
        ),
        composition.composed([*arguments, "alpha=0.1"]) as config,
    ):
        build(composition.without_hydra(config))


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("fedka/cifar10 dataset=mnist", "mean", [0.1307]),
        ("fedka/cifar10 dataset=mnist dataset.mean=[0.5]", "mean", [0.5]),
        ("fedka/cifar10 dataset=mnist", "train_splits", ["train"]),
        ("fedka/cifar10 dataset=cifar10", "mean", [0.5, 0.5, 0.5]),
        ("fedka/cifar10_moon dataset=digits", "augmentation.crop_padding", 0),
        ("fedka/cifar10 partition=dirichlet", "numpy_seed", 1),
    ],
)
def test_presets_of_a_replaced_option_give_way_to_its_own_values(given, key, value):
    group = "partition" if "partition" in given else "dataset"
    with composition.composed([f"experiment={given.split()[0]}", *given.split()[1:]]) as config:
        node = resolve(composition.without_hydra(config))[group]
    assert OmegaConf.select(OmegaConf.create(node), key) == value


# --- names and locks


@pytest.mark.slow
def test_preview_shows_the_states_of_jobs(here, capsys):
    """One job is completed, then interrupted; the others are new."""
    small = [*FEDERATION, "rounds=2", "hydra.sweep.dir=multirun/s"]
    assert main.main(["--multirun", *small, "seed=0"]) == 0
    capsys.readouterr()
    assert main.main(["--multirun", *small, "seed=0,1,2", "preview=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "3 jobs: 1 done, 2 new"
    assert [line.split()[1] for line in lines[:3]] == ["completed", "new", "new"]
    (job,) = (here / "multirun/s").glob("digits_*")
    (job / "summary.json").unlink()
    assert job_status(Planned(job, [], OmegaConf.create())) == "interrupted at 2"


def test_preview_names_jobs_by_options(here, capsys):
    options = ["rounds=2", "alpha=0.1,1", "algorithm=fedavg,fedntd", "tracker=none"]
    assert main.main(["--multirun", *options, "preview=true"]) == 0
    shown = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[:4]]
    pairs = [("0.1", "fedavg"), ("0.1", "fedntd"), ("1", "fedavg"), ("1", "fedntd")]
    assert shown == [f"alpha={alpha} algorithm={algorithm}" for alpha, algorithm in pairs]
    assert not list(here.iterdir())


def test_error_of_the_program_in_a_sweep_is_not_reported_as_bad_input(here, monkeypatch):
    def fail(*_, **__):
        int("no number")

    monkeypatch.setattr(sweeps.Multirun, "launch", fail)
    with pytest.raises(ValueError, match="no number"):
        main.main(["--multirun", "seed=0,1", *FEDERATION])


def test_signal_ends_the_checks_of_jobs(here, capsys, monkeypatch):
    """It is only recorded until all modules are imported, see `fedexp.core.interrupts`."""
    monkeypatch.setattr(sweeps, "check_job", lambda job: interrupts._note(signal.SIGTERM, None))
    options = ["--multirun", "seed=0,1,2", "tracker=none", "preview=true"]
    assert main.main(options) == INTERRUPTED
    assert capsys.readouterr().out.splitlines() == ["seed=0  new"]


def test_stopped_run_is_done_only_for_the_same_stopping_options(tmp_path):
    run = write_run(tmp_path / "run", {}, rounds=3, status="stopped")
    change_summary(run, stopped={"by": "minutes", "minutes": 1.0})
    states = []
    for minutes in (1.0, None, 2.0):
        config = composed("tracker=none", f"stop.minutes={json.dumps(minutes)}")
        states.append(job_status(Planned(run, [], config)))
    assert RunDirectory(run).status == "stopped"
    assert states == ["stopped", "interrupted at 3", "interrupted at 3"]


def test_run_that_is_resumed_by_name_keeps_the_relative_paths_of_its_identity(here):
    """Otherwise, it was averaged with no other seed: resume= makes them absolute."""
    given = ("tracker=none", "partition=file", "partition.path=parts.npz")
    (here / "parts.npz").touch()
    run, before = write_run(here / "run", {}), essential(build(composed(*given)))
    origin.write(run, before, [1, 8, 8], {"first_round": 0, "data": {}}, None)
    config = composed(*given[:2], f"partition.path={here}/parts.npz", "resume=run")
    with RunFolder(Job(config, run, [], {}, None), build(config)) as folder:
        assert folder.continues
        assert folder.values == before


def test_job_that_was_given_more_rounds_and_stopped_is_left_as_it_is(tmp_path):
    """Its two rounds were stored as those of a job with one round."""
    one, more = (composed("tracker=none", f"rounds={rounds}") for rounds in (1, 30))
    run = write_run(tmp_path / "job", {}, rounds=2, status="stopped")
    change_summary(run, stopped={"by": "minutes", "minutes": 1e-4})
    origin.write(run, essential(build(more)), [1, 8, 8], {"first_round": 0}, None, "mine")
    with RunFolder(Job(one, run, [], {}, "mine"), build(one)) as folder:
        assert folder.is_done
    with RunFolder(Job(more, run, [], {}, "mine"), build(more)) as folder:
        assert not folder.is_done


def test_peak_memory_includes_child_processes():
    """The child process holds 64 MB."""
    program = "import sys; held = b'x' * 64_000_000; print(len(held), flush=True); sys.stdin.read()"
    before = peak_memory(torch.device("cpu"))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        during = peak_memory(torch.device("cpu"))
        child.stdin.close()
    assert before["device"] is None
    if os.path.isdir("/proc"):
        assert 64e6 < during["host"] - before["host"] < 200e6
    assert summary.own_peak() > 50e6


def test_run_waits_for_a_lock_that_is_soon_released(tmp_path):
    glance = FileLock(tmp_path / LOCK, thread_local=False)
    glance.acquire()
    later = threading.Timer(0.1, glance.release)
    later.start()
    with occupied(tmp_path):
        assert not glance.is_locked
    later.join()


def test_only_one_process_uses_a_run_directory(tmp_path):
    assert not is_occupied(tmp_path)
    message = r"process \d+ on .* is using this directory"
    with occupied(tmp_path):
        assert is_occupied(tmp_path)
        with pytest.raises(Occupied, match=message), occupied(tmp_path):
            pass
    assert not is_occupied(tmp_path)


def test_job_whose_options_have_changed_since_it_was_named_is_refused(tmp_path):
    """A launched process composes its job's configuration when it starts, perhaps from a yaml file
    that was edited in the meantime. It trained with the new values in the directory of the old."""
    config, changed = composed("local.lr=0.1"), composed("local.lr=0.2")
    identity = digest(essential(build(config)))[:8]
    directory = tmp_path / f"digits_lda_fedavg_seed0_{identity}"
    with RunFolder(Job(config, directory, [], {}, "mine"), build(config)):
        pass
    job = Job(changed, directory, [], {}, "mine")
    message = "the options of this job have changed since the command was started"
    with pytest.raises(ConfigError, match=message), RunFolder(job, build(changed)):
        pass
    other = Job(changed, tmp_path / "own_name", [], {}, "mine")
    with RunFolder(other, build(changed)):
        pass


def test_damaged_name_of_a_sweep_is_named(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"sweep\.json: cannot be read"):
        sweep_name(tmp_path)


def test_config_dir_may_contain_commas_and_brackets(here):
    folder = here / "my conf, (x) [y]"
    (folder / "algorithm").mkdir(parents=True)
    (folder / "algorithm" / "mine.yaml").write_text("_target_: fedexp.algorithms.base.FedAvg\n")
    with composition.composed(["algorithm=mine"], folder) as config:
        assert config.algorithm._target_.endswith("FedAvg")
    given = ["--multirun", "--config-dir", str(folder), "algorithm=mine", "preview=true"]
    assert main.main([*given, "tracker=none"]) == 0


def test_job_that_has_only_its_overrides_belongs_to_the_sweep(tmp_path):
    """As of a job that was killed before it wrote its configuration."""
    for name in ("b/.hydra/overrides.yaml", "a/config.yaml", "c/notes.md", "d/.hydra/hydra.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert [path.name for path in job_directories(tmp_path)] == ["a", "b"]


@pytest.mark.slow
def test_one_command_runs_several_sweeps(here):
    """Sweep x has fedavg, sweep y fedavg and fedprox: each job is run in its sweep's directory."""
    (here / "own" / "sweep").mkdir(parents=True)
    for name, algorithms in (("x", ["fedavg"]), ("y", ["fedavg", "fedprox"])):
        axis = ", ".join(f"{each}: {{}}" for each in algorithms)
        text = f"# {name}\nchoose: best\nblocks: [{{algorithm: {{{axis}}}, measures: []}}]\n"
        (here / "own" / "sweep" / f"{name}.yaml").write_text(text)
    command = ["--multirun", *FEDERATION, "--config-dir", "own", "sweep=x,y", "rounds=1", "seed=0"]
    assert main.main(command) == 0
    folder = here / "multirun"
    assert sorted(path.parent.parent.name for path in folder.rglob("summary.json")) == [*"xyy"]
    assert pd.read_csv(folder / "y" / "table.csv")["n"].tolist() == [1, 1]
    assert pd.read_csv(folder / "x" / "table.csv")["n"].tolist() == [1]
    assert main.main(["report", str(folder / "y"), "--no-figures"]) == 0
    assert "Chosen values" in (folder / "y" / "table.md").read_text()  # as the file of y says


def test_function_that_a_foreign_sweep_names_is_not_called(tmp_path):
    """The file of a sweep is found by its multirun.yaml, which may come from another person."""
    (tmp_path / "own" / "sweep").mkdir(parents=True)
    content = {"choose": "best", "finish": "shutil.rmtree", "blocks": []}
    (tmp_path / "own" / "sweep" / "mine.yaml").write_text(json.dumps(content))
    write_sweep_name(tmp_path / "x", "mine")
    sources = [{"path": str(tmp_path / "own"), "schema": "file"}]
    (tmp_path / "x" / "multirun.yaml").write_text(
        json.dumps({"hydra": {"runtime": {"config_sources": sources}}})
    )
    assert find_sweep(tmp_path / "x", config_folders(tmp_path / "x")).choose == "best"
    finish_sweep(tmp_path / "x", figures=True)
    assert (tmp_path / "x").exists()


def test_unwritable_tables_fail_only_the_command(here, capsys):
    (here / "multirun/a/table.md").mkdir(parents=True)
    assert main.main(["--multirun", *FEDERATION, "rounds=1", "hydra.sweep.dir=multirun/a"]) == 1
    answer = capsys.readouterr()
    assert answer.err.count("table.md: cannot be written") == 1


@pytest.mark.parametrize(("key", "hint"), [("callback", True), ("name", False)])
def test_jobs_with_the_same_directory_are_told_of_callbacks_that_end_runs(key, hint):
    first, second = (SimpleNamespace(overrides=["seed=0", f"{key}={v}"]) for v in "ab")
    message = describe_same(first, second)
    assert message.startswith(f"{key}: the jobs that differ only here would have the same")
    assert ("ends_runs" in message) == hint
