"""The papers' sweeps: every run belongs to a published cell, composes, and keeps its protocol."""

import functools
import itertools
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from fedexp.analysis.sweep import (
    Block,
    NamedSweep,
    expand,
    launches,
    load_named_sweep,
    normalise,
)
from fedexp.config.build import build
from fedexp.config.options import conf_directories
from fedexp.core.errors import ConfigError
from fedexp_papers.cells import TABLES
from fedexp_papers.sweeps import (
    all_paper_sweeps,
    find_cell,
    find_paper_sweep,
    find_protocol_changes,
)
from fedexp_papers.sweeps import load_paper_sweep as load
from toy_federation import composed, is_value

SWEEPS = [sweep.name for sweep in all_paper_sweeps()]
every_sweep = pytest.mark.parametrize("name", SWEEPS)


def jobs(name, *overrides):
    """Return the overrides of all jobs of a sweep."""
    return [job for line in launches(load(name), list(overrides)) for job in expand(line)]


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
    is_other_reading = name.endswith(
        (
            "_released",
            "_mean",
            "_tau3",
            "_titles",
            "_posts",
            "_server2",
            "_server5",
            "_other",
            "_mu10",
            "_uniform",
            "_beta",
        )
    )
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
    every = {}
    for name in SWEEPS:
        for job in jobs(name, "tracker=none"):
            options = dict(text.split("=", 1) for text in job if not is_value(text))
            values = {(options.get(text.partition(".")[0]), text) for text in job}
            every[name, *job] = values
    found, missing = {name: [] for name in SWEEPS}, set().union(*every.values())
    while missing:
        name, *job = max(every, key=lambda each: len(every[each] & missing))
        found[name].append(job)
        missing -= every[name, *job]
    return found


@every_sweep
def test_every_value_of_an_option_is_valid(name):
    """Data are not loaded."""
    for job in jobs_with_all_values()[name]:
        build(composed(*job))


def test_overrides_restrict_or_extend_axes():
    sweep = load("fedntd_table8")
    assert sum(len(list(expand(each))) for each in launches(sweep, ["seed=0,1"])) == 50
    only = jobs(sweep.name, "algorithm=fedntd", "local.epochs=1,20", "seed=0,1", "rounds=5")
    fixed = {"experiment=fedntd/cifar10_s2", "algorithm=fedntd", "rounds=5"}
    fixed |= {"test_views=[plain,augmented]"}
    values = [{f"local.epochs={epochs}", f"seed={seed}"} for epochs in (1, 20) for seed in (0, 1)]
    assert list(map(set, only)) == [fixed | each for each in values]
    nova = launches(sweep, ["algorithm=fednova"])
    assert all("algorithm.variant=ccvr" in job for each in nova for job in expand(each))
    known, new = launches(sweep, ["algorithm=fedavg,feddyn", "local.epochs=5"])
    assert [
        job for each in (known, new) for job in expand(each) if "algorithm=feddyn" in job
    ] == list(expand(new))
    with pytest.raises(ConfigError, match="no run of this sweep has"):
        launches(load("fedka_table6"), ["algorithm.anchors=missing", "experiment=fedka/cifar100"])


SEEDS = ["seed=7", "seed=8", "seed=9"]
AXES = {"algorithm": {"fedprox": {}}, "local.lr": {"0.1": {}, "0.2": {}}}


def test_new_values_have_the_fixed_overrides_of_the_first_block():
    """They are the protocol of the sweep: without them, a seed would be measured on other data."""
    sweep = load_named_sweep("benchmark", conf_directories())
    for method in ("fedavg", "fedcurv"):  # a method of the sweep, and another one
        lines = launches(sweep, [f"algorithm={method}", "alpha=0.1", "seed=range(7,10)"])
        new = [{*job} for line in lines for job in expand(line)]
        assert all({f"algorithm={method}", "evaluate_on=test"} <= job for job in new)
        assert sorted(each for job in new for each in job if "seed=" in each) == SEEDS
    nova = jobs("fedntd_table1_clients", "algorithm=feddecorr")
    assert all({"cohorts.draw=round", "partition.numpy_seed=19940817"} <= {*job} for job in nova)


NINE = [
    *("fedavg", "fedavgm", "fedprox", "scaffold", "moon"),
    *("fedntd", "flashback", "fedka", "fedlc"),
]


