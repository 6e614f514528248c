"""Test named sweeps, previews of jobs, names of runs, and locks."""

import functools
import itertools
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from filelock import FileLock
from omegaconf import OmegaConf

from fedexp.analysis.sweep import (
    Block,
    expand,
    find_cell,
    find_protocol_changes,
    launches,
    load_sweep,
    normalise,
)
from fedexp.cli import composition, main
from fedexp.cli.sweeps import Planned, job_status
from fedexp.config.build import build
from fedexp.config.options import list_options, read_sweeps
from fedexp.core.errors import ConfigError
from fedexp.papers import cells
from fedexp.rundir.lock import LOCK, Occupied, is_occupied, occupied
from fedexp.rundir.reader import RunDirectory
from fedexp.training import provenance
from fedexp.training.provenance import peak_memory
from quick_runs import FEDERATION, change_summary, write_run
from toy_federation import CONFS, composed, conf_file, is_value

SWEEPS = list_options("sweep", CONFS)
TABLES = Path(cells.__file__).parent / "published" / "tables.csv"
every_sweep = pytest.mark.parametrize("name", SWEEPS)


def load(name):
    return load_sweep(name, CONFS)


@every_sweep
def test_each_published_cell_belongs_to_one_job(name):
    """Except cells without a published number, and Flashback's A, which belongs to no method. A
    sweep for another reading has only the cells that it reads differently."""
    sweep, printed = load(name), pd.read_csv(TABLES, dtype=str, keep_default_na=False)
    printed = printed[(printed["paper"] == sweep.paper) & (printed["table"] == sweep.table)]
    if printed.empty:  # the values of LoRM's table are not available
        assert any(word in name for word in ("fig", "search", "lorm"))
        return
    hits = Counter()
    for block in sweep.blocks:
        for combination, measure in itertools.product(block.combinations(), block.measures):
            keys = {key: measure[key] for key in ("metric", "setting") if key in measure}
            wanted = pd.Series(block.fields(combination) | keys)
            (row,) = printed.index[(printed[wanted.index] == wanted).all(axis="columns")]
            hits[row] += 1
    is_other_reading = name.endswith(("_released", "_mean", "_tau3", "_titles"))
    for index, row in printed.iterrows():
        excused = row["note"].startswith(("not_applicable", "not_run")) or row["method"] == "(all)"
        if name == "cfed_table1_lr1e-6":
            is_baseline = not row["method"].startswith("CFeD")
            excused |= not (row["setting"].endswith("; centralized") and is_baseline)
        assert hits[index] <= 1 if is_other_reading else hits[index] == (0 if excused else 1), row
    assert hits


@every_sweep
def test_run_is_assigned_to_its_cell(name):
    sweep, seen = load(name), set()
    for block in sweep.blocks:
        for combination in block.combinations():
            overrides = [*block.fixed, "seed=2", *(f"{key}={value}" for key, value in combination)]
            assert find_cell(sweep, overrides) == (block, block.fields(combination))
            assert frozenset(overrides) not in seen
            seen.add(frozenset(overrides))
    assert find_cell(sweep, ["seed=2"]) is None


def test_overrides_are_compared_as_hydra_writes_them():
    """Hydra's sweeper writes `True`, `$\\{rounds\\}` and 0.001 into overrides.yaml; a sweep's file
    has `true`, `${rounds}` and 1e-3."""
    assert normalise(r"keep_local_models=$\{rounds\}") == "keep_local_models=${rounds}"
    assert normalise("forgetting_metric.local=True") == "forgetting_metric.local=true"
    assert normalise("algorithm=fedavg") == "algorithm=fedavg"
    assert normalise("local.lr=1e-3") == normalise("local.lr=1.0e-3") == "local.lr=0.001"
    assert normalise("rounds=20") == "rounds=20"
    sweep = load("fedntd_fig15")
    job, *_ = [job for job in launches(sweep, []) if "algorithm.tau_squared=false" in job]
    job = next(each for each in expand(job))
    noted = [option.replace("=false", "=False") for option in job]
    assert find_cell(sweep, noted) == find_cell(sweep, job) is not None
    assert find_protocol_changes(sweep, noted) == find_protocol_changes(sweep, job) == []
    cfed = load("cfed_table1")
    run = ["experiment=cfed/text_class", "rounds=1", "local.epochs=20", "local.batch_size=128"]
    for rate in ("1e-3", "0.001"):
        job = [*run, "algorithm=lwf", f"local.lr={rate}"]
        assert find_cell(cfed, [*job, "seed=0"])[1]["method"] == "LwF"
        assert find_protocol_changes(cfed, job) == []
    _, fields = find_cell(cfed, [*run, "algorithm=cfed_c", "local.lr=1e-06"])
    assert fields["method"] == "CFeD(C) lr=1e-6"


