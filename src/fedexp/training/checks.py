"""Check that the parts of a configuration are compatible, before data are loaded."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.local_training import OPTIMIZERS
from fedexp.algorithms.server_optimizers import ServerOptimizer
from fedexp.config.build import Built
from fedexp.config.overrides import assigned_values
from fedexp.config.settings import Settings
from fedexp.core.errors import ConfigError, require_choice
from fedexp.data.partition import Natural
from fedexp.data.partition_file import File
from fedexp.data.tasks import DomainIncremental, MultiTask, Scenario
from fedexp.data.types import DataSource
from fedexp.data.views import AUGMENTED, TEST, TEST_VIEWS, VALIDATION, configured_views
from fedexp.metrics.forgetting_metric import Metrics
from fedexp.rundir.identity import flatten, value_of
from fedexp.rundir.objective import check_objective, direction_of
from fedexp.training.callbacks import patience_view

ADAPTIVE = ("server.optimizer=adam", "server.optimizer=yogi")
SET = ("surrogate.dataset", "surrogate.fraction")
# Options that only some runs use. Each maps to conditions of the form `key=value`, or `key` for a
# key that must be set. The option has an effect if at least one of its conditions holds. It is not
# judged in a run without the key of its first condition, as with a data set of the user's own.
USED_WITH: Mapping[str, tuple[str, ...]] = {
    "local.step_rounds": ("local.schedule=step",),
    "local.lr_min": ("local.schedule=cosine",),
    "local.rates": ("local.schedule=rates",),
    "local.lr_decay": ("local.schedule=exponential", "local.schedule=step"),
    "local.momentum": ("local.optimizer=sgd", "local.optimizer=nesterov"),
    "local.keep_optimizer": (
        "local.momentum",
        *(f"local.optimizer={name}" for name in OPTIMIZERS if name not in ("sgd", "nesterov")),
    ),
    "server.beta1": (*ADAPTIVE, "server.optimizer=adagrad"),
    "server.beta2": ADAPTIVE,
    "server.tau": (*ADAPTIVE, "server.optimizer=adagrad"),
    "public.balanced": ("public.fraction",),
    "cohorts.dropout_at": ("cohorts.dropout",),
    "cohorts.straggler_work": ("cohorts.stragglers",),
    "cohorts.stragglers_drawn": ("cohorts.stragglers",),
    "surrogate.shards": SET,
    "surrogate.server_shards": SET,
    "surrogate.total_shards": SET,
    "validation.per_client": ("validation.fraction",),
    "stop.metric": ("stop.patience",),
    "objective_direction": ("objective", "validation.fraction", "dataset.validation_splits"),
    "dataset.augmentation.padding_mode": ("dataset.augmentation.crop_padding",),
    "dataset.split_seed": ("dataset.test_fraction",),
    "scenario.num_tasks": ("scenario.classes=null",),
    "scenario.shuffle_classes": ("scenario.classes=null",),
    "scenario.replay_policy": ("scenario.replay",),
}
# further such options by the class of the algorithm
USED_BY: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "fedexp.algorithms.cfed.CFeD": {
        "algorithm.server_batch_size": ("algorithm.server_distillation",),
    },
    "fedexp.algorithms.feddf.FedDF": dict.fromkeys(
        [f"algorithm.{key}" for key in ("steps", "patience", "interval", "validation")],
        ("algorithm.epochs_on_server=0",),
    ),
    "fedexp.algorithms.fedka.FedKA": {
        "algorithm.selection": ("algorithm.anchors=both", "algorithm.anchors=non_dominant"),
    },
    "fedexp.algorithms.fedntd.FedNTD": {
        "algorithm.tau": ("algorithm.distance=kl",),
        "algorithm.tau_squared": ("algorithm.distance=kl",),
        "algorithm.mse_reduction": ("algorithm.distance=mse",),
    },
    "fedexp.algorithms.flashback.Flashback": {
        "algorithm.epochs_on_server": ("algorithm.on_server",),
    },
}


def check_used(values: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Check that every option typed on the command line has an effect in the run.

    Values from a preset are not checked, because a preset may set options for several choices.

    values: the resolved configuration.
    typed: the overrides from the command line.

    Raises ConfigError if an option has no effect.
    """
    assigned = dict(pair for text in typed for pair in assigned_values(text))
    known = flatten(values)
    of_algorithm = USED_BY.get(value_of(values, "algorithm._target_"), {})
    conditions_of = {**USED_WITH, **of_algorithm}
    # a mapping such as local.rates is assigned by its keys
    keys = [
        key
        for key, conditions in conditions_of.items()
        if any(f"{each}.".startswith(f"{key}.") for each in assigned)
        and conditions[0].partition("=")[0] in known
    ]
    wrong = [
        f"{key}={value_of(values, key)}: this option only has an effect with"
        f" {' or '.join(conditions_of[key])}"
        for key in keys
        if value_of(values, key) is not None
        and not any(holds(values, condition) for condition in conditions_of[key])
    ]
    given = {key for key, value in assigned.items() if value != "None"}
    if {"local.steps", "local.epochs"} <= given:
        wrong.append(
            f"local.steps={assigned['local.steps']} and"
            f" local.epochs={assigned['local.epochs']}: both set the length of local training; give"
            " only one of them"
        )
    views = values["test_views"] if "test_views" in assigned else []
    if AUGMENTED in views and AUGMENTED not in configured_views(values):
        wrong.append(
            f"test_views=[{','.join(views)}]: has no effect, because the run is evaluated on its"
            " validation set; evaluate_on=both also evaluates the test views"
        )
    if wrong:
        raise ConfigError("\n".join(wrong))


