"""From a checked configuration to an experiment: loads the data, partitions it, makes model and engine."""

import logging
from dataclasses import dataclass

import torch

from fedexp.algorithms.contract import Federation
from fedexp.build import Built
from fedexp.data.partition import Partition, make_partition
from fedexp.data.public import PublicSet, one_of_each
from fedexp.data.types import Data
from fedexp.engine.base import Workbench
from fedexp.engine.network import FunctionalNetwork, seeded_torch
from fedexp.errors import ConfigError
from fedexp.experiment import Experiment
from fedexp.hardware import Resolved
from fedexp.metrics.forgetting_metric import BackwardTransfer, Metrics, RoundDrop
from fedexp.models.cnn import CNNModule
from fedexp.rng import stream, torch_seed

log = logging.getLogger("fedexp")


@dataclass(frozen=True)
class Prepared:
    experiment: Experiment
    hardware: Resolved


def prepare(built: Built) -> Prepared:
    """Loads and assembles everything; raises ConfigError where data and settings do not fit together."""
    settings, groups = built.settings, built.groups
    model = groups["model"]
    metrics = Metrics((BackwardTransfer(), RoundDrop(local=False), groups["forgetting_metric"]))
    check(built, metrics)
    hardware = groups["hardware"].resolve(model.mixes_examples, settings.cohort_size)
    if settings.profile:
        hardware = hardware.in_one_process()
    hardware.apply()
    data = groups["dataset"].load()
    augmentation = groups["dataset"].augmentation
    partition, federation = divide(built, data)
    with seeded_torch(torch_seed(built.seeds.training, "initial model")):
        module = model.build(data.shape, data.num_classes)
        layout = weight_layout(module, hardware)
        module = groups["algorithm"].adapt(module, data.num_classes)
    module = module.to(device=hardware.device, dtype=hardware.dtype, memory_format=layout)  # type: ignore[call-overload]
    initial = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    bench = Workbench(
        net=FunctionalNetwork(module, hardware.precision),
        data=data.to(hardware.device),
        augmentation=augmentation if settings.augment and augmentation.active else None,
        local=built.local,
        dtype=hardware.dtype,
    )
    engine = hardware.make_engine()
    experiment = Experiment(
        settings=settings,
        seeds=built.seeds,
        algorithm=groups["algorithm"],
        partition=partition,
        federation=federation,
        bench=bench,
        engine=engine,
        metrics=metrics,
        initial=groups["algorithm"].server_init(initial, federation)["params"],
        public=PublicSet(bench, torch.from_numpy(partition.public), engine) if len(partition.public) else None,
        mixes_examples=model.mixes_examples,
    )
    return Prepared(experiment, hardware)


def check(built: Built, metrics: Metrics) -> None:
    """What does not fit together whatever the data are, before they are loaded or even downloaded."""
    interval, algorithm = built.settings.eval_interval, built.groups["algorithm"]
    if metrics.needs_local and interval != 1:
        raise ConfigError(
            f"eval_interval={interval}: must be 1 with a forgetting_metric that evaluates local models, "
            "since it compares them with the global model of the round before"
        )
    if built.local.optimizer not in algorithm.optimizers:
        raise ConfigError(
            f"local.optimizer={built.local.optimizer}: {type(algorithm).__name__} is defined for "
            f"{' and '.join(algorithm.optimizers)}"
        )
    if algorithm.needs.public and not built.public.fraction:
        raise ConfigError(
            f"{type(algorithm).__name__} needs a public set on the server: public.fraction=0.025 splits one off the "
            "training data (public.fraction=0 now)"
        )


def divide(built: Built, data: Data) -> tuple[Partition, Federation]:
    """Who holds which training examples: the server first, then the clients."""
    labels, seed = data.y_train.numpy(), built.seeds.partition
    public = built.public.split(labels, data.num_classes, stream(seed, "public"))
    if built.public.fraction and not len(public):
        raise ConfigError(f"public.fraction={built.public.fraction}: less than one of {len(labels)} training examples")
    partition = make_partition(
        built.groups["partition"], labels, data.num_classes, built.settings.num_clients,
        stream(seed, "partition"), data.owners, public,
    )  # fmt: skip
    shared = one_of_each(labels, data.num_classes, stream(seed, "shared"))
    return partition, Federation(partition.parts, partition.counts, labels, shared, built.settings.weighting)


def weight_layout(module: torch.nn.Module, hardware: Resolved) -> torch.memory_format:
    """Channels-last, in which oneDNN and cuDNN convolve fastest, but for models that use oneDNN's own layout."""
    if hardware.blocked and isinstance(module, CNNModule):
        module.blocked = True
        return torch.contiguous_format
    return torch.channels_last