@functools.cache
def jobs_with_all_values():
    """Return few jobs of each sweep that together have every value of every option.

    A value within a group, such as `algorithm.mu=1`, counts for each option of the group.
    """
    jobs = {}
    for name in SWEEPS:
        for job in itertools.chain(*map(expand, launches(load(name), ["tracker=none"]))):
            options = dict(text.split("=", 1) for text in job if not is_value(text))
            values = {(options.get(text.partition(".")[0]), text) for text in job}
            jobs[name, *job] = values
    found, missing = {name: [] for name in SWEEPS}, set().union(*jobs.values())
    while missing:
        name, *job = max(jobs, key=lambda each: len(jobs[each] & missing))
        found[name].append(job)
        missing -= jobs[name, *job]
    return found


@every_sweep
def test_every_value_of_an_option_is_valid(name):
    """Data are not loaded."""
    for job in jobs_with_all_values()[name]:
        build(composed(*job))


def test_overrides_restrict_or_extend_axes():
    sweep = load("fedntd_table8")
    assert sum(len(list(expand(each))) for each in launches(sweep, ["seed=0,1"])) == 50
    (only,) = launches(sweep, ["algorithm=fedntd", "local.epochs=1,20", "seed=0,1", "rounds=5"])
    fixed = {"experiment=fedntd/cifar10_s2", "algorithm=fedntd", "rounds=5", *sweep.common}
    values = [{f"local.epochs={epochs}", f"seed={seed}"} for epochs in (1, 20) for seed in (0, 1)]
    assert [set(job) for job in expand(only)] == [fixed | each for each in values]
    nova = launches(sweep, ["algorithm=fednova"])
    assert all("algorithm.variant=ccvr" in job for each in nova for job in expand(each))
    known, new = launches(sweep, ["algorithm=fedavg,feddyn", "local.epochs=5"])
    assert [
        job for each in (known, new) for job in expand(each) if "algorithm=feddyn" in job
    ] == list(expand(new))
    with pytest.raises(ConfigError, match="no run of this sweep has"):
        launches(load("fedka_table6"), ["algorithm.anchors=missing", "experiment=fedka/cifar100"])


def test_overrides_restrict_fixed_values():
    """The block of CFeD(C) fixes the algorithm for both rates."""
    sweep = load("cfed_table1")
    (overrides,) = launches(sweep, ["algorithm=cfed_c", "experiment=cfed/text_class"])
    jobs = list(expand(overrides))
    assert all("algorithm=cfed_c" in job for job in jobs)
    rates = [each for job in jobs for each in job if "local.lr" in each]
    assert rates == ["local.lr=1e-06", "local.lr=0.001"]
    both = launches(sweep, ["algorithm=lwf,cfed_c", "experiment=cfed/text_class"])
    assert [len(list(expand(each))) for each in both] == [1, 2]
    # fixed for the centralised baselines
    slow = launches(sweep, ["local.lr=1e-3", "experiment=cfed/text_class"])
    assert [len(list(expand(each))) for each in slow] == [5, 1]


def test_mapping_of_the_command_line_replaces_that_of_the_sweep():
    """Hydra would merge both."""
    given = ["rounds=4", "schedule.partition={4:{name:sharding,shards_per_client:3}}"]
    (overrides,) = launches(load("fedntd_fig18"), given)
    (job,) = expand(overrides)
    assert composed(*job).schedule.partition == {4: {"name": "sharding", "shards_per_client": 3}}
    (own,) = launches(load("fedntd_fig18"), ["rounds=105"])
    assert list(composed(*next(expand(own))).schedule.partition) == [101]