def holds(values: Mapping[str, Any], condition: str) -> bool:
    """Return whether the configuration fulfils a condition.

    condition: `key=value`, or only `key`. The condition `key` holds if the key is set.
    """
    key, equals, wanted = condition.partition("=")
    value = value_of(values, key)
    if wanted == "null":
        return value is None
    return str(value) == wanted if equals else bool(value)


def check_config(built: Built, metrics: Metrics) -> None:
    """Raise ConfigError if parts of the configuration are incompatible.

    These checks do not need the data, so they run before the data are loaded or downloaded.
    """
    problems = (
        training_problems(built, metrics),
        server_problems(built.algorithm, built.server),
        task_problems(built),
        surrogate_problems(built),
        data_problems(built),
        schedule_problems(built),
        own_test_problems(built, metrics),
        measure_problems(built, metrics),
    )
    for problem in chain(*problems):
        raise ConfigError(problem)


def training_problems(built: Built, metrics: Metrics) -> Iterator[str]:
    """Yield a message for each conflict among the training options.

    Training options are the algorithm, the model, the client optimizer and the metrics.
    """
    algorithm, local, rounds = built.algorithm, built.local, built.scenario.rounds_per_task
    name = type(algorithm).__name__
    every, interval = built.local_evaluation.every, built.settings.eval_interval
    if every is not None and not metrics.needs_local:
        yield (
            f"local_evaluation.every={every}: this option only has an effect with a"
            " forgetting_metric that evaluates local models, such as forgetting_metric=all"
        )
    if every is not None and every % interval:
        yield f"local_evaluation.every={every}: must be a multiple of eval_interval={interval}"
    if metrics.needs_examples and algorithm.tests_clients:
        yield (f"forgetting_metric=events: this metric needs a global model, but {name} has none")
    if local.optimizer not in algorithm.optimizers:
        defined = ", ".join(algorithm.optimizers)
        yield f"local.optimizer={local.optimizer}: {name} is only defined for {defined}"
    if local.keep_optimizer and algorithm.fresh_optimizer:
        yield (
            f"local.keep_optimizer=true: cannot be used with {name}: {algorithm.fresh_optimizer}"
        )
    yield from straggler_problems(built)
    if built.cohorts.dropout_at == "upload" and algorithm.needs_messages:
        yield f"cohorts.dropout_at=upload: cannot be used with {name}: {algorithm.needs_messages}"
    if local.warmup and local.warmup >= rounds:
        yield f"local.warmup={local.warmup}: must be less than the number of rounds, {rounds}"


