"""The identity of a run, and origin.json: what they depend on, and what a resumed run compares."""

import json
import shutil
import subprocess
from dataclasses import field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedexp.algorithms.fedprox import FedProx
from fedexp.algorithms.moon import Moon
from fedexp.config.build import build
from fedexp.core import provenance
from fedexp.core.errors import ConfigError
from fedexp.core.limits import Checked
from fedexp.data.cache import load_mapped
from fedexp.data.mapped import Chosen
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.rundir import origin
from fedexp.rundir.identity import digest, essential, group_name, result_values
from fedexp.trackers.base import Callback, CallbackConfig
from fedexp.training.folder import data_checksums
from toy_federation import composed, make_simulation

CHOICES = dict.fromkeys(("algorithm", "dataset", "partition"), "x")


def values_of(*overrides):
    return essential(build(composed("data_dir=data", *overrides)))


def test_only_values_that_change_results_count():
    base = values_of("algorithm=fedprox", "dataset=image_folder", "dataset.root=data/a")
    given = ("algorithm=fedprox", "dataset=image_folder")
    free = ("tracker=wandb", "hardware.threads=2", "figures=false", "hardware.engine=sequential")
    free += ("keep_models=1", "checkpoint_interval=3", "stop.minutes=1")
    assert values_of(*given, "dataset.root=data/a", *free) == base
    moved = build(composed(*given, "dataset.root=${data_dir}/a", "data_dir=/mnt/elsewhere"))
    assert essential(moved) == base, "paths in the data_dir are relative to it"
    others = ("local.lr=0.3", "seed=1", "hardware.precision=fp64", "algorithm.mu=0.3", "alpha=3")
    found = [values_of(*given, "dataset.root=data/a", text) for text in others]
    found.append(values_of(*given, "dataset.root=data/b"))
    assert len({digest(values) for values in [base, *found]}) == len(others) + 2
    assert base["algorithm._target_"] == "fedexp.algorithms.fedprox.FedProx"
    assert not any(key in base for key in ("tracker._target_", "choices", "data_dir"))
    assert "partition.alpha" in base
    assert "alpha" not in base, "the same value"


def test_only_paths_in_the_data_dir_are_relative_to_it():
    """The name of another folder may begin with the name of the data_dir."""
    values = {"data_dir": "/mnt/data", "inside": "/mnt/data/a", "beside": "/mnt/data2/a"}
    assert result_values(values) == {"inside": "${data_dir}/a", "beside": "/mnt/data2/a"}


def test_versions_of_classes_and_of_their_bases_count(monkeypatch):
    before = values_of("algorithm=moon")
    monkeypatch.setattr(FedProx, "version", 2)
    assert values_of("algorithm=moon") == before
    assert values_of("algorithm=fedprox")["algorithm.FedProx.version"] == 2
    monkeypatch.setattr(Moon.__bases__[0], "version", 3)
    assert digest(values_of("algorithm=moon")) != digest(before)


class Part(Checked):
    version: ClassVar[int] = 1

    old: float
    new: float = field(default=0.5, metadata={"neutral": 0.0})


class Whole(Checked):
    name: str
    parts: list[Part]


def test_an_option_is_left_out_at_its_neutral_value_only():
    """A run without the option, from before it was added, has the same identity."""

    def found(**options):
        nodes = [{"_target_": "x.Part", **options}]
        parts = [Part(**options)]
        values = {"part": {"parts": nodes, "name": "a"}}
        built = SimpleNamespace(settings=Part(old=1), values=values)
        built.part = Whole(name="a", parts=parts)
        return essential(built)

    assert found(old=1.0, new=0.0) == found(old=1.0)
    assert found(old=1.0, new=0.5)["part.parts.0.new"] == 0.5, "the default need not be neutral"
    assert found(old=1.0, new=0.0)["part.parts.0.old"] == 1.0