def test_shared_overrides_may_replace_what_a_block_fixes():
    """A fixed mapping may be replaced by any mapping. Such a run does not reproduce a cell."""
    fig18, fig19, fig3 = map(load, ("fedntd_fig18", "fedntd_fig19", "fedka_fig3"))
    given = ["rounds=4", "keep_local_models=[4]"]
    run = ["experiment=fedntd/cifar10_iid", "algorithm=fedavg", "model=cnn_circle"]
    run += [*given, "schedule.partition={4:iid}"]
    assert find_cell(fig18, run) is None
    assert find_cell(fig18, run, given)[1]["setting"] == "IID, then s=2"
    assert find_cell(fig18, run, ["rounds=4"]) is None
    assert find_cell(fig18, run[:-1], run) is None
    for partition, name in (("{4:iid}", "homogeneous"), ("null", "heterogeneous")):
        run = ["experiment=fedntd/cifar10_s2", "algorithm=fedavg", *given]
        assert (
            find_cell(fig19, [*run, f"schedule.partition={partition}"], run)[1]["setting"] == name
        )
    for block in fig3.blocks:  # they differ by rounds and a mapping: the literal one counts
        run = ["experiment=fedka/cifar10", "algorithm=fedavg", *block.fixed]
        assert find_cell(fig3, run, [])[0] == find_cell(fig3, run)[0] == block
        changed = [*(each for each in run if "rounds" not in each), "rounds=9"]
        assert find_cell(fig3, changed, ["rounds=9"])[0] == block


def test_values_for_the_models_of_several_experiments_are_written_as_choices():
    """Hydra first composes single values without the experiments, where model.weights does not
    exist."""
    sweep = load("fedntd_table1")
    given = ["model.weights=vit.pth", "seed=0,1", "model.hidden=[8,8]", "hydra.sweep.dir=x"]
    written = launches(sweep, given)[0]
    assert {"model.weights=choice(vit.pth)", "model.hidden=choice([8,8])"} < set(written)
    assert {"seed=0,1", "hydra.sweep.dir=x"} < set(written)
    assert {"model.weights=vit.pth", "seed=0"} < set(next(expand(written)))
    (only, *_) = launches(sweep, [*given, "experiment=fedntd/mnist_s2"])
    assert {"model.weights=vit.pth", "experiment=fedntd/mnist_s2"} < set(only)


def test_single_value_of_a_scenario_is_written_as_a_choice():
    """Hydra first composes single values without the experiments, where scenario.num_tasks does not
    exist."""
    settings = {"cfed/image_class": {}, "cfed/text_class": {}}
    both = Block(
        {"experiment": settings, "scenario.num_tasks": {"50": {}}}, ("algorithm=fedavg",), ()
    )
    known = ["experiment=" + ",".join(settings), "algorithm=fedavg"]
    assert both.arguments() == [*known, "scenario.num_tasks=choice(50)"]
    one = both.restricted({"experiment": list(settings)[:1]})
    assert one.arguments()[-1] == "scenario.num_tasks=50"


def test_unknown_sweep_is_rejected():
    with pytest.raises(
        ConfigError, match=r"sweep=fedntd_tabel1: no such sweep \(nearest: 'fedntd_table1.?'\)"
    ):
        load("fedntd_tabel1")


def test_overrides_of_a_single_value_are_rejected(tmp_path):
    """Only a block has `with`; as a field of a value it would have no effect."""
    path = tmp_path / "sweep" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("mine: {blocks: [{algorithm: {fedavg: {with: [local.lr=0.1]}}}]}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: .*fedavg: with: must be text or a number"):
        load_sweep("mine", [tmp_path])


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


def test_other_overrides_change_the_protocol():
    sweep = load("fedntd_table8")
    same = [
        "experiment=fedntd/cifar10_s2",
        "local.epochs=3",
        "algorithm=fedavg",
        "seed=7",
        "tracker=none",
    ]
    assert find_protocol_changes(sweep, [*same, "data_dir=x"]) == []
    assert find_protocol_changes(sweep, [*same, "rounds=5", "+local.lr=1"]) == [
        "rounds=5",
        "+local.lr=1",
    ]


