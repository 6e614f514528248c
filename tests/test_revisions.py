"""Corrections of methods: outdated runs are not resumed or judged."""

import functools
import json

import pandas as pd
import pytest
import yaml

from fedexp.config.build import build
from fedexp.config.values import resolve
from fedexp.core.errors import ConfigError
from fedexp.papers.aggregate import write_tables
from fedexp.rundir import revisions
from fedexp.rundir.fingerprint import data_marks, fingerprint, group_name
from fedexp.rundir.revisions import REVISIONS, latest_revisions, outdated
from fedexp.rundir.sweeps import write_sweep_name
from fedexp.training.resuming import check_resume
from test_evidence import run_directory
from toy_federation import composed

DMC = "algorithm=feddmc scenario=class_incremental surrogate.fraction=0.1"
BALANCED = "scenario=class_incremental scenario.replay=9 scenario.replay_policy=class_balanced"
# Command lines whose results a correction changed, and similar ones whose results it did not.
CHANGED = {
    "algorithm=fedcurv": [
        "algorithm=fedavg",
        "algorithm=fedntd",
        "algorithm=fedewc",
        "algorithm=fedka",
    ],
    "algorithm=fedala": [],
    "algorithm=ccvr": ["algorithm=ccvr algorithm.covariance=diagonal"],
    "algorithm=feddf algorithm.epochs_on_server=0": ["algorithm=feddf"],
    "algorithm=cfed_c surrogate.fraction=0.1": ["algorithm=cfed surrogate.fraction=0.1"],
    "dataset=thucnews model=textcnn algorithm=cfed algorithm.server_distillation=true": [
        "dataset=thucnews model=textcnn algorithm=cfed",
        "algorithm=cfed algorithm.server_distillation=true",  # its model has no dropout
    ],
    "partition=file partition.path=x.json surrogate.fraction=0.1": [
        "partition=file partition.path=x.json"
    ],
    "scenario=rotations scenario.replay=9 scenario.replay_policy=class_balanced": [
        "scenario=rotations scenario.replay=9",
        "scenario=rotations scenario.replay_policy=class_balanced",
    ],
    "scenario=rotations validation.fraction=0.1": ["scenario=rotations"],
    "scenario=domain_incremental scenario.replay=9 scenario.replay_policy=class_balanced": [],
    f"{BALANCED} scenario.blur=0.1": [BALANCED],
    "scenario=class_incremental scenario.blur=0.1 validation.fraction=0.1": [
        "scenario=class_incremental scenario.blur=0.1",
        "scenario=class_incremental validation.fraction=0.1",
    ],
    "scenario=domain_incremental scenario.blur=0.1 validation.fraction=0.1": [],
    "experiment=flashback/femnist_500": ["dataset=femnist partition=natural"],
    "experiment=cfed/image_class": ["dataset=caltech256"],
    "forgetting_metric=round_drop forgetting_metric.local=true": ["forgetting_metric=round_drop"],
    "forgetting_metric=all": [],
    "algorithm=moon model=resnet18": [
        "algorithm=moon",
        "algorithm=moon model=resnet18 participation=1",  # all clients are there in round 1
        "algorithm=moon model=resnet10",  # it keeps no running statistics
    ],
    "algorithm=moon model.batch_norm=true": [],
    "algorithm=target scenario=class_incremental": [],
    "algorithm=fedfomo": [],
    "algorithm=fedalign model.batch_norm=true": ["algorithm=fedavg model.batch_norm=true"],
    "algorithm=flashback model=resnet10 public.fraction=0.1": [
        "algorithm=flashback public.fraction=0.1",
        "algorithm=flashback model=resnet18 public.fraction=0.1",  # it keeps running statistics
        "algorithm=flashback model=resnet10 algorithm.on_server=false",
    ],
    "algorithm=cfed model=resnet10 algorithm.server_distillation=true surrogate.fraction=0.1": [
        "algorithm=cfed model=resnet10 surrogate.fraction=0.1"
    ],
    "algorithm=feddf model=resnet10 public.fraction=0.1": ["algorithm=feddf public.fraction=0.1"],
    "algorithm=fedreg model=resnet18": ["algorithm=fedreg", "algorithm=fedreg model=resnet10"],
    "algorithm=fedka model=resnet50": ["algorithm=fedka", "algorithm=fedavg model=resnet50"],
    "algorithm=fedka model.batch_norm=true": ["algorithm=fedka model=t_cnn"],
    "model=resnet56_bottleneck": ["model=resnet50"],
    f"{DMC} analysis=weight_divergence": [
        DMC,
        f"{DMC} analysis=local_epochs",
        f"{DMC} algorithm.student=global analysis=weight_divergence",
        "analysis=weight_divergence",
    ],
    f"{DMC} analysis=gradient_diversity": [],
    f"{DMC} analysis=several analysis.members=[local_epochs,gradient_diversity]": [
        f"{DMC} analysis=several analysis.members=[local_epochs]"
    ],
    "algorithm=fedrep evaluate=[global,personal]": [
        "algorithm=fedrep",
        "algorithm=fedrep evaluate=personal participation=1",
        "algorithm=fedrod evaluate=personal",  # its personal classifier is 0 at first
    ],
    "algorithm=fedbn model=resnet10 evaluate=personal": ["algorithm=fedbn model=resnet10"],
    "algorithm=ditto evaluate=personal": ["algorithm=ditto"],
    "algorithm=fedproto evaluate=personal": ["algorithm=fedproto"],
    "model=torchvision model.name=googlenet model.weights=DEFAULT": [
        "model=torchvision model.name=googlenet",
        "model=torchvision model.weights=DEFAULT",
    ],
}


