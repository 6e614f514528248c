"""Fingerprints: what they depend on."""

import copy
import functools
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fedexp.config.trust import find_class, targets
from fedexp.config.values import resolve
from fedexp.core.errors import ConfigError
from fedexp.rundir import origin
from fedexp.rundir.fingerprint import (
    NEUTRAL,
    data_marks,
    essential,
    fingerprint,
    group_name,
    short_hash,
)
from fedexp.training import provenance
from fedexp.training.resuming import check_resume
from toy_federation import CONF, composed, make_simulation

CHOICES = dict.fromkeys(("algorithm", "dataset", "partition"), "x")


def container(*overrides):
    return resolve(composed("data_dir=data", *overrides))


def moved(node):
    """Move every class of fedexp to another module."""
    if isinstance(node, list):
        return [moved(item) for item in node]
    if not isinstance(node, dict):
        return node
    own = {k: v for k, v in node.items() if k == "_target_" and v.startswith("fedexp.")}
    return {k: moved(v) for k, v in node.items()} | {
        k: f"fedexp.new.{v.rpartition('.')[2]}" for k, v in own.items()
    }


def tree(root, names=("a", "b"), content=b"ppp"):
    """<root>/{train,test}/{x,y}/<name>.png"""
    for split in ("train", "test"):
        for label in ("x", "y"):
            (root / split / label).mkdir(parents=True)
            for name in names:
                (root / split / label / f"{name}.png").write_bytes(content)
    return root


def folder(root, *overrides):
    cache = Path(root).absolute().parent / "cache"
    return container(
        "dataset=image_folder", f"dataset.root={root}", f"data_dir={cache}", *overrides
    )


LINES = (
    "",
    "experiment=fedntd/cifar10_s2 algorithm=moon",
    "experiment=cfed/text_domain algorithm=cfed_c",
    "dataset=image_folder dataset.root=photos model=resnet18 algorithm=scaffold",
)


@pytest.mark.parametrize("line", LINES)
def test_moved_class_keeps_the_fingerprint(line):
    values = container(*line.split())
    assert fingerprint(values) == fingerprint(moved(values))
    assert essential(values) == essential(moved(values))


def test_removed_options_count_as_their_default():
    values = container()
    former = {**values["hardware"], "convolution": "auto", "jobs_together": 8}
    assert fingerprint(values | {"hardware": former}) == fingerprint(values)
    named = {**values["hardware"], "convolution": "winograd"}
    assert fingerprint(values | {"hardware": named}) != fingerprint(values)


@pytest.mark.parametrize("line", LINES)
def test_options_at_their_neutral_value_do_not_change_the_fingerprint(line):
    values = container(*line.split())
    older = copy.deepcopy(values)
    for key in NEUTRAL:
        *nodes, name = key.split(".")
        parent = functools.reduce(lambda node, part: node.get(part) or {}, nodes, older)
        if parent.get(name) == NEUTRAL[key]:
            parent.pop(name, None)
    assert older != values
    assert fingerprint(older) == fingerprint(values)
    assert fingerprint(values | {"evaluate": ["global", "personal"]}) != fingerprint(older)


def test_seeds_share_a_group_name():
    values = container() | {"choices": CHOICES}
    assert group_name(values) == group_name(values | {"seed": 1})
    assert group_name(values) != group_name(values | {"rounds": 1})


def test_class_names_in_conf_are_unique_and_importable():
    """Fingerprints have class names without modules."""
    found = {
        name
        for path in CONF.rglob("*.yaml")
        for name in targets(yaml.safe_load(path.read_text()))
        if "fedexp." in name
    }
    names = [name.rpartition(".")[2] for name in found]
    assert len(set(names)) == len(names) > 50
    for name in found - {"fedexp.cli.sweeps.Sweeps"}:
        find_class(name, "_target_")


def test_fingerprint_depends_on_classes():
    values = container()
    assert fingerprint(values).startswith("2:")
    assert len(fingerprint(values)) == 2 + 64
    assert fingerprint(values)[2:10] == short_hash(values)
    changes = [
        ("algorithm", "fedexp.algorithms.moon.Moon"),
        ("algorithm", "mine.FedAvg"),
        ("algorithm", "other.FedAvg"),
    ]
    digests = {fingerprint(values)}
    for group, target in changes:  # a class of a user's own counts with its module
        changed = copy.deepcopy(values)
        changed[group]["_target_"] = target
        digests.add(fingerprint(changed))
    assert len(digests) == 4
    assert fingerprint(values | {"choices": {"algorithm": "mine"}}) == fingerprint(values)


def test_fingerprint_depends_on_data_not_their_path(tmp_path, monkeypatch):
    first, same = tree(tmp_path / "a" / "photos"), tree(tmp_path / "b" / "images")
    digest = fingerprint(folder(first))
    assert fingerprint(folder(same)) == digest
    monkeypatch.chdir(tmp_path)
    assert fingerprint(folder("a/photos")) == digest
    others = [
        tree(tmp_path / "c" / "photos", names=("a", "c")),
        tree(tmp_path / "d" / "photos", content=b"ppq"),
    ]
    assert len({digest, *(fingerprint(folder(other)) for other in others)}) == 3
    (first / "valid").mkdir()  # not used
    (first / "train" / ".DS_Store").write_text("hidden")
    assert fingerprint(folder(first)) == digest
    # two jobs that will fail
    assert fingerprint(folder(tmp_path / "none")) != fingerprint(folder(tmp_path / "no"))
    assert data_marks(folder(first))["dataset.root"].startswith("8 files (bytes ")
    (first / "train" / "x" / "gone.png").symlink_to(tmp_path / "nothing")
    assert data_marks(folder(first)) == {}  # a job that will fail