@pytest.mark.parametrize(
    ("name", "given", "counts"),
    [
        ("benchmark_search", "alpha=0.1,0.5", dict.fromkeys(NINE, 18)),
        (
            "benchmark_search",
            "alpha=0.1 local.lr=0.5",
            dict.fromkeys(NINE, 3) | {"fedavg": 1, "scaffold": 1},
        ),
        (  # which only FedAvg and SCAFFOLD have
            "benchmark_search",
            "alpha=0.1 local.lr=0.01",
            dict.fromkeys(NINE, 3) | {"fedavg": 1, "scaffold": 1},
        ),
        ("benchmark_search", "algorithm.mu=5", {"fedprox": 9, "moon": 9}),
        ("benchmark_search", "algorithm=fedprox algorithm.mu=5", {"fedprox": 9}),
        (
            "fedntd_table8",
            "local.epochs=2",
            dict.fromkeys(["fedavg", "fedprox", "scaffold", "fedntd", "fednova"], 1),
        ),
        (
            "fedntd_table1",
            "algorithm=fedntd,fednova experiment=fedntd/cifar10_iid",
            {"fedntd": 1, "fednova": 1},
        ),
        # a value that the methods have in another block, with participation=0.25
        (
            "fedntd_table13",
            "num_clients=64 alpha=0.1",
            {"fedavg": 1, "fedalign": 1, "fedntd": 1},
        ),
        # a new method has all six data sets
        ("lorm_table1", "algorithm=fedprox alpha=0.5", {"fedprox": 6}),
    ],
)
def test_new_value_replaces_those_of_every_method(name, given, counts):
    """Only the first block that has the key was run: eight of nine methods were left out."""
    sweep = load_named_sweep(name, conf_directories())
    found = [job for line in launches(sweep, given.split()) for job in expand(line)]
    methods = (text.partition("=")[2] for job in found for text in job if "algorithm=" in text)
    assert Counter(methods) == counts
    if name == "fedntd_table13":
        assert all("participation=0.25" in job for job in found)


@pytest.mark.parametrize("name", ["cfed_table1", "cfed_table1_lr1e-6", "fedntd_table1"])
def test_value_of_a_group_that_a_sweep_has_only_selects_runs(name):
    """FedDMC has no run of cfed/text_domain, which it cannot learn."""
    sweep = load_named_sweep(name, conf_directories())

    def jobs(*given):
        return [tuple(job) for line in launches(sweep, given) for job in expand(line)]

    every = jobs()
    for value in {text for job in every for text in job if text.startswith("experiment=")}:
        assert sorted(jobs(value)) == sorted(job for job in every if value in job)


def test_given_value_without_a_run_is_named():
    sweep = load_named_sweep("benchmark_search", conf_directories())
    message = "no run of this sweep has algorithm=scaffold, algorithm.mu=5$"
    with pytest.raises(ConfigError, match=message):
        launches(sweep, ["algorithm=scaffold,fedprox", "algorithm.mu=5"])


def test_new_value_replaces_those_of_the_methods_that_do_not_have_it():
    """FedAvg has the rate in another block."""
    both, one = {"fedavg": {}, "moon": {}}, {"fedavg": {}}
    blocks = (
        Block({"algorithm": both, "local.lr": {"0.1": {}}}, ()),
        Block({"algorithm": one, "local.lr": {"0.2": {}}}, ("rounds=5",)),
    )
    assert launches(NamedSweep(name="own", blocks=blocks), ["local.lr=0.2"]) == [
        ["algorithm=moon", "local.lr=0.2"],
        ["algorithm=fedavg", "rounds=5", "local.lr=0.2"],
    ]


def test_overrides_of_a_replaced_option_are_left_out():
    sweep = NamedSweep(name="own", blocks=(Block(AXES, ("algorithm.mu=1", "rounds=5")),))
    old, new = launches(sweep, ["algorithm=fedprox,fedavg"])
    assert "algorithm.mu=1" in old
    assert new == ["algorithm=fedavg", "rounds=5", "local.lr=0.1,0.2"]


def test_new_values_of_two_keys_are_combined():
    """Runs with both were left out."""
    seeds = {"0": {}, "1": {}}
    sweep = NamedSweep(name="own", blocks=(Block(AXES | {"seed": seeds}, ("algorithm.mu=1",)),))
    lines = launches(sweep, ["seed=1,2", "algorithm=fedprox,fedavg", "local.lr=0.1"])
    found = sorted(sorted(job) for line in lines for job in expand(line))
    assert found == sorted(
        sorted([f"algorithm={name}", "local.lr=0.1", f"seed={seed}", *own])
        for name, own in {"fedprox": ["algorithm.mu=1"], "fedavg": []}.items()
        for seed in (1, 2)
    )


def test_value_of_an_axis_may_be_a_list():
    """It was cut at its commas."""
    sizes = {"[32,64]": {}, "[8]": {}}
    sweep = NamedSweep(name="own", blocks=(Block({"model.hidden": sizes}, ("rounds=5",)),))
    assert launches(sweep, ["model.hidden=[32,64]"]) == [["rounds=5", "model.hidden=[32,64]"]]


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
    (job,) = jobs("fedntd_fig18", *given)
    assert composed(*job).schedule.partition == {4: {"name": "sharding", "shards_per_client": 3}}
    (job,) = jobs("fedntd_fig18", "rounds=105")
    assert list(composed(*job).schedule.partition) == [101]


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


def test_working_directory_is_known_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "fedntd_table8").mkdir()
    monkeypatch.chdir(tmp_path / "fedntd_table8")
    assert find_paper_sweep(Path()).name == "fedntd_table8"


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


def test_overrides_of_another_block_change_the_protocol():
    """Table 13 has participation=0.25 only for 64 clients, Table 14 a beta only for FedNTD(MSE)."""
    given = ["experiment=fedntd/fedalign", "num_clients=16", "alpha=0.1", "algorithm=fedntd"]
    for name, run, other in (
        ("fedntd_table13", given, "participation=0.25"),
        ("fedntd_table14", ["experiment=fedntd/cifar10_s2", given[-1]], "algorithm.beta=0.3"),
    ):
        assert find_protocol_changes(load(name), run) == []
        assert find_protocol_changes(load(name), [*run, other]) == [other]
