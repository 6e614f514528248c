"""From a checked configuration to an experiment: loads the data, partitions it, makes model and engine."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Federation
from fedexp.config.build import Built
from fedexp.core.errors import ConfigError, require_choice
from fedexp.core.rng import stream, torch_seed
from fedexp.core.settings import LocalTraining
from fedexp.core.views import AUGMENTED
from fedexp.data.partition import IID, Partition, make_partition
from fedexp.data.surrogate import Shards
from fedexp.data.types import Data, DataSource, Draws, Task
from fedexp.engine.base import ClientRuntime, Engine
from fedexp.engine.hardware import Resolved
from fedexp.engine.network import FunctionalNetwork, seeded_torch, trainable
from fedexp.engine.schedule import left_out
from fedexp.metrics.forgetting_metric import BackwardTransfer, Metrics, RoundDrop
from fedexp.models import winograd
from fedexp.rundir.client_states import free_memory, size_of
from fedexp.training.experiment import Experiment, Stage
from fedexp.training.fastest import with_fastest_way
from fedexp.training.public_data import PublicSet, one_of_each

LAYOUT = torch.channels_last  # of parameters and images: oneDNN and cuDNN convolve fastest in it

log = logging.getLogger("fedexp")


@dataclass(frozen=True)
class Prepared:
    experiment: Experiment
    hardware: Resolved


def prepare(built: Built, share: int | None = None, before: Mapping[str, Any] | None = None) -> Prepared:
    """Load and assemble everything; raise ConfigError where data and settings do not fit together.

    share: cores that the run may use; None: all of them. before: the way of computing that a resumed run began with,
    see `with_fastest_way`.
    """
    built = in_one_place(built)
    settings, model, algorithm = built.settings, built.model, built.algorithm
    metrics = Metrics((BackwardTransfer(), RoundDrop(local=False), built.forgetting_metric))
    check(built, metrics)
    hardware = built.hardware.resolve(model.vectorises, settings.cohort_size, share)
    if settings.profile:
        hardware = hardware.in_one_process()
    hardware.apply()
    data, divided = divide(built)
    rounds = built.scenario.rounds_per_task * len(divided)
    cohorts = built.cohorts.read(rounds, settings.num_clients, settings.cohort_size)
    require_room(lambda: algorithm.adapt(model.build(data.shape, data.num_classes), divided[0].federation))
    with seeded_torch(torch_seed(built.seeds.training, "initial model")):
        module = model.build(data.shape, data.num_classes)
        module = algorithm.adapt(module, divided[0].federation)
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
        views=tuple(settings.test_views),
        seed=built.seeds.training,
    )
    engine = hardware.make_engine()
    experiment = Experiment(
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
        mixes_examples=model.mixes_examples,
        cohorts=cohorts,
        left_out=without_batches(algorithm, [part.federation for part in divided], bench.local)
        if model.mixes_examples
        else {},
    )
    return Prepared(experiment, hardware)


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
            f"{' and '.join(algorithm.optimizers)}"
        )
    check_task(built)
    check_views(built)
    if algorithm.needs.public and not built.public.fraction:
        raise ConfigError(
            f"{type(algorithm).__name__} needs a public set on the server: public.fraction=0.025 splits one off the "
            "training data (public.fraction=0 now)"
        )


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

    def stage(self, bench: ClientRuntime, engine: Engine) -> Stage:
        public, unlabelled = (
            PublicSet(bench, torch.from_numpy(numbers), engine) if len(numbers) else None
            for numbers in (self.partition.public, self.server_unlabelled)
        )
        return Stage(self.partition, self.federation, public, unlabelled)


def divide(built: Built) -> tuple[Data, list[Division]]:
    """Load the data; decide who holds which training examples: the server first, then the clients."""
    seed = built.seeds.partition
    stream_ = built.scenario.stream(built.dataset, stream(seed, "tasks"))
    data, tasks, unlabelled = built.surrogate.attach(stream_.data, stream_.tasks, stream(seed, "surrogate split"))
    shards = Shards((), unlabelled)
    if len(unlabelled):
        shards = built.surrogate.deal(unlabelled, built.settings.num_clients, stream(seed, "surrogate"))
    parts = []
    for number, task in enumerate(tasks):
        # The first task's streams are those of a run without tasks.
        partition = partition_of(built, data, task, (number,) if number else ())
        labels = data.y_train.numpy()
        own = np.full_like(labels, -1)
        own[task.train] = labels[task.train]
        federation = Federation(
            parts=partition.parts,
            counts=partition.counts,
            labels=labels,
            shared=one_of_each(own, data.num_classes, stream(seed, "shared", *((number,) if number else ()))),
            weighting=built.settings.weighting,
            task=number,
            tasks=tuple(each.classes for each in tasks),
            surrogate=shards.clients,
            unlabelled=unlabelled,
        )
        parts.append(Division(partition, federation, shards.server if len(unlabelled) else unlabelled))
    return data, parts


def partition_of(built: Built, data: Data, task: Task, key: tuple[int, ...]) -> Partition:
    """Return the partition of a task's examples. The partitioner sees them alone, and their classes numbered anew."""
    seed, settings = built.seeds.partition, built.settings
    partitioner, rng, numbers = built.partition, stream(seed, "partition", *key), task.train
    kept = partitioner.eligible(settings.num_clients, rng, None if data.owners is None else data.owners[numbers])
    if kept is not None:
        numbers = numbers[kept]
    labels = np.searchsorted(task.classes, data.y_train.numpy()[numbers])
    public = built.public.split(labels, len(task.classes), stream(seed, "public", *key))
    if built.public.fraction and not len(public):
        raise ConfigError(f"public.fraction={built.public.fraction}: less than one of {len(labels)} training examples")
    owners = None if data.owners is None else data.owners[numbers]
    partition = make_partition(partitioner, labels, len(task.classes), settings.num_clients, rng, owners, public)
    return partition.among(numbers, data.y_train.numpy(), data.num_classes)


def augmentation_of(dataset: DataSource, wanted: bool) -> Draws | None:
    """Return what is drawn for every training example; None where there is nothing to draw."""
    augmentation = dataset.augmentation
    return augmentation if augmentation.active and (wanted or dataset.kind == "text") else None


def require_room(make: Callable[[], torch.nn.Module]) -> None:
    """Raise ConfigError for a model that does not fit into the free memory, before it is given any."""
    try:
        with torch.device("meta"):
            size = sum(value.numel() * value.element_size() for value in make().state_dict().values())
    except Exception as error:
        if "overflow" not in str(error):
            return  # it cannot be made without memory, or at all: then making it in earnest says why
        size = 2**63
    if size > (free := free_memory()):
        raise ConfigError(f"model: its parameters take {size_of(size)}, and {size_of(free)} of memory are free")