def test_fingerprint_depends_on_surrogate_and_domain_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("surrogate.dataset=image_folder", "algorithm=cfed")
    roots = [
        f"+surrogate.options={{root: '{tree(tmp_path / name, content=text)}'}}"
        for name, text in (("a", b"1"), ("b", b"1"), ("c", b"2"))
    ]
    digests = [fingerprint(container(*options, root)) for root in roots]
    assert digests[0] == digests[1] != digests[2]
    words = ("scenario=domain_incremental", "dataset=thucnews", "model=textcnn")
    assert fingerprint(container(*words)) == fingerprint(
        resolve(composed(*words, "data_dir=elsewhere"))
    )


def test_published_data_are_identified_by_name(tmp_path):
    """The first run downloads cinic10, so its files may appear between two commands."""
    values = [
        resolve(composed("dataset=cinic10", f"data_dir={tmp_path / name}")) for name in ("a", "b")
    ]
    tree(tmp_path / "a" / "cinic10")
    assert fingerprint(values[0]) == fingerprint(values[1])


def test_partition_file_is_identified_by_content(tmp_path):
    digests = []
    for name, text in (("a", "[[0]]"), ("b", "[[0]]"), ("c", "[[1]]")):
        (tmp_path / f"{name}.json").write_text(text)
        digests.append(
            fingerprint(container("partition=file", f"partition.path={tmp_path}/{name}.json"))
        )
    assert digests[0] == digests[1] != digests[2]


def write(directory, values, data=None):
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    if data is not None:
        origin.record(directory, values, data, origin.current_marks(values, {}, data))
    return directory


def test_resume_accepts_moved_but_not_changed_data(tmp_path):
    data = make_simulation().runtime.data
    photos = tree(tmp_path / "photos")
    noted = write(tmp_path / "noted", folder(photos), data)
    former = write(tmp_path / "former", folder(photos))
    shutil.move(photos, tmp_path / "elsewhere")
    for run in (noted, former):  # the second has no record of its data
        check_resume(run, folder(tmp_path / "elsewhere"))
        check_resume(run, moved(folder(tmp_path / "elsewhere", "tracker=none")))
        with pytest.raises(
            ConfigError, match=r"algorithm\._target_: FedAvg in the run, FedNTD now"
        ):
            check_resume(run, folder(tmp_path / "elsewhere", "algorithm=fedntd"))
    other = folder(tree(tmp_path / "other", names=("a",)))
    check_resume(noted, other)
    marks = origin.current_marks(other, {})
    with pytest.raises(
        ConfigError,
        match=r"\n  dataset\.root: 4 of 4 files differ\naccept_changed_data=",
    ):
        origin.check_data(noted, marks, other)
    origin.check_data(noted, marks, other | {"accept_changed_data": True})
    shutil.move(tmp_path / "elsewhere", photos)
    with pytest.raises(ConfigError, match=r"dataset\.root: 8 files"):
        check_resume(former, other)  # its data still lie where its config.yaml says


def test_origin_records_fingerprint_and_data(tmp_path):
    """The data of toy_federation.Noise have 4 classes, 40 training and 20 test images."""
    data, values = make_simulation().runtime.data, container()
    origin.record(tmp_path, values, data, {})
    found = json.loads((tmp_path / "fingerprint.json").read_text())
    assert (found["fingerprint"], found["marks"], found["directory"]) == (
        fingerprint(values),
        {},
        str(Path.cwd()),
    )
    kept = {key: found["data"][key] for key in ("train", "test", "classes", "shape")}
    assert kept == {"train": 40, "test": 20, "classes": 4, "shape": [6, 6, 1]}
    origin.check_data(tmp_path, {}, values, data)
    labels = data.y_train.clone()
    labels[0] = 1 - labels[0]
    with pytest.raises(
        ConfigError, match=r"the data have changed .*\n  labels: \w+ in the run, \w+ now"
    ):
        origin.check_data(
            tmp_path, {}, values | {"accept_changed_data": True}, replace(data, y_train=labels)
        )
    (tmp_path / "fingerprint.json").write_text("[")
    origin.check_data(tmp_path, {}, values, data)  # a run without recorded data


# --- the commit


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_commit_of_the_checkout_is_recorded(tmp_path, monkeypatch):
    """The commit of fedexp's checkout ends with `+` if a file has changed; other repositories are
    ignored."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")

    def git(*words: str, at: Path = tmp_path) -> str:
        return subprocess.run(
            ["git", *who, *words], cwd=at, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert Path(__file__).parents[1] == provenance.ROOT
    if (provenance.ROOT / ".git").exists():
        assert provenance.commit.__wrapped__().removesuffix("+") == git(
            "rev-parse", "HEAD", at=provenance.ROOT
        )
    git("init")
    (tmp_path / "file").write_text("first")
    git("add", "file")
    git("commit", "-m", "one")
    head = git("rev-parse", "HEAD")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit.__wrapped__() == head
    (tmp_path / "file").write_text("changed")
    assert provenance.commit.__wrapped__() == f"{head}+"
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "site-packages")
    assert provenance.commit.__wrapped__() is None
