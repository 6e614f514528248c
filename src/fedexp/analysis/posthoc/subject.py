"""The subject of an analysis: models that a run keeps, and the examples to evaluate them on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedexp.analysis.evaluation import hardware_of, own_data, runtime_of
from fedexp.analysis.networks import Parts, network_of
from fedexp.core.errors import ConfigError
from fedexp.core.rng import generator_for
from fedexp.core.tree import Params
from fedexp.data.partitioned import Partition, later_partitions
from fedexp.data.types import Data
from fedexp.engine.base import ClientRuntime
from fedexp.figures.load import describe
from fedexp.rundir import files, kept_models
from fedexp.rundir.kept_models import KeptModel
from fedexp.rundir.reader import RunDirectory

TEST, TRAIN = "test", "train"


@dataclass(frozen=True)
class Examples:
    """A choice of examples: `test`, `train` (of all clients, not augmented), or one client's
    training examples."""

    of: str = TEST  # "test", "train" or the number of a client
    most: int = 1000  # maximum number of examples; more are subsampled at random
    seed: int = 0  # of the random choice


@dataclass(frozen=True)
class Subject:
    """Models of a run in full precision. The chosen examples are the test set of `runtime`."""

    run: RunDirectory
    runtime: ClientRuntime
    first: KeptModel  # the requested model
    title: str  # the run in one line

    def use(self, kept: KeptModel) -> Params:
        """Return a kept model's parameters on the device, and set its running statistics.

        Raises ConfigError if the model does not fit the run's configuration.
        """
        for mine, theirs in ((self.first.params, kept.params), (self.first.buffers, kept.buffers)):
            if {k: v.shape for k, v in mine.items()} != {k: v.shape for k, v in theirs.items()}:
                raise ConfigError(
                    f"{self.run.directory}: the model after round {kept.round} has other parameters"
                )
        self.runtime.net.set_buffers(kept.buffers)
        device, dtype = self.runtime.device, self.runtime.dtype
        return self.runtime.net.own(
            {name: value.to(device, dtype) for name, value in kept.params.items()}
        )

    @torch.no_grad()
    def features(self, kept: KeptModel) -> np.ndarray:
        """Return the features [n, D] of the examples, which are the classifier's input.

        Raises ConfigError if the model does not provide its features.
        """
        params, found = self.use(kept), []
        for index in torch.arange(len(self.labels), device=self.runtime.device).split(
            self.runtime.evaluation_batch
        ):
            features = self.runtime.net(params, self.runtime.load_test(index)[0]).features
            if features is None:
                raise ConfigError(
                    f"{self.run.directory}: the features of its model are not known; model.head"
                    " names the last layer, whose input they are"
                )
            found.append(features.flatten(1).double().cpu())
        return torch.cat(found).numpy()

    @property
    def labels(self) -> np.ndarray:
        """Return the labels [n] of the examples."""
        return self.runtime.data.y_test.cpu().numpy()


@dataclass(frozen=True)
class Named:
    """A model, and its name in pictures."""

    name: str
    kept: KeptModel


def subject_of(
    run: RunDirectory,
    number: int | None = None,
    client: int | None = None,
    examples: Examples | None = None,
    device: str = "auto",
    data_dir: str | None = None,
) -> Subject:
    """Return a kept model of a run with the examples to analyse.

    number: the round; None for the last kept round. client: the client whose local model is
    analysed; None for the global model. data_dir: the directory that the run's data are in now.
    Raises ConfigError if the model or the data are missing.
    """
    module, kept, parts = network_of(run, number, data_dir, client)
    data = chosen(run, parts, examples or Examples())
    runtime = runtime_of(run, module, parts, data, hardware_of(run, device, exact=True))
    title = describe(run.config, run.summary)
    return Subject(run, runtime, kept, title)


def chosen(run: RunDirectory, parts: Parts, examples: Examples) -> Data:
    """Return the run's data with the chosen examples as the test set."""
    data = own_data(parts, whole=examples.of != TEST)
    if examples.of != TEST:
        numbers = torch.from_numpy(training_examples(run, examples.of))
        if len(numbers) and int(numbers.max()) >= len(data.y_train):
            raise ConfigError(
                f"{run.directory / files.PARTITION}: is not a partition of"
                f" dataset={parts.dataset.name}"
            )
        labels = data.y_train[numbers]
        data = replace(
            data,
            x_test=data.x_train[numbers],
            y_test=labels,
            test_tasks=None,
            x_train=data.x_train[:1],
            y_train=data.y_train[:1],
            owners=None,
        )
    if len(data.y_test) > examples.most:
        rng = generator_for(examples.seed, "examples of an analysis")
        index = torch.from_numpy(
            np.sort(rng.choice(len(data.y_test), examples.most, replace=False))
        )
        tasks = None if data.test_tasks is None else data.test_tasks[index]
        data = replace(data, x_test=data.x_test[index], y_test=data.y_test[index], test_tasks=tasks)
    return data


def training_examples(run: RunDirectory, of: str) -> np.ndarray:
    """Return the indices of training examples in ascending order.

    of: `train` for all clients, or the number of one client.
    """
    paths = [run.directory / files.PARTITION, *later_partitions(run.directory)]
    every = [Partition.load(path).parts for path in paths]
    if of == TRAIN:
        return np.unique(np.concatenate([part for parts in every for part in parts]))
    if not of.isdecimal() or int(of) >= len(every[0]):
        raise ConfigError(
            f"--data {of}: must be test, train or the number of a client from 0 to"
            f" {len(every[0]) - 1}"
        )
    return np.unique(np.concatenate([parts[int(of)] for parts in every]))


def models_of_round(run: RunDirectory, number: int, most: int) -> list[Named]:
    """Return the kept models of a round.

    They are the global model before it, local models of the first `most` clients, and the global
    model after it. Raises ConfigError if the global model after the round was not kept.
    """
    kept, rounds = run.directory, kept_models.kept_rounds(run.directory)
    clients = kept_models.kept_clients(kept, number)[:most]
    named = [
        Named(f"client {client}", kept_models.load(kept, number, client)) for client in clients
    ]
    if named and number - 1 in rounds:
        named.insert(0, Named(f"global, round {number - 1}", kept_models.load(kept, number - 1)))
    return [*named, Named(f"global, round {number}", kept_models.load(kept, number))]


def round_to_show(run: RunDirectory) -> int | None:
    """Return the last round with kept local models; None if there is none."""
    return max(kept_models.local_files(run.directory), default=None)


def rounds_to_show(run: RunDirectory, asked: Sequence[int]) -> list[int]:
    """Return the requested rounds.

    If none are requested, return the last round with kept local models or, without any, the last
    kept round.
    """
    if asked:
        return list(asked)
    number = round_to_show(run)
    return [kept_models.load(run.directory).round if number is None else number]
