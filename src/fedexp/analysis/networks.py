"""Rebuild a run's network from its configuration, the shape of its data and a saved model.

A run directory may come from someone else. Therefore, its configuration may only instantiate
classes that belong to fedexp or are in the user's own directory (`fedexp.config.values`). Its
values are used as written, without interpolation.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Federation
from fedexp.config.build import GROUPS
from fedexp.config.overrides import with_new_folder
from fedexp.config.settings import Seeds
from fedexp.config.values import make, make_target
from fedexp.core.errors import ConfigError
from fedexp.core.rng import generator_for, seeded, torch_seed
from fedexp.data.tasks import Scenario
from fedexp.data.types import DataSource, TextShape
from fedexp.engine.network import default_torch, require_memory, trainable
from fedexp.models import Model
from fedexp.models.own import pass_normalisation
from fedexp.rundir import kept_models, origin
from fedexp.rundir.kept_models import KeptModel
from fedexp.rundir.reader import RunDirectory


class Classifier(nn.Module):
    """A trained model as a PyTorch module that maps inputs, prepared as in training, to logits.

    The logits are [B, C]. Images [B, channels, height, width] must be normalised as `(pixel /
    max_value - mean) / std`, with `dataset.mean` and `dataset.std` from the run's configuration.
    Texts are int64 [B, length]. The attribute `network` is fedexp's module. It also returns
    features.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.network(x)
        return found if isinstance(found, torch.Tensor) else found.logits


@dataclass(frozen=True)
class Parts:
    """The parts of a run's configuration that determine its network."""

    model: Model
    algorithm: FedAvg
    scenario: Scenario
    dataset: DataSource
    tasks: tuple[tuple[int, ...], ...]  # the classes of each task
    num_classes: int
    seeds: Seeds


def read_parts(run: RunDirectory, data_dir: str | None = None) -> Parts:
    """Read the parts of a run's configuration that determine its network.

    data_dir: the directory that contains the data sets now, or None if they have not moved. Raises
    ConfigError, which names config.yaml, if that file is missing or invalid.
    """
    config, where = run.config, run.directory / "config.yaml"
    if not config:
        raise ConfigError(f"{where}: is missing")
    if data_dir is not None:
        config = with_new_folder(config, config.get("data_dir", data_dir), data_dir)
    try:
        made: dict[str, Any] = {
            name: make_target(config.get(name), name, GROUPS[name])
            for name in ("model", "algorithm", "scenario", "dataset")
        }
        seeds = make(Seeds, config.get("seeds", {}), "seeds.")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    classes = len(run.class_names)
    drawn = made["scenario"].task_classes(classes, generator_for(seeds.partition, "tasks"))
    tasks = tuple(map(tuple, drawn))
    return Parts(**made, tasks=tasks, num_classes=classes, seeds=seeds)


def input_shape(run: RunDirectory, parts: Parts, kept: KeptModel) -> Any:
    """Return the input shape that the run's model was built for (`Data.shape`).

    The shape is read from the run's files. If it does not determine the model's input, the data set
    is loaded.
    """
    noted = origin.read(run.directory)["shape"]
    kind, vectors = parts.dataset.kind, kept.params.get("embedding.weight")
    if kind == "images" and len(noted) == 3:
        height, width, channels = noted
        return channels, height, width
    if kind == "text" and len(noted) == 1 and vectors is not None and vectors.dim() == 2:
        return TextShape(noted[0], len(vectors), vectors)
    return parts.dataset.load().shape


@default_torch()
def load_network(
    run: RunDirectory,
    number: int | None = None,
    data_dir: str | None = None,
    client: int | None = None,
) -> tuple[nn.Module, KeptModel, Parts]:
    """Return (network, saved model, parts) of a run, with the network in eval mode on the CPU.

    number: the round of the weights, or None for the last saved round. data_dir: see `read_parts`.
    client: the client whose local model is returned, or None for the global model. Raises
    ConfigError if the run did not save the model, or if the model does not match the configuration.
    """
    kept = kept_models.load(run.directory, number, client)
    parts = read_parts(run, data_dir)
    shape = input_shape(run, parts, kept)
    federation = make_federation(parts)
    try:

        def build() -> nn.Module:
            return parts.model.build(shape, parts.num_classes)

        require_memory(lambda: parts.algorithm.adapt(build(), federation))
        with seeded(torch_seed(parts.seeds.training, "initial model")):
            module = build()
            pass_normalisation(module, parts.dataset)
            module = parts.algorithm.adapt(module, federation)
    except ConfigError as error:
        raise ConfigError(f"{run.directory}: {error}") from error
    load_weights(module, kept, run)
    return module.eval(), kept, parts


def make_federation(parts: Parts) -> Federation:
    """Return a federation without clients. An algorithm needs it to adapt its model.

    The federation only has the tasks and the number of classes.
    """
    return Federation(
        parts=(),
        counts=np.zeros((0, parts.num_classes), dtype=np.int64),
        labels=np.zeros(0, dtype=np.int64),
        shared=np.full(parts.num_classes, -1),
        weighting="examples",
        tasks=parts.tasks,
    )


@torch.no_grad()
def load_weights(module: nn.Module, kept: KeptModel, run: RunDirectory) -> None:
    """Copy the weights of a saved model into a network.

    Parameters that the algorithm trains in addition to the model are ignored. Frozen parameters
    keep their initial values. If the server changes them, the saved model contains their
    values. Raises ConfigError if the model does not match the network.
    """
    own = dict(module.named_parameters())
    trained = {name: value for name, value in kept.params.items() if name in own}
    module.to(dtype=next((value.dtype for value in trained.values()), torch.float32))
    found = trained | kept.buffers
    changed = {name: own[name] for name in trained}
    wanted = {**trainable(module), **changed, **dict(module.named_buffers())}
    wrong = {n for n, leaf in wanted.items() if n not in found or found[n].shape != leaf.shape}
    wrong |= {name for name in kept.buffers if name not in wanted}
    if wrong:
        raise ConfigError(
            f"{run.directory}: the model from round {kept.round} does not match config.yaml"
            f" (parameter {min(wrong)})"
        )
    for name, leaf in wanted.items():
        leaf.copy_(found[name])
