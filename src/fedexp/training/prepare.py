"""From a checked configuration to a simulation: loads the data, partitions it, makes model and engine."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Federation
from fedexp.config.build import Built
from fedexp.core.errors import ConfigError, require_choice
from fedexp.core.objective import check_objective
from fedexp.core.rng import generator_for, torch_seed
from fedexp.core.settings import LocalTraining, Validation
from fedexp.core.views import AUGMENTED, TEST, evaluated
from fedexp.data.partition import IID, Partition, Partitioner, make_partition
from fedexp.data.replay import buffers
from fedexp.data.streams import blurred, reordered, task_orders
from fedexp.data.surrogate import Shards
from fedexp.data.tasks import Scenario, Several
from fedexp.data.types import Data, DataSource, Draws, Task
from fedexp.engine.base import ClientRuntime, Engine
from fedexp.engine.hardware import Resolved
from fedexp.engine.network import LAYOUT, FunctionalNetwork, require_room, seeded_torch, trainable
from fedexp.engine.schedule import left_out
from fedexp.metrics.forgetting_metric import BackwardTransfer, ForgettingMetric, Metrics, RoundDrop
from fedexp.metrics.history import History
from fedexp.metrics.personal import Personal
from fedexp.models import winograd
from fedexp.models.own import has_batch_norm
from fedexp.training import stopping
from fedexp.training.analysing import check_analyses
from fedexp.training.changes import changed, check_schedule
from fedexp.training.fastest import with_fastest_way
from fedexp.training.model_fit import check_parts, check_reads, making, read_like
from fedexp.training.personal import has_personal_models
from fedexp.training.public_data import PublicSet, one_of_each
from fedexp.training.simulation import Simulation, Stage

log = logging.getLogger("fedexp")


@dataclass(frozen=True)
class Prepared:
    simulation: Simulation
    hardware: Resolved


def prepare(built: Built, share: int | None = None, before: Mapping[str, Any] | None = None) -> Prepared:
    """Load and assemble everything; raise ConfigError where data and settings do not fit together.

    share: cores that the run may use; None: all of them. before: the way of computing that a resumed run began with,
    see `with_fastest_way`.
    """
    built = in_one_place(built)
    settings, model, algorithm = built.settings, built.model, built.algorithm
    metrics = metrics_of(built)
    check(built, metrics)
    hardware = built.hardware.resolve(model.vectorises, settings.cohort_size, share)
    if settings.profile:
        hardware = hardware.in_one_process()
    hardware.apply()
    data, divided = divide(built)
    orders = orders_of(built.scenario, settings.num_clients, len(divided), built.seeds.partition)
    rounds = built.scenario.rounds_per_task * len(divided)
    cohorts = built.cohorts.read(rounds, settings.num_clients, settings.cohort_size)
    require_room(lambda: algorithm.adapt(model.build(data.shape, data.num_classes), divided[0].federation))
    with making(model), seeded_torch(torch_seed(built.seeds.training, "initial model")):
        module = model.build(data.shape, data.num_classes)
        check_parts(module, algorithm)
        read_like(module, data)
        module = algorithm.adapt(module, divided[0].federation)
    algorithm = algorithm.fitted(module)
    module = module.to(device=hardware.device, dtype=hardware.dtype, memory_format=LAYOUT)  # type: ignore[call-overload]
    batch_size = min(built.local.batch_size, len(data.y_train))
    hardware = with_fastest_way(hardware, module, data, batch_size, before)
    if hardware.convolves == "winograd":
        winograd.convert(module)
    check_frozen(module, algorithm)
    initial = {name: parameter.detach().clone() for name, parameter in trainable(module).items()}
    heads = algorithm.heads(divided[0].federation.tasks)
    bench = ClientRuntime(
        net=FunctionalNetwork(module, hardware.precision),
        data=data.to(hardware.device),
        augmentation=augmentation_of(built.dataset, settings.augment),
        # Batches are padded to their size; more than there are examples is all of them.
        local=replace(built.local, batch_size=batch_size),
        dtype=hardware.dtype,
        heads=None if heads is None else torch.from_numpy(heads).to(hardware.device),
        views=evaluated(settings.test_views, settings.evaluate_on, built.validation.fraction > 0),
        seed=built.seeds.training,
    )
    check_reads(model, bench)
    mixes_examples = model.mixes_examples and has_batch_norm(module)
    engine = hardware.make_engine()
    changes = tuple((first, part.stage(bench, engine)) for first, part in divided[0].changes)
    simulation = Simulation(
        settings=settings,
        seeds=built.seeds,
        algorithm=algorithm,
        stages=tuple(part.stage(bench, engine) for part in divided),
        rounds_per_task=built.scenario.rounds_per_task,
        bench=bench,
        engine=engine,
        metrics=metrics,
        initial=algorithm.server_init(initial, divided[0].federation)["params"],
        initial_buffers=bench.net.buffers(),
        mixes_examples=mixes_examples,
        cohorts=cohorts,
        server_optimizer=built.server,
        stop=built.stop,
        task_orders=orders,
        analysis=built.analysis,
        changes=changes,
        left_out=without_batches(
            algorithm, [part.federation for _, part in [*enumerate(divided), *divided[0].changes]], bench.local
        )
        if mixes_examples
        else {},
    )
    check_analyses(simulation)
    return Prepared(simulation, hardware)


def metrics_of(built: Built) -> Metrics:
    """Return what every run measures, what the group `forgetting_metric` chooses, and the personalised test where it is
    asked for."""
    chosen: list[ForgettingMetric] = [BackwardTransfer(), RoundDrop(local=False), built.forgetting_metric]
    if built.settings.tests_personal:
        own = has_personal_models(built.algorithm)
        chosen.append(Personal(own=own, local=built.forgetting_metric.needs_local))
    return Metrics(tuple(chosen))


def in_one_place(built: Built) -> Built:
    """Return the configuration with one client, which holds all training data, where
    `algorithm.paradigm=centralized`."""
    if built.algorithm.paradigm != "centralized":
        return built
    if built.cohorts.path is not None:
        raise ConfigError(f"cohorts.path={built.cohorts.path}: algorithm.paradigm=centralized has one client")
    log.info("algorithm.paradigm=centralized: one client holds all training data; partition and participation are idle")
    settings = replace(built.settings, num_clients=1, participation=1.0)
    surrogate = replace(built.surrogate, shards=1, server_shards=1, total_shards=1)
    return replace(built, settings=settings, surrogate=surrogate, partition=IID())


def check(built: Built, metrics: Metrics) -> None:
    """Raise ConfigError for what does not fit together whatever the data are, before they are loaded or even
    downloaded."""
    interval, algorithm = built.settings.eval_interval, built.algorithm
    if metrics.needs_local and interval != 1:
        raise ConfigError(
            f"eval_interval={interval}: must be 1 with a forgetting_metric that evaluates local models, "
            "since it compares them with the global model of the round before"
        )
    if metrics.needs_neurons and not built.model.has_neurons:
        raise ConfigError(
            f"forgetting_metric=alignment: {type(built.model).__name__} has no fully connected hidden layers "
            "whose neurons could be compared; model=cnn and model=cnn_3fc have"
        )
    if built.local.optimizer not in algorithm.optimizers:
        raise ConfigError(
            f"local.optimizer={built.local.optimizer}: {type(algorithm).__name__} is defined for "
            f"{', '.join(algorithm.optimizers)}"
        )
    check_server(built)
    if built.local.warmup and built.local.warmup >= built.scenario.rounds_per_task:
        raise ConfigError(
            f"local.warmup={built.local.warmup}: must be less than the {built.scenario.rounds_per_task} rounds"
        )
    check_task(built)
    check_schedule(built)
    check_views(built)
    check_validation(built)
    check_stop(built)
    check_goal(built, metrics)
    if algorithm.needs.public and not built.public.fraction:
        raise ConfigError(
            f"{type(algorithm).__name__} needs a public set on the server: public.fraction=0.025 splits one off the "
            "training data (public.fraction=0 now)"
        )


def check_server(built: Built) -> None:
    """Raise ConfigError where a server optimizer is asked for that cannot take the step of the algorithm's server."""
    algorithm, name = built.algorithm, built.server.optimizer
    if name is None:
        return
    why = algorithm.own_step
    if algorithm.paradigm == "centralized":
        why = "algorithm.paradigm=centralized has one client and nothing to average"
    if why:
        raise ConfigError(f"server.optimizer={name}: not with {type(algorithm).__name__}: {why}")