class Measure(ForgettingMetric):
    version: ClassVar[int] = 2
    columns: ClassVar = {"a": "min"}

    window: int = field(default=1, metadata={"neutral": 1})


def test_options_of_metrics_and_analyses_are_left_out_at_their_neutral_value():
    """Their keys have the names of the options, and those of versions the numbers."""
    plain = build(composed("data_dir=data"))
    groups = ("forgetting_metric", "analysis")

    def found(**options):
        nodes = {group: {"own": {"_target_": "x.Measure", **options}} for group in groups}
        parts = {group: [Measure(**options)] for group in groups}
        return essential(replace(plain, values=plain.values | nodes, **parts))

    before = found()
    assert found(window=1) == before
    changed = {f"{group}.own.window": 3 for group in groups}
    assert found(window=3) == before | changed
    assert {before[f"{group}.0.Measure.version"] for group in groups} == {2}


class Watcher(CallbackConfig):
    after: int

    def create(self):
        return Callback()


class Stopper(Watcher):
    ends_runs: ClassVar[bool] = True
    version: ClassVar[int] = 2

    also: int = field(default=0, metadata={"neutral": 0})


def test_only_callbacks_that_may_end_a_run_belong_to_its_identity():
    """A run without one keeps the identity that it had before callbacks could declare this."""
    plain = build(composed("data_dir=data"))
    base = essential(plain)

    def found(**callbacks):
        nodes = {name: {"_target_": "x", **vars(each)} for name, each in callbacks.items()}
        values = plain.values | {"callback": nodes}
        return essential(replace(plain, callback=list(callbacks.values()), values=values))

    assert found(a=Watcher(after=2)) == base
    both = found(a=Watcher(after=2), b=Stopper(after=3))
    added = {"_target_": "x", "after": 3, "Stopper.version": 2}
    assert both == base | {f"callback.b.{key}": value for key, value in added.items()}
    assert found(b=Stopper(after=3, also=1)) == both | {"callback.b.also": 1}


def test_seeds_share_a_group_name():
    values = {"choices": CHOICES, "seed": 0, "rounds": 3, "tracker": {"name": "x"}}
    assert group_name(values) == group_name(values | {"seed": 1, "tracker": None})
    assert group_name(values) != group_name(values | {"rounds": 1})


def test_group_name_has_the_value_of_the_partition():
    given = {"choices": CHOICES, "alpha": 0.1, "partition": {"alpha": 1.0}}  # partition.alpha=1
    assert "1.0" in group_name(given)
    assert "0.1" in group_name({"choices": CHOICES, "alpha": 0.1, "partition": {"min_size": 9}})


# --- the data


def test_checksum_covers_everything_that_was_loaded():
    data = make_simulation().runtime.data
    changes = {name: getattr(data, name).clone() for name in ("x_train", "x_test")}
    changes |= {name: getattr(data, name).clone() for name in ("y_train", "y_test")}
    for array in changes.values():
        array.view(-1)[-1] ^= 1
    changes |= {"classes": data.classes[::-1], "owners": np.arange(len(data.y_train))}
    loaded = [replace(data, checksum="", **{name: value}) for name, value in changes.items()]
    assert len({data.checksum, *(each.checksum for each in loaded)}) == 1 + len(changes)
    assert replace(data, checksum="").checksum == data.checksum
    part = data.with_test_from_training(torch.arange(3), torch.zeros(3))
    assert part.checksum == data.checksum, "a copy keeps the checksum of what was loaded"


def test_checksum_of_images_on_disk_covers_their_content(tmp_path):
    data = make_simulation().runtime.data

    def stored(pixel):
        content = np.full((2, 3, 3, 1), pixel, np.uint8)
        place = (str(tmp_path), "set", [str(pixel)], {}, content.shape)
        return Chosen.all_of(load_mapped(*place, lambda: [content]))

    sums = [replace(data, checksum="", x_test=stored(pixel)).checksum for pixel in (1, 1, 2)]
    assert sums[0] == sums[1] != sums[2]


