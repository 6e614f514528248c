"""Checks that the parts of a configuration fit together, before data are loaded and once the model
is there."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.exemplars import Exemplars
from fedexp.algorithms.families import part_of
from fedexp.algorithms.interfaces import Federation
from fedexp.algorithms.local_training import LocalTraining
from fedexp.config.build import Built
from fedexp.config.overrides import assigned
from fedexp.config.settings import Settings
from fedexp.core.errors import ConfigError, require_choice
from fedexp.data.tasks import DomainIncremental, Scenario, Several
from fedexp.data.types import DataSource
from fedexp.data.views import AUGMENTED, TEST, evaluated
from fedexp.engine.network import trainable
from fedexp.engine.schedule import left_out
from fedexp.metrics.forgetting_metric import Metrics
from fedexp.metrics.history import History
from fedexp.rundir.objective import check_objective
from fedexp.training import stopping
from fedexp.training.changes import check_schedule

log = logging.getLogger("fedexp")

ADAPTIVE = ("server.optimizer=adam", "server.optimizer=yogi")
SET = ("surrogate.dataset", "surrogate.fraction")
# Options that only some runs use: key -> the values, or the keys that are set, with one of which
# they have an effect.
USED_WITH: Mapping[str, tuple[str, ...]] = {
    "local.step_rounds": ("local.schedule=step",),
    "local.lr_min": ("local.schedule=cosine",),
    "local.lr_decay": ("local.schedule=exponential", "local.schedule=step"),
    "local.momentum": ("local.optimizer=sgd", "local.optimizer=nesterov"),
    "server.beta1": (*ADAPTIVE, "server.optimizer=adagrad"),
    "server.beta2": ADAPTIVE,
    "server.tau": (*ADAPTIVE, "server.optimizer=adagrad"),
    "public.balanced": ("public.fraction",),
    "surrogate.shards": SET,
    "surrogate.server_shards": SET,
    "surrogate.total_shards": SET,
    "validation.per_client": ("validation.fraction",),
    "stop.metric": ("stop.patience",),
    "objective_direction": ("objective", "validation.fraction"),
    "dataset.augmentation.padding_mode": ("dataset.augmentation.crop_padding",),
}


def check_used(values: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Raise ConfigError for options that were typed and that nothing in the run uses. Values that a
    preset brings are not judged: it may be made for other choices than those of this run.

    values: the resolved configuration."""
    keys = dict.fromkeys(key for text in typed for key, _ in assigned(text) if key in USED_WITH)
    wrong = [
        f"{key}={value_at(values, key)}: only has an effect with {' or '.join(USED_WITH[key])}"
        for key in keys
        if value_at(values, key) is not None and not any(holds(values, c) for c in USED_WITH[key])
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def holds(values: Mapping[str, Any], condition: str) -> bool:
    """Return whether a key has the value of `key=value`, or, of a key alone, is set."""
    key, equals, wanted = condition.partition("=")
    value = value_at(values, key)
    return str(value) == wanted if equals else bool(value)


def value_at(node: Any, key: str) -> Any:
    """Return the value of a dotted key in nested mappings; None where there is none."""
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def check(built: Built, metrics: Metrics) -> None:
    """Raise ConfigError for what does not fit together whatever the data are, before they are
    loaded or even downloaded."""
    interval, algorithm = built.settings.eval_interval, built.algorithm
    if metrics.needs_local and interval != 1:
        raise ConfigError(
            f"eval_interval={interval}: must be 1 with a forgetting_metric that evaluates local"
            " models, since it compares them with the global model of the round before"
        )
    if metrics.needs_neurons and not built.model.has_neurons:
        raise ConfigError(
            f"forgetting_metric=alignment: {type(built.model).__name__} has no fully connected"
            " hidden layers whose neurons could be compared; model=cnn and model=cnn_3fc have"
        )
    if built.local.optimizer not in algorithm.optimizers:
        raise ConfigError(
            f"local.optimizer={built.local.optimizer}: {type(algorithm).__name__} is defined for "
            f"{', '.join(algorithm.optimizers)}"
        )
    check_server(built)
    if built.local.warmup and built.local.warmup >= built.scenario.rounds_per_task:
        raise ConfigError(
            f"local.warmup={built.local.warmup}: must be less than the"
            f" {built.scenario.rounds_per_task} rounds"
        )
    check_task(built)
    check_schedule(built)
    check_views(built)
    check_validation(built)
    check_stop(built)
    check_goal(built, metrics)
    if algorithm.needs.public and not built.public.fraction:
        raise ConfigError(
            f"{type(algorithm).__name__} needs a public set on the server: public.fraction=0.025"
            " splits one off the training data (public.fraction=0 now)"
        )


def check_kept(settings: Settings, last: int) -> None:
    """Raise ConfigError for a model that is to be kept after the last round. last: of all tasks."""
    for key in ("keep_models", "keep_local_models"):
        chosen = getattr(settings, key)
        if isinstance(chosen, list) and max(chosen) > last:
            raise ConfigError(f"{key}: round {max(chosen)} is after the last one (rounds={last})")


def check_server(built: Built) -> None:
    """Raise ConfigError where a server optimizer is asked for that cannot take the step of the
    algorithm's server."""
    algorithm, name = built.algorithm, built.server.optimizer
    if name is None:
        return
    why = algorithm.own_step
    if algorithm.paradigm == "centralized":
        why = "algorithm.paradigm=centralized has one client and nothing to average"
    if why:
        raise ConfigError(f"server.optimizer={name}: not with {type(algorithm).__name__}: {why}")


def check_views(built: Built) -> None:
    """Raise ConfigError where the augmented view lacks a random transform of the training
    images."""
    dataset, settings = built.dataset, built.settings
    if AUGMENTED not in settings.test_views:
        return
    if dataset.kind != "images":
        why = f"dataset={dataset.name} has {dataset.kind}, which training does not transform"
    elif not settings.augment:
        why = "augment=false switches off the transform of the training images"
    elif not dataset.augmentation.active:
        why = (
            f"dataset={dataset.name} has no augmentation (every part of dataset.augmentation is"
            " switched off)"
        )
    else:
        return
    raise ConfigError(
        f"test_views=[{','.join(settings.test_views)}]: there is no augmented view, {why}"
    )


def check_validation(built: Built) -> None:
    """Raise ConfigError where the validation set cannot be, or is asked for and not there."""
    fraction, on = built.validation.fraction, built.settings.evaluate_on
    if on not in (None, TEST) and not fraction:
        raise ConfigError(
            f"evaluate_on={on}: there is no validation set; validation.fraction=0.1 holds one out"
        )
    if fraction and built.partition.numbers_all and not built.validation.per_client:
        raise ConfigError(
            f"validation.fraction={fraction}: with partition=file, whose numbers count all training"
            " examples, the validation set is drawn of the clients' examples:"
            " validation.per_client=true"
        )
    repeats = isinstance(built.scenario, Several) and built.scenario.repeats_examples
    if fraction and built.validation.per_client and repeats:
        raise ConfigError(
            f"validation.per_client=true: with scenario={built.scenario.name}, whose tasks show the"
            " same examples, a client would train on what another one holds out:"
            " validation.per_client=false"
        )


def check_goal(built: Built, metrics: Metrics) -> None:
    """Raise ConfigError where the run will not have the number that `objective` names."""
    settings = built.settings
    if settings.objective is not None:
        views = evaluated(settings.test_views, settings.evaluate_on, built.validation.fraction > 0)
        empty = History(np.zeros((1, 1), np.int64))
        check_objective(settings.objective, views, metrics.summary(empty))


def check_stop(built: Built) -> None:
    """Raise ConfigError where the accuracy that a patience is about is not measured."""
    if built.stop.patience is None:
        return
    settings, view = built.settings, stopping.view_of(built.stop)
    if view not in evaluated(
        settings.test_views, settings.evaluate_on, built.validation.fraction > 0
    ):
        asked = f"stop.patience={built.stop.patience}"
        if built.stop.metric is None:
            raise ConfigError(
                f"{asked}: needs a validation set (validation.fraction=0.1);"
                " stop.metric=test_accuracy uses the test set instead"
            )
        raise ConfigError(
            f"{asked} stop.metric={built.stop.metric}: the run is not evaluated on it"
            " (evaluate_on=both)"
        )


def check_task(built: Built) -> None:
    """Raise ConfigError for what does not fit together of data set, model, scenario and
    algorithm."""
    algorithm, model, dataset, scenario = (
        built.algorithm,
        built.model,
        built.dataset,
        built.scenario,
    )
    name = type(algorithm).__name__
    require_choice("algorithm.paradigm", algorithm.paradigm, ("federated", "centralized"))
    if scenario.name not in algorithm.scenarios:
        allowed = " or ".join(f"scenario={each}" for each in algorithm.scenarios)
        raise ConfigError(f"scenario={scenario.name}: {name} is defined for {allowed}")
    if "kind" in vars(dataset):
        raise ConfigError(
            f"dataset.kind: {type(dataset).__name__} has a field `kind`, which hides the attribute"
            " that says whether a data set has images or texts; rename the field"
        )
    if dataset.kind != model.reads:
        raise ConfigError(
            f"dataset={dataset.name} has {dataset.kind}, and the model {type(model).__name__} reads"
            f" {model.reads};"
            f" {'model=textcnn reads text' if dataset.kind == 'text' else 'model=cnn reads images'}"
        )
    check_domains(dataset, scenario)
    if dataset.kind not in algorithm.inputs:
        raise ConfigError(
            f"dataset={dataset.name} has {dataset.kind}: {name} is defined for"
            f" {algorithm.inputs[0]}"
        )
    if algorithm.needs.surrogate and not built.surrogate.given:
        raise ConfigError(
            f"{name} needs unlabelled examples: surrogate.dataset=<data set>, such as caltech256 or"
            " weibo, or surrogate.fraction=0.1, which withholds a part of the training data"
            " (neither is set now)"
        )
    check_surrogate(built)
    if algorithm.separate_tasks and (asked := mixing(scenario, algorithm)):
        raise ConfigError(
            f"{asked}: {name} is defined where all clients train on one task at a time"
        )
    if scenario.name != "none" and built.partition.numbers_all:
        raise ConfigError(f"scenario={scenario.name}: partition=file goes with scenario=none only")


def check_domains(dataset: DataSource, scenario: Scenario) -> None:
    """Raise ConfigError where a domain has images and the first one texts, or the other way
    round."""
    if not isinstance(scenario, DomainIncremental):
        return
    others = [domain.name for domain in scenario.domains if domain.kind != dataset.kind]
    if others:
        names = ",".join(domain.name for domain in scenario.domains)
        raise ConfigError(
            f"scenario.domains=[{names}]: dataset={dataset.name} has {dataset.kind},"
            f" {' and '.join(others)} not; scenario.domains=[...] names data sets with"
            f" {dataset.kind} and the same classes for the tasks after the first"
        )


def check_surrogate(built: Built) -> None:
    """Raise ConfigError where a scenario divides a data set anew that is the surrogate set too: its
    training images there may be test images here."""
    scenario, surrogate = built.scenario, built.surrogate.dataset
    if surrogate is None or not isinstance(scenario, Several) or scenario.split is None:
        return
    learned = [
        built.dataset,
        *(scenario.domains if isinstance(scenario, DomainIncremental) else ()),
    ]
    if source_of(surrogate) in map(source_of, learned):
        raise ConfigError(
            f"surrogate.dataset={surrogate.name}: scenario={scenario.name} divides this data set"
            " anew, so that test examples would be surrogate examples; surrogate.fraction=0.1"
            " withholds a part of the training data, and scenario.split=null keeps the split of"
            " the data set"
        )


def source_of(dataset: DataSource) -> tuple[object, ...]:
    """Return what says where the examples of a data set come from."""
    return type(dataset), *(
        getattr(dataset, key, None) for key in ("name", "root", "path", "subset", "split")
    )


def mixing(scenario: Scenario, algorithm: FedAvg) -> str:
    """Return the option by which clients would train on examples of other tasks than the present
    one; empty: none.

    A replay buffer is none for methods that choose examples to keep themselves: their losses count
    old classes."""
    if not isinstance(scenario, Several):
        return ""
    if scenario.mixes_tasks:
        return (
            f"scenario.blur={scenario.blur}"
            if scenario.blur
            else f"scenario.order={scenario.order}"
        )
    return (
        f"scenario.replay={scenario.replay}"
        if scenario.replay and not isinstance(algorithm, Exemplars)
        else ""
    )


def check_frozen(module: torch.nn.Module, algorithm: FedAvg) -> None:
    """Raise ConfigError where parameters with requires_grad=False leave nothing to train, or not
    what the algorithm is about; says how many there are."""
    every, trained = dict(module.named_parameters()), trainable(module)
    frozen = [name for name in every if name not in trained]
    if not trained:
        raise ConfigError(
            "model: all its parameters are frozen (requires_grad=False); there is nothing to train"
        )
    if wanted := [name for name in frozen if name in algorithm.must_train]:
        raise ConfigError(
            f"model: {', '.join(wanted)} frozen (requires_grad=False), but"
            f" {type(algorithm).__name__} treats the classifier apart from the rest and has to"
            " train it; leave it trainable, or use another algorithm"
        )
    if frozen:
        total, left = (sum(p.numel() for p in each.values()) for each in (every, trained))
        log.info(
            "frozen (requires_grad=False): %d of %d parameters, neither trained nor sent",
            total - left,
            total,
        )


def without_batches(
    algorithm: FedAvg, tasks: Sequence[Federation], local: LocalTraining
) -> dict[str, int]:
    """Count, for a model whose batch norm needs batches of two examples, how many clients have none
    in a task and never train in it, and how many examples each pass leaves out; empty where there
    are none.

    Raises ConfigError where nobody could train.
    """
    idle, lost = set(), 0
    for federation in tasks:
        sizes = [
            len(part_of(algorithm, federation, client)) for client in range(federation.num_clients)
        ]
        alone = [left_out(size, local.batch_size) for size in sizes]
        unable = {
            c for c, (size, single) in enumerate(zip(sizes, alone, strict=True)) if size == single
        }
        if len(unable) == federation.num_clients:
            where = f" of task {federation.task + 1}" if len(tasks) > 1 else ""
            raise ConfigError(
                f"local.batch_size={local.batch_size}: the model has batch normalisation, which"
                f" needs batches of at least two examples, and no client{where} has one; use a"
                " larger local.batch_size, fewer clients, or a model without batch normalisation"
                " (model=cnn)"
            )
        idle |= unable
        lost += sum(alone)
    if idle:
        log.warning(
            "batch normalisation needs batches of at least two examples: %d of %d clients have none"
            " and never train; each pass over the data leaves out %d examples",
            len(idle),
            tasks[0].num_clients,
            lost,
        )
    elif lost:
        log.info(
            "batch normalisation needs batches of two: each pass over the data leaves out %d"
            " example(s)",
            lost,
        )
    return {"clients": len(idle), "examples": lost} if lost else {}