def whole_text(path):
    """Return the text of an experiment's file and of the files that it includes."""
    text = path.read_text(encoding="utf-8")
    bases = re.findall(r"^  - (\w+/_\w+)$", text, re.MULTILINE)
    return "\n".join(
        [
            text,
            *(conf_file(f"experiment/{base}").read_text(encoding="utf-8") for base in bases),
        ]
    )


@pytest.mark.slow  # composes 35 configurations
def test_experiments_set_all_options_of_their_protocol():
    """The defaults may change. Adam has no momentum."""
    for name in list_options("experiment", CONFS):
        text = whole_text(conf_file(f"experiment/{name}"))
        keys = (
            "num_clients participation rounds weighting epochs batch_size optimizer lr lr_decay"
            " momentum weight_decay"
        )
        if re.search(r"optimizer: adamw?$", text, re.MULTILINE):
            keys = keys.replace(" momentum", "")
        for key in [*keys.split(), "override /model", "override /partition"]:
            assert f"{key}:" in text, f"{name} does not set {key}"
        build(composed(f"experiment={name}"))


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
        pytest.raises(ConfigError, match=r"^alpha: only exists with partition=lda$"),
        composition.composed([*arguments, "alpha=0.1"]) as config,
    ):
        build(composition.without_hydra(config))


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
    assert job_status(Planned(job, {}, [], OmegaConf.create())) == "interrupted at 2"


def test_preview_names_jobs_by_options(here, capsys):
    options = ["rounds=2", "alpha=0.1,1", "algorithm=fedavg,fedntd", "tracker=none"]
    assert main.main(["--multirun", *options, "preview=true"]) == 0
    shown = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[:4]]
    pairs = [("0.1", "fedavg"), ("0.1", "fedntd"), ("1", "fedavg"), ("1", "fedntd")]
    assert shown == [f"alpha={alpha} algorithm={algorithm}" for alpha, algorithm in pairs]
    assert not list(here.iterdir())


def test_stopped_run_is_done_only_for_the_same_stopping_options(tmp_path):
    run = write_run(tmp_path / "run", {}, rounds=3, status="stopped")
    change_summary(run, stopped={"by": "minutes", "minutes": 1.0})
    states = []
    for minutes in (1.0, None, 2.0):
        config = composed("tracker=none", f"stop.minutes={json.dumps(minutes)}")
        states.append(job_status(Planned(run, config, [], config)))
    assert RunDirectory(run).status == "stopped"
    assert states == ["stopped", "interrupted at 3", "interrupted at 3"]


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
    if provenance.PROCESSES.is_dir():
        assert 64e6 < during["host"] - before["host"] < 200e6
    assert provenance.own_peak() > 50e6


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep=fedntd_table1"], "sweep=fedntd_table1: needs --multirun"),
        (["preview=true"], "preview=true: needs --multirun"),
        (
            ["--multirun", "sweep=cfed_table1,cfed_table2", "hydra.sweep.dir=x"],
            "hydra.sweep.dir=x: cannot be used with several sweeps",
        ),
        (["--multirun", "sweep=nothing"], "sweep=nothing: no such sweep"),
        (["--multirun", "preview=maybe"], "preview=maybe: must be true or false"),
        (["-m", "seed=0,1", "seed=2,3"], "seed=0,1 and seed=2,3: both set seed; give all"),
        (["-m", "alpha=1", "partition.alpha=1,2"], "alpha=1 and partition.alpha=1,2: both set"),
        (["-m", "sweep=cfed_table1", "seed=0,1", "seed=2"], "seed=0,1 and seed=2: both set"),
    ],
)
def test_invalid_sweep_options_are_rejected(arguments, message, capsys):
    assert main.main(arguments) == 2
    assert message in capsys.readouterr().err


# --- every sweep runs


def text_files(folder):
    """Write tiny data sets in the formats of thucnews, sina2019, sogoucs and weibo."""
    names = [f"class{c}" for c in range(9)]
    lines = [f"{'abcdefghi'[c] * 5} title {i}\t{c}" for i in range(12) for c in range(9)]
    for name in ("thucnews", "sina2019", "sogoucs"):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            (folder / name / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / name / "class.txt").write_text("\n".join(names), encoding="utf-8")
    rows = [f"post {i} of somebody,,0" for i in range(40)]
    (folder / "thucnews" / "weibo_surrogate.csv").write_text(
        "article,content,target\n" + "\n".join(rows) + "\n"
    )