def straggler_problems(built: Built) -> Iterator[str]:
    """Yield a message if no number of epochs or steps could be drawn for the stragglers."""
    law, local = built.cohorts, built.local
    name, usual = ("epochs", local.epochs) if local.steps is None else ("steps", local.steps)
    if not law.stragglers or law.straggler_work is not None or usual is None:
        return
    if usual < 2 or usual != int(usual):
        yield (
            f"cohorts.stragglers={law.stragglers:g}: their number of {name} is drawn from 1 to"
            f" local.{name}={usual:g}, which must be a whole number of at least 2; or set the"
            " fraction that they do, such as cohorts.straggler_work=0.5"
        )


def server_problems(algorithm: FedAvg, server: ServerOptimizer) -> Iterator[str]:
    """Yield a message if a server optimizer cannot replace the algorithm's server step."""
    why, name = algorithm.own_step, type(algorithm).__name__
    if algorithm.paradigm == "centralized":
        why = "algorithm.paradigm=centralized has one client and nothing to average"
    if server.optimizer is not None and why:
        yield f"server.optimizer={server.optimizer}: cannot be used with {name}: {why}"


def task_problems(built: Built) -> Iterator[str]:
    """Yield a message for each conflict among the data set, model, scenario and algorithm."""
    algorithm, model, dataset = built.algorithm, built.model, built.dataset
    scenario, name = built.scenario, type(built.algorithm).__name__
    require_choice("algorithm.paradigm", algorithm.paradigm, ("federated", "centralized"))
    if scenario.kind not in algorithm.scenarios:
        allowed = " or ".join(f"scenario={each}" for each in algorithm.scenarios)
        yield f"scenario={scenario.name}: {name} is only defined for {allowed}"
    if "kind" in vars(dataset):
        yield (
            f"dataset.kind: {type(dataset).__name__} has a field `kind`, which hides the attribute"
            " `kind` that says whether a data set contains images or text; rename the field"
        )
    if dataset.kind != model.reads:
        other = "model=textcnn reads text" if dataset.kind == "text" else "model=cnn reads images"
        yield (
            f"dataset={dataset.name} contains {dataset.kind}, but the model"
            f" {type(model).__name__} reads {model.reads}; {other}"
        )
    domains = domains_of(scenario)
    if any(domain.kind != dataset.kind for domain in domains):
        names = ",".join(domain.name for domain in domains)
        yield (
            f"scenario.domains=[{names}]: all domains must contain {dataset.kind} and have the"
            f" same classes as dataset={dataset.name}"
        )
    if dataset.kind not in algorithm.inputs:
        defined = algorithm.inputs[0]
        yield (
            f"dataset={dataset.name} contains {dataset.kind}, but {name} is only defined for"
            f" {defined}"
        )
    yield from scenario.problems(algorithm)
    if scenario.name != "none" and built.partition.by_domain:
        yield f"scenario={scenario.name}: partition=domains can only be used with scenario=none"
    if scenario.name != "none" and built.partition.has_global_indices:
        yield f"scenario={scenario.name}: partition=file can only be used with scenario=none"


def domains_of(scenario: Scenario) -> Sequence[DataSource]:
    return scenario.domains if isinstance(scenario, DomainIncremental) else []


def surrogate_problems(built: Built) -> Iterator[str]:
    """Yield a message if the surrogate set is missing or overlaps with the test examples.

    The sets may overlap if training examples of the same data set can become test examples, because
    the scenario splits it again or the clients hold out the test set.
    """
    scenario, surrogate = built.scenario, built.surrogate.dataset
    if built.algorithm.needs_surrogate and not built.surrogate.given:
        yield (
            f"{type(built.algorithm).__name__} needs unlabelled examples: set"
            " surrogate.dataset=<data set>, such as caltech256 or weibo, or surrogate.fraction=0.1,"
            " which withholds a part of the training data"
        )
    if surrogate is None or not shares_source(built, surrogate):
        return
    why = ""
    if isinstance(scenario, MultiTask) and scenario.split is not None:
        why = f"scenario={scenario.name} splits this data set again (scenario.split=null does not)"
    elif built.holds_out_test:
        why = "the clients hold out the test set from the training data"
    elif shared_split(surrogate):
        why = f"it is read with {shared_split(surrogate)}"
    if why:
        yield (
            f"surrogate.dataset={surrogate.name}: {why}, so some test examples would also be"
            " surrogate examples; use surrogate.fraction=0.1, which withholds a part of the"
            " training data"
        )