# A method that had been corrected: the options of the second correction, and its number
# and words of that correction.
AGAIN = {
    "algorithm=fedala": ("model=resnet10", 3, "padding"),
    "algorithm=fedfomo": ("model=resnet10", 3, "padding"),
    "algorithm=fedfomo algorithm.models=4": ("evaluate=personal", 4, "has not participated"),
}


@functools.cache
def container(line):
    """Return the resolved configuration of a command line. It must not be changed."""
    return resolve(composed(*line.split(), "data_dir=data"))


def as_before(values):
    """Return the configuration as it was written before the corrections."""
    return {key: value for key, value in values.items() if key != "revisions"}


@pytest.mark.parametrize(("line", "others"), CHANGED.items())
def test_correction_changes_the_fingerprint_of_its_runs_only(line, others):
    values = container(line)
    assert fingerprint(values) != fingerprint(as_before(values))
    assert outdated(values) == []
    assert len(outdated(as_before(values))) == 1
    choices = {"choices": dict.fromkeys(("algorithm", "dataset", "partition"), "x")}
    assert group_name(values | choices) != group_name(as_before(values) | choices)
    for other in map(container, others):
        assert other["revisions"] == {}
        assert fingerprint(other) == fingerprint(as_before(other))
        assert outdated(as_before(other)) == []


@pytest.mark.parametrize(("line", "found"), AGAIN.items())
def test_second_correction_has_the_next_number(line, found):
    more, number, words = found
    before, now = container(line), container(f"{line} {more}")
    assert (latest_revisions(before), latest_revisions(now)) == (
        {"algorithm": 2},
        {"algorithm": number},
    )
    (told,) = outdated(now | {"revisions": {"algorithm": 2}})
    assert words in told


def test_every_correction_is_tested():
    met = {(r.part, r.name) for r in REVISIONS for line in CHANGED if r.concerns(container(line))}
    assert met == {(revision.part, revision.name) for revision in REVISIONS}


def test_new_correction_makes_current_runs_outdated(monkeypatch):
    more = (
        revisions.Revision("algorithm", "FedCurv", 3, "x"),
        revisions.Revision("algorithm", "FedNTD", 2, "y"),
    )
    today = [
        container(f"experiment=fedntd/cifar10_s2 algorithm={name}")
        for name in ("fedcurv", "fedntd")
    ]
    monkeypatch.setattr(revisions, "REVISIONS", REVISIONS + more)
    assert [outdated(each) for each in today] == [
        ["older code: FedCurv (x)"],
        ["older code: FedNTD (y)"],
    ]
    assert latest_revisions(today[0]) == {"algorithm": 3}


def test_revisions_cannot_be_set():
    with pytest.raises(ConfigError, match="revisions: no such key"):
        build(composed("+revisions.algorithm=9"))
    build(composed("algorithm=fedcurv"))


def test_outdated_run_is_not_resumed(tmp_path):
    values = container("algorithm=fedcurv")
    run_directory(tmp_path, "cifar10_s2_fedavg")
    config = as_before(values) | {"choices": {"algorithm": "fedcurv"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"algorithm\.revision: \(absent\) in the run, 2 now"):
        check_resume(tmp_path, values)


def test_outdated_run_is_shown_without_verdict(tmp_path):
    """FedCurv was corrected, FedAvg was not."""
    for i, name in enumerate(("cifar10_s2_fedavg", "cifar10_s2_fedcurv")):
        run_directory(tmp_path / f"run{i}", name)
    write_sweep_name(tmp_path, "fedntd_table1")
    write_tables(tmp_path)
    table = pd.read_csv(tmp_path / "table.csv", keep_default_na=False)
    table = table[table["n"] > 0].set_index(["method", "metric"])
    assert table.loc[("FedAvg", "accuracy"), "protocol"] == "full"
    old = table.loc[("FedCurv", "accuracy")]
    assert (old["protocol"], old["verdict"]) == ("reduced", "not judged: reduced protocol")
    assert (
        old["changes"]
        == "older code: FedCurv (the Fisher information is taken on a pass of its own)"
    )
    config = yaml.safe_load((tmp_path / "run1" / "config.yaml").read_text())
    summary = json.loads((tmp_path / "run1" / "summary.json").read_text())
    assert (config["algorithm"]["_target_"].rpartition(".")[2], summary["algorithm"]) == (
        "FedCurv",
        "fedcurv",
    )
    (tmp_path / "run1" / "config.yaml").write_text(
        yaml.safe_dump(config | {"revisions": {"algorithm": 2}})
    )
    write_tables(tmp_path)
    table = pd.read_csv(tmp_path / "table.csv", keep_default_na=False)
    assert set(table.loc[table["n"] > 0, "protocol"]) == {"full"}


def test_weights_are_identified_by_content(tmp_path):
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.pth").write_bytes(content)
    found = [container(f"model=resnet18 model.weights={tmp_path}/{name}/w.pth") for name in "abc"]
    assert "model.weights" in data_marks(found[0])
    assert fingerprint(found[0]) == fingerprint(found[1]) != fingerprint(found[2])
