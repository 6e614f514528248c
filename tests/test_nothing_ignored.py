"""Every key, changed alone, changes the outcome, is rejected, or is listed with a reason."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from fedexp.config.options import MULTIPLE, known_keys, list_groups, list_options
from fedexp.core.errors import ConfigError
from fedexp.rundir import files
from fedexp.training.checks import check_used
from fedexp.training.job import Job
from fedexp.training.run import train_run
from toy_federation import CONF, CONFS, composed

# Two rounds of four clients with three steps each; all other values are those of conf/.
BASE = ["num_clients=8", "participation=0.5", "local.epochs=1", "min_size=2", "rounds=2"]
BASE += ["model.channels=[4]", "model.hidden=[8]", "local.batch_size=60", "tracker=none"]
BASE += ["hardware=cpu", "hardware.engine=sequential", "hardware.threads=1", "figures.draw=false"]
CHOICES = {"dataset": "digits", "scenario": "none", "partition": "lda", "model": "cnn"}
CHOICES |= {"algorithm": "fedavg", "forgetting_metric": "forgetting", "analysis": "none"}
CHOICES |= {"hardware": "cpu", "tracker": "none", "cohorts": "uniform"}
KEYS = known_keys()

# key -> another value that changes what the run writes
CHANGED = {
    "seed": "1",
    "seeds.partition": "1",
    "seeds.sampling": "1",
    "seeds.training": "1",
    "rounds": "3",
    "num_clients": "7",
    "participation": "0.25",
    "cohorts.dropout": "0.5",
    "cohorts.draw": "round",
    "cohorts.path": "cohorts.json",
    "cohorts.size": "binomial",
    "weighting": "uniform",
    "schedule.partition": "{2: {name: iid}}",
    "schedule.classes": "{2: {3: 0.1}}",
    "local.epochs": "2",
    "local.batch_size": "50",
    "local.drop_last": "true",
    "local.keep_optimizer": "true",
    "local.optimizer": "nesterov",
    "local.lr": "0.02",
    "local.lr_decay": "0.5",
    "local.schedule": "constant",
    "local.warmup": "1",
    "local.momentum": "0.5",
    "local.weight_decay": "0.1",
    "server.optimizer": "adam",
    "public.fraction": "0.1",
    "surrogate.fraction": "0.1",
    "validation.fraction": "0.1",
    "test_per_client": "0.25",
    "eval_interval": "2",
    "evaluate": "[global,personal]",
    "targets": "[0.1]",
    "target_fractions": "[0.5]",
    "stop.minutes": "0.00001",
    "keep_models": "1",
    "keep_local_models": "1",
    "figures.draw": "true",
    "hardware.precision": "fp64",
    "scenario.rounds_per_task": "3",
}
SLOW = {"figures.draw"}
# key -> another value, which is rejected since nothing would use it
REJECTED = {
    "accept_changed_data": "true",
    "schedule.clients": "[0]",
    "cohorts.dropout_at": "upload",
    "cohorts.stragglers": "0.5",
    "cohorts.straggler_work": "0.5",
    "cohorts.stragglers_drawn": "client",
    "local.steps": "2",
    "local.step_rounds": "1",
    "local.lr_min": "0.001",
    "local.rates": "{2:0.001}",
    "server.lr": "0.5",
    "server.momentum": "0.5",
    "server.beta1": "0.5",
    "server.beta2": "0.5",
    "server.tau": "0.1",
    "public.balanced": "false",
    "surrogate.options": "{root: photos}",
    "surrogate.classes": "[0]",
    "surrogate.examples": "10",
    "surrogate.shards": "1",
    "surrogate.server_shards": "1",
    "surrogate.total_shards": "20",
    "validation.per_client": "true",
    "evaluate_on": "validation",
    "objective_direction": "max",
    "test_views": "[plain,augmented]",
    "local_evaluation.every": "2",
    "stop.patience": "1",
    "stop.metric": "test_accuracy",
    "hardware.workers": "2",
    "hardware.chunk": "2",
    "hardware.cuda_graphs": "false",
}
# key -> why the run writes the same, and where its effect is tested
REASONS = {
    "checkpoint_interval": "how often the state is saved (test_checkpoint.py)",
    "data_dir": "where data lie; digits come with scikit-learn (test_datasets.py)",
    "dataset.data_dir": "the same",
    "dataset.name": "what the run is called (test_trackers.py)",
    "resume": "which run, not what it computes (e2e/test_resume.py)",
    "objective": "read by a search (test_search.py)",
    "augment": "switches off what digits do not have (test_augment.py)",
    "surrogate.dataset": "FedAvg, beside methods that use it, ignores it (test_tasks.py)",
    "figures.format": "also of pictures that are drawn later (test_figure_styles.py)",
    "figures.titles": "also of pictures that are drawn later (test_figure_styles.py)",
    "figures.classes": "also of pictures that are drawn later (test_figure_styles.py)",
    "figures.size": "also of pictures that are drawn later (test_figure_styles.py)",
    "figures.colour_map": "also of pictures that are drawn later (test_figure_styles.py)",
    "figures.style": "also of pictures that are drawn later (test_figure_styles.py)",
    "hardware.device": "how fast, not what (test_engines.py)",
    "hardware.engine": "how fast, not what (test_engines.py)",
    "hardware.threads": "how fast, not what (test_launchers.py)",
}
# choice of an option -> keys that nothing uses with it
UNUSED = {
    "local.optimizer=adam": ["local.momentum=0.9"],
    "local.momentum=0": ["local.keep_optimizer=true"],
    "local.schedule=constant": ["local.lr_decay=0.99", "local.step_rounds=5", "local.lr_min=0"],
    "local.schedule=cosine": ["local.lr_decay=0.5", "local.step_rounds=5"],
    "local.schedule=step": ["local.lr_min=0.001", "local.rates={2:0.001}"],
    "server.optimizer=sgd": ["server.tau=0.1", "server.beta1=0.5", "server.beta2=0.5"],
    "server.optimizer=adagrad": ["server.beta2=0.5"],
    "dataset.augmentation.flip=true": ["dataset.augmentation.padding_mode=zero"],
}


def train(directory: Path, *overrides: str) -> dict[str, Any]:
    given = [*BASE, *overrides]
    train_run(Job(composed(*given), directory, given, CHOICES, None))
    return outcome(directory)


def outcome(directory: Path) -> dict[str, Any]:
    """Return name -> content of everything that a run writes.

    The configuration, times and hardware are left out.
    """
    found: dict[str, Any] = {p.relative_to(directory).as_posix(): 0 for p in directory.rglob("*")}
    for path in directory.rglob("*.csv"):
        for name, column in pd.read_csv(path, dtype=str).items():
            found[f"{path.name} {name}"] = tuple(column.fillna(""))
    for path in directory.glob("*.npz"):
        for name, array in np.load(path).items():
            found[f"{path.name} {name}"] = array.tobytes()
    for key, value in json.loads((directory / files.SUMMARY).read_text()).items():
        if key not in ("hardware", "identity", "seed", "seeds"):
            found[f"summary {key}"] = json.dumps(value)
    state = torch.load(directory / files.CHECKPOINT, weights_only=True)
    for name, value in state["server"]["params"].items():
        found[f"weights {name}"] = value.numpy().tobytes()
    return found


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> tuple[dict[str, Any], set[str]]:
    """Return the outcome of BASE that is equal in two runs, and all names in it."""
    folder = tmp_path_factory.mktemp("usual")
    first, second = (train(folder / name) for name in ("first", "second"))
    return {key: value for key, value in first.items() if second[key] == value}, {*first}


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow if key in SLOW else ()) for key in CHANGED]
)
def test_changed_key_changes_the_outcome(key, usual, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cohorts.json").write_text("[[0,1,2,3],[1,2,3,4]]")
    same, names = usual
    now = train(tmp_path / "run", f"{key}={CHANGED[key]}")
    assert {*now} != names or any(now[name] != value for name, value in same.items())


@pytest.mark.parametrize("key", REJECTED)
def test_unused_key_is_rejected(key, tmp_path):
    with pytest.raises(ConfigError, match=rf"^{key}=[^\n]*$"):
        train(
            tmp_path / "run", f"{'++' if key == 'surrogate.options' else ''}{key}={REJECTED[key]}"
        )
    assert not (tmp_path / "run").exists()


def test_every_key_is_tested_or_has_a_reason():
    main = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    given = ("hardware/auto", "cohorts/uniform")
    nodes = {
        name.partition("/")[0]: yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
        for name in given
    }
    for key in ("defaults", "hydra", *MULTIPLE):
        del main[key]
    known = {*keys_of(main), *keys_of(nodes)}
    for group in list_groups(CONFS):  # and keys that all options of a group have
        options = {f"{group}={option}" for option in list_options(group, CONFS)}
        known |= {key for key, brought in KEYS.items() if {*brought} >= options}
    known = {key for key in known if not key.endswith("_target_")}
    tables = [*CHANGED, *REJECTED, *REASONS]
    assert sorted(tables) == sorted(known)


def keys_of(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys of values and of empty mappings."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("choice", UNUSED)
def test_typed_option_without_effect_is_rejected(choice, tmp_path):
    """All keys are reported at once, also those in a mapping."""
    keys = [each.partition("=")[0] for each in UNUSED[choice]]
    with pytest.raises(ConfigError) as error:
        train(tmp_path / "run", choice, *UNUSED[choice])
    assert {line.partition("=")[0] for line in str(error.value).splitlines()} == {*keys}


def test_search_may_try_options_without_effect(tmp_path):
    given = [*BASE, "rounds=1", "local.optimizer=adam", "local.momentum=0.5"]
    job = Job(composed(*given), tmp_path / "run", given, CHOICES, "search", in_search=True)
    summary = train_run(job)
    assert summary["status"] == "completed"


def test_options_of_presets_may_have_no_effect():
    values = OmegaConf.to_container(composed("dataset=digits"), resolve=True)
    check_used(values | {"local": {**values["local"], "optimizer": "adam"}}, ["local.lr=0.1"])
    with pytest.raises(ConfigError, match=r"only has an effect with local.schedule=cosine"):
        check_used(values, ["local={lr: 0.1, lr_min: 0.01}"])
    check_used(values, ["stop.metric=null", "local.momentum=0.5"])


@pytest.mark.parametrize(
    ("options", "unused", "needed"),
    [
        (
            ["scenario=class_incremental", "scenario.classes=[[0,1],[2]]"],
            ["scenario.num_tasks=2", "scenario.shuffle_classes=true"],
            "scenario.classes=null",
        ),
        (["scenario=class_stream"], ["scenario.replay_policy=reservoir"], "scenario.replay=5"),
        (["dataset=image_folder"], ["dataset.split_seed=1"], "dataset.test_fraction=0.2"),
        (
            ["algorithm=cfed"],
            ["algorithm.server_batch_size=64"],
            "algorithm.server_distillation=true",
        ),
        (
            ["algorithm=feddf"],
            [
                f"algorithm.{each}"
                for each in ("steps=5", "patience=2", "interval=1", "validation=0.2")
            ],
            "algorithm.epochs_on_server=0",
        ),
        (
            ["algorithm=fedka", "algorithm.anchors=missing"],
            ["algorithm.selection=hard"],
            "algorithm.anchors=both",
        ),
        (
            ["algorithm=fedntd", "algorithm.distance=mse"],
            ["algorithm.tau=2", "algorithm.tau_squared=false"],
            "algorithm.distance=kl",
        ),
        (["algorithm=fedntd"], ["algorithm.mse_reduction=mean"], "algorithm.distance=mse"),
        (
            ["algorithm=flashback", "algorithm.on_server=false"],
            ["algorithm.epochs_on_server=2"],
            "algorithm.on_server=true",
        ),
    ],
)
def test_typed_option_of_a_group_without_effect_is_rejected(options, unused, needed):
    def check(*more):
        values = OmegaConf.to_container(composed(*options, *more), resolve=True)
        check_used(values, [*options, *unused, *more])

    with pytest.raises(ConfigError) as error:
        check()
    assert [line.partition("=")[0] for line in str(error.value).splitlines()] == [
        each.partition("=")[0] for each in unused
    ]
    assert needed.partition("=")[0] in str(error.value)
    check(needed)


def test_view_of_the_test_data_is_rejected_if_only_the_validation_set_is_used():
    views = "test_views=[plain,augmented]"

    def check(*more):
        options = ["dataset=cifar10", views, *more]
        check_used(OmegaConf.to_container(composed(*options), resolve=True), options)

    check()
    with pytest.raises(ConfigError, match=r"test_views=\[plain,augmented\]: has no effect.*=both"):
        check("validation.fraction=0.1")
    check("validation.fraction=0.1", "evaluate_on=both")


def test_options_of_own_parts_are_not_judged():
    """An own data set may have `split_seed` without `test_fraction`, and an own algorithm may use
    `tau` with another distance."""
    values = {"dataset": {"_target_": "own.Photos", "split_seed": 1}}
    values["algorithm"] = {"_target_": "own.Method", "tau": 2.0, "distance": "cosine"}
    check_used(values, ["dataset.split_seed=1", "algorithm.tau=2"])