def shares_source(built: Built, surrogate: DataSource) -> bool:
    """Return whether a surrogate set has the same source as a data set of the run."""
    own = map(source_of, (built.dataset, *domains_of(built.scenario)))
    return source_of(surrogate) in own


def source_of(dataset: DataSource) -> tuple[object, ...]:
    """Return a key that is equal for data sets whose examples come from the same source."""
    keys = ("name", "root", "path", "subset", "split")
    return type(dataset), *(getattr(dataset, key, None) for key in keys)


def split_problems(built: Built) -> Iterator[str]:
    """Yield a message for each reason why a data set's own validation set cannot be used."""
    key = "validation_splits"
    given = {"scenario.domains": getattr(built.scenario, "domains", None) or ()}
    given["surrogate.dataset"] = [built.surrogate.dataset]
    for name, sets in given.items():
        if any(getattr(each, key, None) for each in sets):
            yield f"{name}: {key} must be null, because only the first task's data are validated"
    splits = getattr(built.dataset, key, None) or ()
    wrong = {
        "validation.fraction": built.validation.fraction,
        f"scenario={built.scenario.name}": built.scenario.name != "none",
        "partition=file": built.partition.has_global_indices,
    }
    for other in (name for name, used in wrong.items() if splits and used):
        yield f"dataset.{key}={list(splits)}: cannot be used with {other}"


def data_problems(built: Built) -> Iterator[str]:
    """Yield a message for each problem with the validation set or the public set."""
    validation, on, scenario = built.validation, built.settings.evaluate_on, built.scenario
    fraction = validation.fraction
    if on not in (None, TEST) and not built.has_validation:
        yield f"evaluate_on={on}: needs a validation set; set validation.fraction, such as 0.1"
    yield from split_problems(built)
    if fraction and built.partition.has_global_indices and not validation.per_client:
        yield (
            f"validation.fraction={fraction}: with partition=file, each client must hold out its"
            " validation examples; set validation.per_client=true"
        )
    if fraction and validation.per_client and scenario.repeats_examples:
        yield (
            f"validation.per_client=true: with scenario={scenario.name}, all tasks have the same"
            " examples, so a client would train on examples that another client holds out; set"
            " validation.per_client=false"
        )
    yield from test_problems(built)
    if built.algorithm.needs_public and not built.public.fraction:
        yield (
            f"public.fraction=0: {type(built.algorithm).__name__} needs a public set on the server;"
            " set public.fraction, such as public.fraction=0.025 for 2.5 % of the training data"
        )


def test_problems(built: Built) -> Iterator[str]:
    """Yield a message if clients would train on test examples, or if tasks have no test set."""
    settings, scenario = built.settings, built.scenario
    # A scenario with a split pools both parts, so an example of both would be in it twice.
    pooled = isinstance(scenario, MultiTask) and scenario.split is not None
    tested = built.views[0] in TEST_VIEWS and not built.holds_out_test
    every = (built.dataset, *domains_of(scenario))
    if pooled and any(one == other for one, other in combinations(every, 2)):
        yield (
            f"scenario.domains: the data sets {', '.join(each.name for each in every)} contain one"
            " twice, and each task splits it anew, so clients would also train on test examples;"
            " choose different data sets, or scenario.split=null"
        )
    for dataset in every:
        shared = shared_split(dataset)
        if shared and (tested or pooled):
            yield (
                f"{shared}: clients would also train on the test examples of {dataset.name}; choose"
                " other splits or, with scenario=none, set test_per_client=0.25, which holds out"
                " the test set from the clients"
            )
    given = f"test_per_client={settings.test_per_client:g}"
    if settings.test_per_client and scenario.name != "none":
        yield f"{given}: can only be used with scenario=none; tasks have their own test sets"
    if settings.test_per_client and built.schedule.partition:
        yield (
            f"{given}: cannot be used with schedule.partition, because a new partition would give"
            " clients training examples that are test examples"
        )


