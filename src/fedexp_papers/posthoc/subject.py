"""The subject of an analysis: the saved models of a run, and the examples to evaluate."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedexp.analysis.evaluation import (
    choose_hardware,
    drop_training_part,
    load_own_data,
    make_runtime,
)
from fedexp.analysis.networks import Parts, load_network
from fedexp.core.errors import ConfigError
from fedexp.core.rng import generator_for
from fedexp.core.tree import Params
from fedexp.data.partitioned import Partition, find_task_partitions
from fedexp.data.types import Data
from fedexp.engine.base import ClientRuntime
from fedexp.figures.load import run_title
from fedexp.rundir import files, kept_models
from fedexp.rundir.kept_models import KeptModel
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.analyses.cka import collect_features
from fedexp_papers.posthoc.flags import default_flags

SOURCES = {"test": "test", "train": "training"}  # values of --data -> names in titles


@dataclass(frozen=True)
class Subject:
    """A model of a run in full precision. The test set of `runtime` is the chosen examples."""

    run: RunDirectory
    runtime: ClientRuntime
    model: KeptModel  # the requested model
    title: str  # one-line description of the run
    examples: str = ""  # description of the examples, such as "1,000 test examples"

    @property
    def labels(self) -> np.ndarray:
        """Return the labels [n] of the examples."""
        return self.runtime.data.y_test.cpu().numpy()

    def load(self, model: KeptModel) -> Params:
        """Return a saved model's parameters on the device, and load its running statistics.

        Raises ConfigError if the model does not match the run's configuration.
        """
        for own, given in (
            (self.model.params, model.params),
            (self.model.buffers, model.buffers),
        ):
            shapes = {name: value.shape for name, value in own.items()}
            if {name: value.shape for name, value in given.items()} != shapes:
                raise ConfigError(
                    f"{self.run.directory}: the models from rounds {model.round} and"
                    f" {self.model.round} have different parameters"
                )
        runtime = self.runtime
        runtime.net.set_buffers(model.buffers)
        params = {name: v.to(runtime.device, runtime.dtype) for name, v in model.params.items()}
        return runtime.net.own(params)

    def measure(self, params: Params) -> tuple[float, float]:
        """Return the mean cross-entropy and the accuracy of `params` on the examples."""
        found = self.runtime.evaluate(params)
        return float(found.loss), int(found.class_correct.sum()) / len(self.labels)

    def features(self, model: KeptModel) -> np.ndarray:
        """Return the features [n, D] of the examples. Features are the inputs of the classifier.

        Raises ConfigError if the model does not provide features.
        """
        features = collect_features(self.runtime, self.load(model))
        if features is None:
            raise ConfigError(
                f"{self.run.directory}: the model does not provide features; set model.head to the"
                " name of its last layer"
            )
        return features.double().cpu().numpy()


def load_subject(
    run: RunDirectory, options: Namespace, number: int | None, client: int | None = None
) -> Subject:
    """Return a saved model of a run, with the examples to analyse.

    options: the flags of `fedexp-papers analyse`. `data` is `test`, `train` (the training examples
    of all clients, without augmentation) or the number of a client (its training examples). If
    there are more than `examples` examples, a random subset is drawn with `seed`. number: the
    round, or None for the last saved round. client: the client whose local model is analysed, or
    None for the global model. Raises ConfigError if the model or the data are missing.
    """
    module, model, parts = load_network(run, number, options.data_dir, client)
    data = select_examples(run, parts, options)
    hardware = choose_hardware(run, options.device, exact=True)
    runtime = make_runtime(run, module, parts, data, hardware)
    kind = SOURCES.get(options.data)
    examples = f"{kind} examples" if kind else f"training examples of client {options.data}"
    title = run_title(run.config, run.summary)
    return Subject(run, runtime, model, title, f"{len(data.y_test):,} {examples}")


def select_examples(run: RunDirectory, parts: Parts, options: Namespace) -> Data:
    """Return the run's data with the selected examples as the test set."""
    data = load_own_data(parts, whole=options.data != "test")
    x, y, tasks = data.x_test, data.y_test, data.test_tasks
    if options.data != "test":
        numbers = torch.from_numpy(training_examples(run, options.data))
        if len(numbers) and int(numbers.max()) >= len(data.y_train):
            raise ConfigError(
                f"{run.directory / files.PARTITION}: refers to more training examples than"
                f" dataset={parts.dataset.name} has"
            )
        x, y, tasks = data.x_train[numbers], data.y_train[numbers], None
    if len(y) > options.examples:
        rng = generator_for(options.seed, "examples of an analysis")
        chosen = torch.from_numpy(np.sort(rng.choice(len(y), options.examples, replace=False)))
        x, y, tasks = x[chosen], y[chosen], None if tasks is None else tasks[chosen]
    return replace(drop_training_part(data), x_test=x, y_test=y, test_tasks=tasks)


def training_examples(run: RunDirectory, source: str) -> np.ndarray:
    """Return the indices of training examples in ascending order.

    source: `train` for the examples of all clients, or the number of a client.
    """
    paths = [run.directory / files.PARTITION, *find_task_partitions(run.directory)]
    tasks = [Partition.load(path).parts for path in paths]
    if source == "train":
        return np.unique(np.concatenate([part for parts in tasks for part in parts]))
    if not source.isdecimal() or int(source) >= len(tasks[0]):
        raise ConfigError(
            f"--data {source}: must be test, train or the number of a client from 0 to"
            f" {len(tasks[0]) - 1}"
        )
    return np.unique(np.concatenate([parts[int(source)] for parts in tasks]))


def model_name(model: KeptModel) -> str:
    """Return a model's name in tables and figures."""
    return f"global, round {model.round}" if model.client is None else f"client {model.client}"


def models_of_round(run: RunDirectory, number: int, limit: int) -> list[KeptModel]:
    """Return the saved models of a round.

    These are the global model before the round, at most `limit` local models, and the global model
    after the round. Raises ConfigError if the global model after the round was not saved.
    """
    folder = run.directory
    clients = kept_models.kept_clients(folder, number)[:limit]
    models = [kept_models.load(folder, number, client) for client in clients]
    if models and number - 1 in kept_models.kept_rounds(folder):
        models.insert(0, kept_models.load(folder, number - 1))
    return [*models, kept_models.load(folder, number)]


def last_local_round(run: RunDirectory) -> int | None:
    """Return the last round with saved local models, or None if no local model was saved."""
    return max(kept_models.local_rounds(run.directory), default=None)


def require_local_models(run: RunDirectory) -> int:
    """Return the last round with saved local models. Raises ConfigError if no round has any."""
    number = last_local_round(run)
    if number is None:
        raise ConfigError(f"{run.directory}: no local models were saved; {kept_models.LOCAL_HINT}")
    return number


def with_defaults(run: RunDirectory, kind: str, options: Mapping[str, Any]) -> Namespace:
    """Return the given flags of `fedexp-papers analyse`, and the default values of all other flags.

    `client: first` selects the first local model from the last round with saved local models.
    """
    given = dict(options)
    if given.get("client") == "first":
        given["round"] = require_local_models(run)
        files = kept_models.model_files(run.directory)
        clients = [client for number, client in files if number == given["round"]]
        given["client"] = min(client for client in clients if client is not None)
    return Namespace(**default_flags(kind) | given)


def rounds_to_show(run: RunDirectory, requested: Sequence[int]) -> list[int]:
    """Return the requested rounds, or by default the last round with saved local models.

    If the run has no local models, return the last saved round.
    """
    if requested:
        return list(requested)
    number = last_local_round(run)
    return [kept_models.load(run.directory).round if number is None else number]