# --- origin.json

VALUES = {"seed": 0, "local.lr": 0.1, "dataset.root": "/old", "partition.path": "a.json"}


def part(first=0, commit="a", **data):
    return {"first_round": first, "commit": commit, "data": {"arrays": "0", **data}}


def test_resume_names_each_differing_value(tmp_path):
    """Except a path that exists now, since the content is compared."""
    origin.write(tmp_path, VALUES, [8, 8, 1], part(), None)
    assert origin.differences(origin.read(tmp_path), VALUES) == {}
    now = {
        **VALUES,
        "local.lr": 0.2,
        "dataset.root": str(tmp_path),
        "new": None,
        "partition.path": None,
    }
    del now["seed"]
    assert list(origin.differences(origin.read(tmp_path), now).values()) == [
        "local.lr: 0.1 in the run, 0.2 now",
        "partition.path: a.json in the run, None now",
        "seed: 0 in the run, (absent) now",
    ]


def test_only_a_file_with_a_checksum_may_be_another_one(tmp_path, monkeypatch):
    """Any option named path was exchanged without a word. Its absolute path is the same place."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        (tmp_path / name).touch()
    keys = ("algorithm.path", "partition.path", "model.weights")
    values = dict.fromkeys(keys[:2], "a.json") | {"model.weights": "DEFAULT"}
    origin.write(tmp_path, values, [8], part(**{"partition.path": "1"}), None)
    known = origin.read(tmp_path)
    changed = [
        {*origin.differences(known, dict.fromkeys(keys, str(tmp_path / name)))}
        for name in ("a.json", "b.json")
    ]
    assert changed == [{"model.weights"}, {"model.weights", "algorithm.path"}]


def test_files_of_all_options_have_checksums(tmp_path):
    (tmp_path / "a").touch()
    values = {"algorithm": {"path": f"{tmp_path}/a"}, "tracker": {"path": f"{tmp_path}/a"}}
    values |= {"dataset": {"path": f"{tmp_path}/a"}, "model": {"weights": "DEFAULT"}}
    found = data_checksums(SimpleNamespace(values=values), "0")
    assert found == {"arrays": "0", "algorithm.path": "00000000"}


def test_runs_of_other_formats_are_refused_with_one_message(tmp_path):
    with pytest.raises(ConfigError, match=r"^\S+: made by fedexp 0\.1; read or continue it with"):
        origin.read(tmp_path)
    for text in ('{"format": 3}', "[]", "{", ""):
        (tmp_path / origin.NAME).write_text(text)
        with pytest.raises(
            ConfigError, match=r"^\S+origin\.json: (cannot be read \(.+\)|is not a mapping)$"
        ):
            origin.read(tmp_path)


def test_changed_data_are_refused_or_recorded(tmp_path):
    origin.write(tmp_path, VALUES, [8], part(), None)
    origin.check_data(tmp_path, origin.read(tmp_path), {"arrays": "0"}, accepts=False)
    with pytest.raises(
        ConfigError, match=r"\(checksums of arrays: 0 in the run, 1 now\)"
    ):  # runs of earlier versions lack the checksums of some files
        origin.check_data(
            tmp_path, origin.read(tmp_path), {"arrays": "1", "own.path": "2"}, accepts=False
        )
    origin.check_data(tmp_path, origin.read(tmp_path), {"arrays": "1"}, accepts=True)
    origin.write(tmp_path, VALUES, [8], part(3, arrays="1"), origin.read(tmp_path))
    origin.check_data(tmp_path, origin.read(tmp_path), {"arrays": "1"}, accepts=False)
    assert [each["data"]["arrays"] for each in origin.read(tmp_path)["parts"]] == ["0", "1"]


def test_origin_lists_the_parts_of_a_run(tmp_path):
    """An equal part is not repeated. Parts whose rounds run again are replaced."""
    origin.write(tmp_path, VALUES, [8], part(), None)
    for first, commit in ((3, "a"), (5, "b"), (7, "c"), (7, "d")):
        origin.write(tmp_path, VALUES, [8], part(first, commit), origin.read(tmp_path))
    parts = origin.read(tmp_path)["parts"]
    assert [(each["first_round"], each["commit"]) for each in parts] == [
        (0, "a"),
        (5, "b"),
        (7, "d"),
    ]
    assert origin.read(tmp_path)["identity"] == digest(VALUES)
    origin.write(tmp_path, VALUES, [8], part(0, "e"), None)
    assert json.loads((tmp_path / origin.NAME).read_text())["parts"] == [part(0, "e")]


def test_start_of_a_run_is_kept_when_it_is_resumed(tmp_path, monkeypatch):
    """A run of a version that did not write it has none; origin.json stays readable."""
    before = datetime.now(UTC).replace(microsecond=0)
    origin.write(tmp_path, VALUES, [8], part(), None)
    started = origin.read(tmp_path)["started"]
    assert before <= datetime.fromisoformat(started) <= datetime.now(UTC)
    later = SimpleNamespace(now=lambda zone: datetime(2100, 1, 1, tzinfo=zone))
    monkeypatch.setattr(origin, "datetime", later)
    origin.write(tmp_path, VALUES, [8], part(3, "b"), origin.read(tmp_path))
    assert origin.read(tmp_path)["started"] == started
    origin.write(tmp_path, VALUES, [8], part(), None)
    assert origin.read(tmp_path)["started"] == "2100-01-01T00:00:00+00:00"

    content = json.loads((tmp_path / origin.NAME).read_text())
    del content["started"]
    (tmp_path / origin.NAME).write_text(json.dumps(content))
    origin.write(tmp_path, VALUES, [8], part(3, "b"), origin.read(tmp_path))
    assert origin.read(tmp_path)["started"] is None


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

    root = Path(__file__).parents[1]
    assert root == provenance.ROOT
    if (root / ".git").exists():
        assert provenance.commit().removesuffix("+") == git("rev-parse", "HEAD", at=root)
    git("init")
    (tmp_path / "file").write_text("first")
    git("add", "file")
    git("commit", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert provenance.commit_of(tmp_path) == head
    (tmp_path / "file").write_text("changed")
    assert provenance.commit_of(tmp_path) == f"{head}+"
    (tmp_path / "site-packages").mkdir()
    assert provenance.commit_of(tmp_path / "site-packages") is None


def test_package_without_git_has_the_commit_that_it_was_built_from(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    assert provenance.commit.__wrapped__() is None
    (tmp_path / provenance.COMMIT).write_text("0123abcd+\n")
    assert provenance.commit.__wrapped__() == "0123abcd+"


def test_source_is_equal_in_a_package_and_its_checkout_and_changes_with_a_file(
    tmp_path, monkeypatch
):
    def write(name: str, text: str = "") -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def source_of(packages: str) -> str:
        monkeypatch.setattr(provenance, "PACKAGE", tmp_path / packages / "fedexp")
        monkeypatch.setattr(provenance, "ROOT", tmp_path)
        return provenance.source.__wrapped__()

    for packages, conf in (("src", "conf"), ("site-packages", "site-packages/fedexp/conf")):
        for name in ("fedexp/__init__.py", "fedexp/core/a.py", "fedexp_more/__init__.py"):
            write(f"{packages}/{name}", name)
        write(f"{conf}/algorithm/b.yaml", "beta: 1")
        write(f"{packages}/other/__init__.py", packages)
        write(f"{packages}/fedexp/__pycache__/a.pyc", packages)
    first = source_of("src")
    assert source_of("site-packages") == first
    for name in ("fedexp/core/a.py", "fedexp_more/__init__.py", "fedexp/conf/algorithm/b.yaml"):
        path = tmp_path / "site-packages" / name
        before = path.read_text()
        path.write_text(f"{before} ")
        assert source_of("site-packages") != first, name
        path.write_text(before)
