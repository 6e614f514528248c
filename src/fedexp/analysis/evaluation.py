"""Evaluate a saved model class by class, on the run's test set or on another test set."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from fedexp.algorithms.local_training import LocalTraining
from fedexp.analysis.networks import Parts, load_network
from fedexp.config.values import make
from fedexp.core.errors import ConfigError
from fedexp.core.rng import generator_for
from fedexp.data.surrogate import inputs_like, load_like
from fedexp.data.types import Data, DataSource, ImageData
from fedexp.engine.base import ClientRuntime
from fedexp.engine.hardware import Hardware
from fedexp.engine.network import LAYOUT, FunctionalNetwork, default_torch
from fedexp.engine.resolved import Resolved
from fedexp.metrics.accuracy import class_accuracy, overall_accuracy
from fedexp.rundir import files, origin
from fedexp.rundir.reader import RunDirectory

log = logging.getLogger("fedexp")


@dataclass(frozen=True)
class Evaluation:
    """The results of evaluating a model on a test set."""

    dataset: str  # name of the test set
    round: int  # round of the model
    examples: int
    accuracy: float  # fraction of all examples, in [0, 1]
    loss: float  # mean cross-entropy
    classes: pd.DataFrame
    """Columns: class (number), name, examples, correct, accuracy. The accuracy is nan for a class
    without test examples."""


@dataclass(frozen=True)
class TestData:
    """What a model is evaluated on."""

    __test__ = False  # no test class of pytest

    dataset: DataSource | None = None  # None: the run's own data set
    data_dir: str | None = None
    """The directory that contains the run's data now; None: the data have not moved."""
    by_position: bool = False
    """Whether class k of `dataset` is class k of the run, whatever their names."""


@default_torch()
def evaluate_run(
    run: RunDirectory, tested: TestData, number: int | None = None, device: str = "auto"
) -> Evaluation:
    """Evaluate a saved model of a run.

    number: the round of the model, or None for the last saved round. device: auto, cpu, cuda or
    cuda:<number>. Raises ConfigError if the data set does not suit the model, or if the run has no
    global model.
    """
    module, kept, parts = load_network(run, number, tested.data_dir)
    if parts.algorithm.tests_clients:
        raise ConfigError(
            f"{run.directory}: {type(parts.algorithm).__name__} has no global model; it saves the"
            " initial one"
        )
    if tested.dataset is None:
        data = load_own_data(run, parts)
    else:
        data = convert_dataset(tested.dataset, run, parts, tested.by_position)
    runtime = make_runtime(run, module, parts, data, choose_hardware(run, device))
    params = {name: value.to(runtime.device) for name, value in kept.params.items()}
    outcome = runtime.evaluate(params)
    correct = outcome.class_correct.cpu().numpy()
    total = torch.bincount(data.y_test, minlength=data.num_classes).numpy()
    table = pd.DataFrame({"class": np.arange(data.num_classes), "name": list(data.classes)})
    table["examples"], table["correct"] = total, correct
    table["accuracy"] = class_accuracy(correct, total)
    accuracy = overall_accuracy(correct, total)
    return Evaluation(data.name, kept.round, len(data.y_test), accuracy, float(outcome.loss), table)


def make_runtime(
    run: RunDirectory, module: nn.Module, parts: Parts, data: Data, hardware: Resolved
) -> ClientRuntime:
    """Return a runtime with a run's network on a device and the data to evaluate on."""
    module = module.to(device=hardware.device, memory_format=LAYOUT)  # type: ignore[call-overload]
    heads = parts.algorithm.heads(parts.tasks)
    if heads is not None and data.test_tasks is None:
        data = replace(data, test_tasks=infer_tasks(data, parts))
    return ClientRuntime(
        net=FunctionalNetwork(module, hardware.precision),
        data=data.to(hardware.device),
        augmentation=None,
        local=make(LocalTraining, run.config.get("local", {}), "local."),
        dtype=next(module.parameters()).dtype,
        heads=None if heads is None else torch.from_numpy(heads).to(hardware.device),
    )


def load_own_data(run: RunDirectory, parts: Parts, whole: bool = False) -> Data:
    """Return the run's own data, with all of its tasks and the complete test part.

    If clients held out the test set, it is made of the training examples that partition.npz names.
    Raises ConfigError if the data set does not have them, or if it has changed since the run.

    whole: whether to return the complete training part instead of a single training example.
    """
    found = parts.scenario.sequence(parts.dataset, generator_for(parts.seeds.partition, "tasks"))
    require_unchanged(run, found.data)
    data, held_out = found.data, torch.from_numpy(run.partitions[0].test)
    if len(held_out):
        if int(held_out.max()) >= len(data.y_train):
            raise ConfigError(
                f"{run.directory / files.PARTITION}: refers to more training examples than"
                f" dataset={parts.dataset.name} has"
            )
        data = data.with_test_from_training(held_out)
    return data if whole else drop_training_part(data)


def require_unchanged(run: RunDirectory, data: Data) -> None:
    """Raise ConfigError if the data set differs from that of the run's last rounds."""
    known = origin.read(run.directory)["parts"][-1]["data"]["arrays"]
    # a surrogate data set adds a checksum at the end
    if not f"{known} ".startswith(f"{data.checksum} "):
        raise ConfigError(
            f"{run.directory}: the data of {data.name} have changed since the run (checksum {known}"
            f" in the run, {data.checksum} now); restore the original data"
        )


def drop_training_part(data: Data) -> Data:
    """Remove all training examples but one, whose shape is the shape of the inputs."""
    x, y = data.x_train[:1], data.y_train[:1]
    return replace(data, x_train=x, y_train=y, owners=None, validation=None)