def own_test_problems(built: Built, metrics: Metrics) -> Iterator[str]:
    """Yield a message for each reason why the clients have no test examples of their own."""
    validation, scenario = built.validation, built.scenario
    if not metrics.needs_own:
        return
    given = "evaluate=own"
    if scenario.name != "none":
        yield f"{given}: can only be used with scenario=none"
    natural = built.dataset.tests_clients and isinstance(built.partition, Natural)
    if {*built.views} & {*TEST_VIEWS} and not (built.holds_out_test or natural):
        yield (
            f"{given}: the test set of dataset={built.dataset.name} is not divided among the"
            " clients; set test_per_client=0.25, which holds out a quarter of each client's"
            " examples"
        )
    if VALIDATION in built.views and not validation.per_client:
        yield (
            f"{given}: the validation set is not divided among the clients; set"
            " validation.per_client=true"
        )


def shared_split(dataset: DataSource) -> str:
    """Return the option by which training and test examples overlap, or an empty text."""
    splits = getattr(dataset, "train_splits", ())
    if {*splits} & {*(getattr(dataset, "test_splits", None) or ("test",))}:
        return f"dataset.train_splits=[{','.join(splits)}]"
    split = getattr(dataset, "test_split", None)
    return f"dataset.test_split={split}" if split == getattr(dataset, "train_split", "") else ""


def schedule_problems(built: Built) -> Iterator[str]:
    """Yield a message for each reason why the run cannot change the data as in `schedule`."""
    schedule, scenario = built.schedule, built.scenario.name
    if not schedule.rounds:
        return
    if scenario != "none":
        yield (
            "schedule: can only be used with scenario=none, because the tasks of"
            f" scenario={scenario} already change the data"
        )
    schedule.check_rounds(built.scenario.rounds_per_task)
    if not schedule.partition:
        return
    if built.algorithm.paradigm == "centralized":
        yield (
            "schedule: cannot be used with algorithm.paradigm=centralized, which has only one"
            " client"
        )
    if isinstance(built.partition, File | Natural):
        yield (
            "schedule: needs a partition that divides all training examples: partition=iid,"
            " dirichlet, sharding or equal_shards"
        )
    if built.validation.fraction and built.validation.per_client:
        yield (
            "schedule: needs validation.per_client=false, because a new partition would give"
            " clients training examples that other clients hold out"
        )


def measure_problems(built: Built, metrics: Metrics) -> Iterator[str]:
    """Yield a message for each view, stop option or objective that the run cannot evaluate."""
    dataset, settings, stop = built.dataset, built.settings, built.stop
    why = ""
    if dataset.kind != "images":
        why = f"dataset={dataset.name} contains {dataset.kind}, which has no transform"
    elif not settings.augment:
        why = "augment=false switches off the transform for training images"
    elif not dataset.augmentation.active:
        why = f"every part of dataset.augmentation is switched off for dataset={dataset.name}"
    if why and AUGMENTED in settings.test_views:
        given = ",".join(settings.test_views)
        yield f"test_views=[{given}]: the view `augmented` needs a transform, but {why}"
    if stop.patience is not None and patience_view(stop) not in built.views:
        needs = (
            ": needs a validation set; set validation.fraction, such as 0.1, or use the test set"
            " with stop.metric=test_accuracy"
        )
        if stop.metric is not None:
            needs = (
                f" stop.metric={stop.metric}: the run does not compute this metric; set"
                " evaluate_on=both"
            )
        yield f"stop.patience={stop.patience}{needs}"
    if settings.objective is not None:
        check_objective(settings.objective, built.views, metrics.summary_names())
        direction_of(settings.objective, settings.objective_direction)


def check_kept(settings: Settings, last: int) -> None:
    """Check the rounds in which models are saved (`keep_models` and `keep_local_models`).

    last: the last round of the run.

    Raises ConfigError if one of these rounds comes after the last round.
    """
    for key in ("keep_models", "keep_local_models"):
        chosen = getattr(settings, key)
        if isinstance(chosen, list) and max(chosen) > last:
            raise ConfigError(f"{key}: round {max(chosen)} is after the last round (rounds={last})")
