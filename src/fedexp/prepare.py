"""From a checked configuration to an experiment: loads the data, partitions it, makes model and engine."""

import logging
from dataclasses import dataclass

import torch

from fedexp.algorithms.contract import Federation
from fedexp.build import Built
from fedexp.data.augment import Normalise
from fedexp.data.partition import make_partition
from fedexp.data.public import PublicSet, one_of_each
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
    if metrics.needs_local and settings.eval_interval != 1:
        raise ConfigError(
            f"eval_interval={settings.eval_interval}: must be 1 with a forgetting_metric that evaluates local models, "
            "since it compares them with the global model of the round before"
        )
    hardware = groups["hardware"].resolve(model.mixes_examples, settings.cohort_size)
    if settings.profile:
        hardware = hardware.in_one_process()
    hardware.apply()
    data = groups["dataset"].load()
    augmentation = groups["dataset"].augmentation
    labels = data.y_train.numpy()
    public_numbers = built.public.split(labels, data.num_classes, stream(built.seeds.partition, "public"))
    if built.local.optimizer not in groups["algorithm"].optimizers:
        raise ConfigError(
            f"local.optimizer={built.local.optimizer}: {type(groups['algorithm']).__name__} is defined for "
            f"{' and '.join(groups['algorithm'].optimizers)}"
        )
    if groups["algorithm"].needs.public and not len(public_numbers):
        raise ConfigError(
            f"{type(groups['algorithm']).__name__} needs a public set on the server: public.fraction=0.025 splits one "
            "off the training data (public.fraction=0 now)"
        )
    partition = make_partition(
        groups["partition"], labels, data.num_classes, settings.num_clients,
        stream(built.seeds.partition, "partition"), data.owners, public_numbers,
    )  # fmt: skip
    federation = Federation(
        parts=partition.parts,
        counts=partition.counts,
        labels=labels,
        shared=one_of_each(labels, data.num_classes, stream(built.seeds.partition, "shared")),
        weighting=settings.weighting,
    )
    with seeded_torch(torch_seed(built.seeds.training, "initial model")):
        module = model.build(data.shape, data.num_classes)
        layout = weight_layout(module, hardware)
        module = groups["algorithm"].adapt(module, data.num_classes)
    module = module.to(device=hardware.device, dtype=hardware.dtype, memory_format=layout)  # type: ignore[call-overload]
    initial = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    bench = Workbench(
        net=FunctionalNetwork(module, hardware.precision),
        data=data.to(hardware.device),
        normalise=Normalise(data.mean, data.std, data.max_value),
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
        public=PublicSet(bench, torch.from_numpy(public_numbers), engine) if len(public_numbers) else None,
        mixes_examples=model.mixes_examples,
    )
    return Prepared(experiment, hardware)


def weight_layout(module: torch.nn.Module, hardware: Resolved) -> torch.memory_format:
    """Channels-last, in which oneDNN and cuDNN convolve fastest, but for models that use oneDNN's own layout."""
    if hardware.blocked and isinstance(module, CNNModule):
        module.blocked = True
        return torch.contiguous_format
    return torch.channels_last