def check_views(built: Built) -> None:
    """Raise ConfigError where the augmented view lacks a random transform of the training images."""
    dataset, settings = built.dataset, built.settings
    if AUGMENTED not in settings.test_views:
        return
    if dataset.kind != "images":
        why = f"dataset={dataset.name} has {dataset.kind}, which training does not transform"
    elif not settings.augment:
        why = "augment=false switches off the transform of the training images"
    elif not dataset.augmentation.active:
        why = f"dataset={dataset.name} has no augmentation (every part of dataset.augmentation is switched off)"
    else:
        return
    raise ConfigError(f"test_views=[{','.join(settings.test_views)}]: there is no augmented view, {why}")


def check_validation(built: Built) -> None:
    """Raise ConfigError where the validation set cannot be, or is asked for and not there."""
    fraction, on = built.validation.fraction, built.settings.evaluate_on
    if on not in (None, TEST) and not fraction:
        raise ConfigError(f"evaluate_on={on}: there is no validation set; validation.fraction=0.1 holds one out")
    if fraction and built.partition.numbers_all and not built.validation.per_client:
        raise ConfigError(
            f"validation.fraction={fraction}: with partition=file, whose numbers count all training examples, the "
            "validation set is drawn of the clients' examples: validation.per_client=true"
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
    if view not in evaluated(settings.test_views, settings.evaluate_on, built.validation.fraction > 0):
        asked = f"stop.patience={built.stop.patience}"
        if built.stop.metric is None:
            raise ConfigError(
                f"{asked}: needs a validation set (validation.fraction=0.1); stop.metric=test_accuracy uses the test "
                "set instead"
            )
        raise ConfigError(f"{asked} stop.metric={built.stop.metric}: the run is not evaluated on it (evaluate_on=both)")


def check_task(built: Built) -> None:
    """Raise ConfigError for what does not fit together of data set, model, scenario and algorithm."""
    algorithm, model, dataset, scenario = built.algorithm, built.model, built.dataset, built.scenario
    name = type(algorithm).__name__
    require_choice("algorithm.paradigm", algorithm.paradigm, ("federated", "centralized"))
    if scenario.name not in algorithm.scenarios:
        allowed = " or ".join(f"scenario={each}" for each in algorithm.scenarios)
        raise ConfigError(f"scenario={scenario.name}: {name} is defined for {allowed}")
    if dataset.kind != model.reads:
        raise ConfigError(
            f"dataset={dataset.name} has {dataset.kind}, and the model {type(model).__name__} reads {model.reads}; "
            f"{'model=textcnn reads text' if dataset.kind == 'text' else 'model=cnn reads images'}"
        )
    if dataset.kind not in algorithm.inputs:
        raise ConfigError(f"dataset={dataset.name} has {dataset.kind}: {name} is defined for {algorithm.inputs[0]}")
    if algorithm.needs.surrogate and not built.surrogate.given:
        raise ConfigError(
            f"{name} needs unlabelled examples: surrogate.dataset=<data set>, such as caltech256 or weibo, or "
            "surrogate.fraction=0.1, which withholds a part of the training data (neither is set now)"
        )
    if isinstance(scenario, Several) and scenario.mixes_tasks and algorithm.separate_tasks:
        asked = f"scenario.blur={scenario.blur}" if scenario.blur else f"scenario.order={scenario.order}"
        raise ConfigError(f"{asked}: {name} is defined where all clients train on one task at a time")
    if scenario.name != "none" and built.partition.numbers_all:
        raise ConfigError(f"scenario={scenario.name}: partition=file goes with scenario=none only")


def check_frozen(module: torch.nn.Module, algorithm: FedAvg) -> None:
    """Raise ConfigError where parameters with requires_grad=False leave nothing to train, or not what the algorithm
    is about; says how many there are."""
    every, trained = dict(module.named_parameters()), trainable(module)
    frozen = [name for name in every if name not in trained]
    if not trained:
        raise ConfigError("model: all its parameters are frozen (requires_grad=False); there is nothing to train")
    if wanted := [name for name in frozen if name in algorithm.must_train]:
        raise ConfigError(
            f"model: {', '.join(wanted)} frozen (requires_grad=False), but {type(algorithm).__name__} treats the "
            "classifier apart from the rest and has to train it; leave it trainable, or use another algorithm"
        )
    if frozen:
        total, left = (sum(p.numel() for p in each.values()) for each in (every, trained))
        log.info("frozen (requires_grad=False): %d of %d parameters, neither trained nor sent", total - left, total)


def without_batches(algorithm: FedAvg, tasks: Sequence[Federation], local: LocalTraining) -> dict[str, int]:
    """Count, for a model whose batch norm needs batches of two examples, how many clients have none in a task and never
    train in it, and how many examples each pass leaves out; empty where there are none.

    Raises ConfigError where nobody could train.
    """
    idle, lost = set(), 0
    for info in tasks:
        sizes = [len(algorithm.training_part(info, client)) for client in range(info.num_clients)]
        alone = [left_out(size, local.batch_size) for size in sizes]
        unable = {c for c, (size, single) in enumerate(zip(sizes, alone, strict=True)) if size == single}
        if len(unable) == info.num_clients:
            where = f" of task {info.task + 1}" if len(tasks) > 1 else ""
            raise ConfigError(
                f"local.batch_size={local.batch_size}: the model has batch normalisation, which needs batches of at "
                f"least two examples, and no client{where} has one; use a larger local.batch_size, fewer clients, or a "
                "model without batch normalisation (model=cnn)"
            )
        idle |= unable
        lost += sum(alone)
    if idle:
        log.warning(
            "batch normalisation needs batches of at least two examples: %d of %d clients have none and never train; "
            "each pass over the data leaves out %d examples", len(idle), tasks[0].num_clients, lost
        )  # fmt: skip
    elif lost:
        log.info("batch normalisation needs batches of two: each pass over the data leaves out %d example(s)", lost)
    return {"clients": len(idle), "examples": lost} if lost else {}


@dataclass(frozen=True)
class Division:
    """The division of the examples of one task: which client holds which."""

    partition: Partition
    federation: Federation
    server_unlabelled: np.ndarray  # numbers of the surrogate examples that the server holds
    changes: "tuple[tuple[int, Division], ...]" = ()  # (first round, the division from then on)

    def stage(self, bench: ClientRuntime, engine: Engine) -> Stage:
        public, unlabelled = (
            PublicSet(bench, torch.from_numpy(numbers), engine) if len(numbers) else None
            for numbers in (self.partition.public, self.server_unlabelled)
        )
        return Stage(self.partition, self.federation, public, unlabelled)


def divide(built: Built) -> tuple[Data, list[Division]]:
    """Load the data; decide who holds which training examples: the server first, then the clients."""
    seed = built.seeds.partition
    sequence = built.scenario.sequence(built.dataset, generator_for(seed, "tasks"))
    tasks, scenario = sequence.tasks, built.scenario
    if isinstance(scenario, Several) and scenario.blur:
        tasks = blurred(tasks, scenario.blur, generator_for(seed, "blur"))
    data, tasks, unlabelled = built.surrogate.attach(sequence.data, tasks, generator_for(seed, "surrogate split"))
    shards = Shards((), unlabelled)
    if len(unlabelled):
        shards = built.surrogate.deal(unlabelled, built.settings.num_clients, generator_for(seed, "surrogate"))
    parts, held_out = [], []
    for number, task in enumerate(tasks):
        # The first task's generators are those of a run without tasks.
        partition = partition_of(built, data, task, (number,) if number else ())
        labels = data.y_train.numpy()
        own = np.full_like(labels, -1)
        own[task.train] = labels[task.train]
        own[partition.validation] = -1
        held_out.append(partition.validation)
        federation = Federation(
            parts=partition.parts,
            counts=partition.counts,
            labels=labels,
            shared=one_of_each(own, data.num_classes, generator_for(seed, "shared", *((number,) if number else ()))),
            weighting=built.settings.weighting,
            task=number,
            tasks=tuple(each.classes for each in tasks),
            surrogate=shards.clients,
            unlabelled=unlabelled,
        )
        server = shards.server if len(unlabelled) else unlabelled

        def draw(partitioner: Partitioner, name: str, task: Task = task) -> Partition:
            return partition_of(replace(built, partition=partitioner), data, task, (), name)

        changes = changed(built.schedule, partition, federation, seed, draw)
        later = tuple((first, Division(new, facts, server)) for first, new, facts in changes)
        parts.append(Division(partition, federation, server, later))
    return with_validation(data, held_out), with_replay(built, with_orders(built, parts))


def orders_of(scenario: Scenario, clients: int, tasks: int, seed: int) -> np.ndarray | None:
    """Return which task each client meets at which stage, int [K, T]; None: all meet the tasks in one order."""
    if not isinstance(scenario, Several) or scenario.order == "shared":
        return None
    return task_orders(clients, tasks, generator_for(seed, "task orders"))


def with_orders(built: Built, parts: list[Division]) -> list[Division]:
    """Return the division of the examples at each stage, where clients meet the tasks in orders of their own."""
    orders = orders_of(built.scenario, built.settings.num_clients, len(parts), built.seeds.partition)
    if orders is None:
        return parts
    labels, classes = parts[0].federation.labels, parts[0].federation.num_classes
    known = np.max([part.federation.shared for part in parts], axis=0)  # of all tasks: some client is in each
    made = []
    for part, rows in zip(parts, reordered([part.partition.parts for part in parts], orders), strict=True):
        partition = part.partition.holding(rows, labels, classes)
        federation = replace(part.federation, parts=partition.parts, counts=partition.counts, shared=known)
        made.append(replace(part, partition=partition, federation=federation))
    return made


def with_replay(built: Built, parts: list[Division]) -> list[Division]:
    """Add to each client's training examples those of its replay buffer (`scenario.replay`). The partitions stay those
    of the new examples."""
    scenario = built.scenario
    if not isinstance(scenario, Several) or not scenario.replay:
        return parts
    labels, classes = parts[0].federation.labels, parts[0].federation.num_classes
    columns = []
    for client in range(parts[0].federation.num_clients):
        own = [part.partition.parts[client] for part in parts]
        rng = generator_for(built.seeds.partition, "replay", client)
        held = buffers(own, labels, scenario.replay, scenario.replay_policy, rng)
        columns.append([np.sort(np.concatenate(pair)) for pair in zip(own, held, strict=True)])
    made = []
    for part, rows in zip(parts, zip(*columns, strict=True), strict=True):
        counts = np.stack([np.bincount(labels[row], minlength=classes) for row in rows]).astype(np.int64)
        made.append(replace(part, federation=replace(part.federation, parts=rows, counts=counts)))
    return made


def with_validation(data: Data, held_out: Sequence[np.ndarray]) -> Data:
    """Return the data with the validation set of all tasks. held_out: numbers of the training examples of each."""
    numbers = np.concatenate(held_out)
    if not len(numbers):
        return data
    tasks = np.repeat(np.arange(len(held_out)), [len(each) for each in held_out])
    of_task = None if data.test_tasks is None else torch.from_numpy(tasks)
    return replace(data, validation=torch.from_numpy(numbers), validation_tasks=of_task)


def partition_of(built: Built, data: Data, task: Task, key: tuple[int, ...], name: str = "") -> Partition:
    """Return the partition of a task's examples. The partitioner sees them alone, and their classes numbered anew.
    name: of other random numbers than those of the first partition of a run."""
    seed, settings = built.seeds.partition, built.settings
    partitioner, rng, numbers = built.partition, generator_for(seed, f"partition{name}", *key), task.train
    kept = partitioner.eligible(settings.num_clients, rng, None if data.owners is None else data.owners[numbers])
    if kept is not None:
        numbers = numbers[kept]
    validation = built.validation
    central = np.zeros(0, np.int64)
    if validation.fraction and not validation.per_client:
        chosen = validation.choose(len(numbers), generator_for(seed, "validation", *key))
        central, numbers = numbers[chosen], np.delete(numbers, chosen)
    # With blurred boundaries there are examples of other tasks' classes too.
    classes = np.union1d(task.classes, np.unique(data.y_train.numpy()[numbers]))
    labels = np.searchsorted(classes, data.y_train.numpy()[numbers])
    public = built.public.split(labels, len(classes), generator_for(seed, "public", *key))
    if built.public.fraction and not len(public):
        raise ConfigError(f"public.fraction={built.public.fraction}: less than one of {len(labels)} training examples")
    owners = None if data.owners is None else data.owners[numbers]
    partition = make_partition(partitioner, labels, len(classes), settings.num_clients, rng, owners, public)
    partition = partition.among(numbers, data.y_train.numpy(), data.num_classes)
    if not validation.fraction:
        return partition
    held_out = of_clients(validation, partition, seed, key) if validation.per_client else central
    if not len(held_out):
        whose = "each client's examples" if validation.per_client else f"{len(numbers)} training examples"
        raise ConfigError(f"validation.fraction={validation.fraction}: less than one of {whose}")
    return partition.holding_out(held_out, data.y_train.numpy(), data.num_classes)


def of_clients(validation: Validation, partition: Partition, seed: int, key: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of the validation examples where each client gives some of its own."""
    chosen = [
        part[validation.choose(len(part), generator_for(seed, "validation", *key, client))]
        for client, part in enumerate(partition.parts)
    ]
    return np.concatenate(chosen)


def augmentation_of(dataset: DataSource, wanted: bool) -> Draws | None:
    """Return what is drawn for every training example; None where there is nothing to draw."""
    augmentation = dataset.augmentation
    return augmentation if augmentation.active and (wanted or dataset.kind == "text") else None