SMOKE = ["rounds=1", "local.epochs=1", "num_clients=10", "participation=0.2", "local.lr=0.01"]
SMOKE += ["tracker=none", "figures=false", "hardware.engine=sequential", "hardware.threads=1"]
IMAGES = ["dataset=digits", "model=cnn", "dataset.mean=[0.3]", "dataset.std=[0.4]"]
TEXTS = [
    *("dataset.vocabulary=null", "dataset.vectors=null"),
    *("model.dimension=8", "model.filters=4", "model.heights=[1,2]"),
]


@pytest.mark.slow
@every_sweep
def test_first_job_of_each_sweep_runs(name, here):
    """On digits, or on tiny texts."""
    if name == "lorm_table1":
        pytest.skip("needs timm and photographs; test_lorm_protocol.py runs a job")
    text_files(here / "data")
    job = next(expand(launches(load(name), [])[0]))
    texts = any("text" in override for override in job)
    changes = [*SMOKE, *(TEXTS if texts else IMAGES)]
    late = ("schedule.", "keep_local_models")  # need more than one round
    job = [text for text in job if not text.startswith(late)]
    config = composed(*job)
    if "lda" in str(config.partition._target_).lower():
        changes += ["alpha=10", "min_size=1"]
    if not texts:
        changes += ["test_views=[plain]"]  # digits have no augmentation
    if config.surrogate.dataset or config.surrogate.fraction:
        changes += ["surrogate.total_shards=20"]
    if "train_splits" in config.dataset:
        changes += ["~dataset.train_splits"]  # of CINIC-10 only
    keys = {override.partition("=")[0] for override in changes}
    kept = [override for override in job if override.partition("=")[0] not in keys]
    assert main.main([*kept, *changes, f"data_dir={here / 'data'}", "hydra.run.dir=run"]) == 0
    assert (here / "run" / "summary.json").exists()


def test_config_dir_may_contain_commas_and_brackets(here):
    folder = here / "my conf, (x) [y]"
    (folder / "algorithm").mkdir(parents=True)
    (folder / "algorithm" / "mine.yaml").write_text("_target_: fedexp.algorithms.base.FedAvg\n")
    with composition.composed(["algorithm=mine"], folder) as config:
        assert config.algorithm._target_.endswith("FedAvg")
    given = ["--multirun", "--config-dir", str(folder), "algorithm=mine", "preview=true"]
    assert main.main([*given, "tracker=none"]) == 0


@pytest.mark.slow
def test_one_command_runs_several_sweeps(here):
    """Sweep x has fedavg, sweep y fedavg and fedprox: each job is run in its sweep's directory."""
    (here / "own" / "sweep").mkdir(parents=True)
    for name, algorithms in (("x", ["fedavg"]), ("y", ["fedavg", "fedprox"])):
        axis = ", ".join(f"{each}: {{}}" for each in algorithms)
        text = (
            f'# {name}\npaper: none\ntable: "0"\nblocks: [{{algorithm: {{{axis}}}, measures:'
            " []}]\n"
        )
        (here / "own" / "sweep" / f"{name}.yaml").write_text(text)
    command = ["--multirun", *FEDERATION, "--config-dir", "own", "sweep=x,y", "rounds=1", "seed=0"]
    assert main.main(command) == 0
    folder = here / "multirun"
    assert sorted(path.parent.parent.name for path in folder.rglob("summary.json")) == [*"xyy"]
    assert pd.read_csv(folder / "y" / "table.csv")["n"].tolist() == [1, 1]
    assert pd.read_csv(folder / "x" / "table.csv")["n"].tolist() == [1]
    assert (folder / "y" / "multirun.yaml").exists()


def test_unwritable_tables_fail_only_the_command(here, capsys):
    (here / "multirun/a/table.md").mkdir(parents=True)
    assert main.main(["--multirun", *FEDERATION, "rounds=1", "hydra.sweep.dir=multirun/a"]) == 1
    answer = capsys.readouterr()
    assert answer.err.count("table.md: cannot be written") == 1