def convert_dataset(
    dataset: DataSource, run: RunDirectory, parts: Parts, by_position: bool = False
) -> Data:
    """Convert another data set to the format of the run's data.

    Labels refer to the run's classes. Images get the size, channels and normalisation of the run's
    images, and texts are encoded with the run's vocabulary. by_position: see `TestData`. Raises
    ConfigError if one data set has images and the other has texts, or if the classes cannot be
    matched.
    """
    if dataset.kind != parts.dataset.kind:
        raise ConfigError(
            f"dataset={dataset.name} contains {dataset.kind}, but the run was trained on"
            f" {parts.dataset.kind} ({parts.dataset.name})"
        )
    if dataset.kind == "text":
        like = drop_training_part(parts.dataset.load())
        data = load_like(dataset, like)
    else:
        like = image_template(run, parts)
        data = dataset.load_test()
    classes = run.class_names
    own = run.config.get("dataset", {}).get("name", "")
    labels, keeps = match_classes(data, classes, own, by_position)
    return replace(
        like,
        name=data.name,
        x_test=inputs_like(data, like, "test")[keeps],
        y_test=labels[keeps],
        classes=tuple(classes),
        test_tasks=None,
    )


def image_template(run: RunDirectory, parts: Parts) -> ImageData:
    """Return image data in the run's format.

    The data consist of one black image that has the size and normalisation of the run's images.
    """
    from fedexp.data.datasets import Dataset

    shape = origin.read(run.directory)["shape"]
    source = parts.dataset
    if not isinstance(source, Dataset) or len(shape) != 3:
        found = drop_training_part(source.load())
        assert isinstance(found, ImageData)
        return found
    black, label = torch.zeros((1, *shape), dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    form = source.normalise
    return ImageData(
        name=source.name,
        x_train=black,
        y_train=label,
        x_test=black,
        y_test=label,
        classes=tuple(run.class_names),
        mean=form.mean,
        std=form.std,
        max_value=form.max_value,
        crop=source.crop,
    )


def match_classes(
    data: Data, classes: Sequence[str], own: str, by_position: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (label in the run, whether the run has the class) for each example, [M].

    Classes are matched by name; all class names of the data set must occur in the run, or vice
    versa. `by_position` matches them by number instead. Raises ConfigError if they cannot be
    matched, or if no example has one of the run's classes.

    own: the name of the run's data set.
    """
    places = {name: number for number, name in enumerate(classes)}
    common = [name for name in data.classes if name in places]
    whole = len(common) == min(len(classes), data.num_classes) > 0
    if by_position and len(classes) == data.num_classes:
        numbers = torch.arange(data.num_classes)
    elif whole and not by_position:
        numbers = torch.tensor([places.get(name, -1) for name in data.classes])
    else:
        raise ConfigError(describe_mismatch(data, classes, own, by_position))
    labels = numbers[data.y_test]
    keeps = labels >= 0
    if not keeps.any():
        raise ConfigError(f"dataset={data.name}: no test example has one of the run's classes")
    if not keeps.all():
        log.info(
            "%d of %d test examples of %s are left out because the run does not have their classes",
            *(int((~keeps).sum()), len(keeps), data.name),
        )
    return labels, keeps


def describe_mismatch(data: Data, classes: Sequence[str], own: str, by_position: bool) -> str:
    """Return why the classes of a data set cannot be matched with those of a run."""
    sides = ((data.classes, classes), (classes, data.classes))
    alone = [[name for name in names if name not in others] for names, others in sides]
    counts = f"{data.num_classes} classes ({data.classes[0]}, ...)"
    run = f"the run has {len(classes)} ({classes[0]}, ... of {own})"
    if by_position:
        return f"--by-position: dataset={data.name} has {counts}, but {run}; must be as many"
    text = (
        f"dataset={data.name} has {counts}, and {run}; every class name of one data set must occur"
        f" in the other, but only this data set has {shorten(alone[0])}, and only the run has"
        f" {shorten(alone[1])}"
    )
    if data.num_classes == len(classes):
        text += "; --by-position compares class 0 with class 0, and so on"
    return text


def shorten(names: Sequence[str]) -> str:
    """Return the first names of a list as text."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def infer_tasks(data: Data, parts: Parts) -> torch.Tensor:
    """Return the task of each test example, derived from its class, int64 [M].

    Algorithms that use the task at test time need these numbers. Raises ConfigError if a class
    belongs to several tasks.
    """
    task_of = {c: task for task, classes in enumerate(parts.tasks) for c in classes}
    if len(task_of) < sum(map(len, parts.tasks)):
        name = type(parts.algorithm).__name__
        raise ConfigError(
            f"{name} needs the task of each test example, but for dataset={data.name} the"
            " tasks are unknown because some classes belong to several tasks"
        )
    return torch.tensor([task_of.get(label, 0) for label in data.y_test.tolist()])


def choose_hardware(run: RunDirectory, device: str, exact: bool = False) -> Resolved:
    """Return the hardware to evaluate on: a single process that uses the run's precision.

    exact: whether to use fp32 instead of a lower precision. A run in fp64 keeps its precision.
    """
    asked: Any = run.config.get("hardware")
    precision: Any = asked.get("precision", "fp32") if isinstance(asked, dict) else "fp32"
    if precision == "auto":  # use the precision that was chosen for the run
        precision = (run.summary.get("hardware") or {}).get("precision", "fp32")
    if exact:
        precision = "fp64" if precision == "fp64" else "fp32"
    elif precision == "tf32" and (device == "cpu" or not torch.cuda.is_available()):
        precision = "fp32"
    hardware = Hardware(
        device=device,
        engine="sequential",
        workers=None,
        precision=precision,
        threads=None,
        chunk=None,
        cuda_graphs=True,
    )
    return hardware.resolve(cohort_size=1)
