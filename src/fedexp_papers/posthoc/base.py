"""What an analysis of saved models reads, the models of a run and examples, and what it gives."""

import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from fedexp.analysis.evaluation import (
    choose_hardware,
    drop_training_part,
    load_own_data,
    make_runtime,
)
from fedexp.analysis.networks import Parts, load_network
from fedexp.core import storage, tree
from fedexp.core.errors import ConfigError
from fedexp.core.rng import generator_for
from fedexp.core.tree import Params
from fedexp.data.types import Data
from fedexp.engine.base import ClientRuntime
from fedexp.figures import save_all
from fedexp.figures.load import run_title
from fedexp.figures.pictures import Pictures
from fedexp.rundir import files, kept_models
from fedexp.rundir.kept_models import KeptModel
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.analyses.test_set import collect_features, load_model, require_features

FOLDER = "analysis"  # name of the folder in the run directory
LINE = 90  # maximum number of characters in a line of a title
SOURCES = {"test": "test", "train": "training"}  # values of --data -> names in titles
Runs = Mapping[str, RunDirectory]  # by label; the label of a single run is empty


@dataclass(frozen=True)
class Result:
    """The results of one analysis."""

    name: str  # base name of the result's files
    table: pd.DataFrame
    draw: Callable[[], Figure]
    arrays: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()  # sentences that state the results

    def write(self, run: RunDirectory, look: Pictures) -> list[str]:
        """Write <name>.csv, the figure and, if the result has arrays, <name>.npz.

        Return lines of text that state the results and list the files.
        """
        folder = run.directory / FOLDER
        paths = [folder / f"{self.name}.csv"]
        storage.write_atomically(paths[0], self.table.to_csv(index=False).encode())
        if self.arrays:
            paths.append(folder / f"{self.name}.npz")
            storage.save_npz(paths[1], **self.arrays)
        paths += save_all(folder, [(self.name, self.draw)], look)
        return [*self.lines, *(f"  {storage.display_path(path)}" for path in paths)]


@dataclass(frozen=True)
class Subject:
    """A model of a run in full precision. The test set of `runtime` is the chosen examples."""

    run: RunDirectory
    runtime: ClientRuntime
    model: KeptModel  # the requested model
    examples: str = ""  # description of the examples, such as "1,000 test examples"

    @property
    def labels(self) -> np.ndarray:
        """Return the labels [n] of the examples."""
        return self.runtime.data.y_test.cpu().numpy()

    @property
    def classes(self) -> Sequence[str]:
        return self.runtime.data.classes

    def title(self, title: str) -> str:
        """Return the title of a figure, or the run's description if it is empty; the examples."""
        text = f"{title or run_title(self.run.config, self.run.summary)}; {self.examples}"
        return textwrap.fill(text, LINE)

    def file_name(self, kind: str, *more: str) -> str:
        """Return the base name of the files for an analysis of the model."""
        client = [] if self.model.client is None else [f"client{self.model.client}"]
        return "_".join([kind, f"round{self.model.round}", *client, *more])

    def load(self, model: KeptModel) -> Params:
        """Return a saved model's parameters on the device, and load its running statistics.

        Raises ConfigError if the model does not match the run's configuration.
        """
        own, given = (
            tree.map(lambda leaf: leaf.shape, [each.params, each.buffers])
            for each in (self.model, model)
        )
        if own != given:
            raise ConfigError(
                f"{self.run.directory}: the models from rounds {model.round} and"
                f" {self.model.round} have different parameters"
            )
        runtime = self.runtime
        params = {name: v.to(runtime.device, runtime.dtype) for name, v in model.params.items()}
        return load_model(runtime, {"params": params, "buffers": model.buffers})

    def measure(self, params: Params) -> tuple[float, float]:
        """Return the mean cross-entropy and the accuracy of `params` on the examples."""
        found = self.runtime.evaluate(params)
        return float(found.loss), int(found.class_correct.sum()) / len(self.labels)

    def features(self, model: KeptModel) -> np.ndarray:
        """Return the features [n, D] of the examples. Features are the inputs of the classifier.

        Raises ConfigError if the model does not provide features.
        """
        require_features(self.runtime.net.module, str(self.run.directory))
        return collect_features(self.runtime, self.load(model)).double().cpu().numpy()


def load_subject(
    run: RunDirectory, options: Namespace, number: int | None, client: int | str | None = None
) -> Subject:
    """Return a saved model of a run, with the examples to analyse.

    options: the flags of `fedexp-papers analyse`. `data` is `test`, `train` (the training examples
    of all clients, without augmentation) or the number of a client (its training examples). If
    there are more than `examples` examples, a random subset is drawn with `seed`. number: the
    round, or None for the last saved round. client: the client whose local model is analysed, None
    for the global model, or `first` for the first saved one, by default of the last round that has
    any. Raises ConfigError if the model or the data are missing.
    """
    if isinstance(client, str):
        number = last_local_round(run) if number is None else number
        clients = kept_models.kept_clients(run.directory, number or 0)
        if not clients:
            of_round = "" if number is None else f" from round {number}"
            raise ConfigError(
                f"{run.directory}: no local models{of_round} were saved; {kept_models.LOCAL_HINT}"
            )
        client = clients[0]
    module, model, parts = load_network(run, number, options.data_dir, client)
    data = select_examples(run, parts, options, model.round)
    hardware = choose_hardware(run, options.device, exact=True)
    runtime = make_runtime(run, module, parts, data, hardware)
    kind = SOURCES.get(options.data)
    examples = f"{kind} examples" if kind else f"training examples of client {options.data}"
    return Subject(run, runtime, model, f"{len(data.y_test):,} {examples}")


def select_examples(run: RunDirectory, parts: Parts, options: Namespace, number: int) -> Data:
    """Return the run's data with the selected examples as the test set. number: the round."""
    data = load_own_data(run, parts, whole=options.data != "test")
    x, y, tasks = data.x_test, data.y_test, data.test_tasks
    if options.data != "test":
        numbers = torch.from_numpy(training_examples(run, options.data, number))
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


def training_examples(run: RunDirectory, source: str, number: int) -> np.ndarray:
    """Return the indices of training examples in ascending order.

    source: `train` for the examples of all clients, or the number of a client. number: the round in
    which the clients have the examples, if the run divides them again (`schedule.partition`).
    """
    of_tasks = [each for each in run.partitions if not each.is_change]
    later = [each for each in run.partitions if each.is_change]
    changed = [each for each in later if each.info["from_round"] <= number]
    tasks = [each.parts for each in changed[-1:] or of_tasks]
    clients = range(len(tasks[0]))
    if source != "train":
        if not source.isdecimal() or int(source) not in clients:
            raise ConfigError(
                f"--data {source}: must be test, train or the number of a client from 0 to"
                f" {clients[-1]}"
            )
        clients = range(int(source), int(source) + 1)
    return np.unique(np.concatenate([parts[client] for parts in tasks for client in clients]))


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
