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
from fedexp.engine.hardware import Hardware, Resolved
from fedexp.engine.network import LAYOUT, FunctionalNetwork, default_torch
from fedexp.metrics.accuracy import class_accuracy, overall_accuracy
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


@default_torch()
def evaluate_run(
    run: RunDirectory,
    dataset: DataSource | None = None,
    number: int | None = None,
    device: str = "auto",
    data_dir: str | None = None,
) -> Evaluation:
    """Evaluate a saved model of a run.

    dataset: the data set to evaluate on, or None for the run's own data set. number: the round of
    the model, or None for the last saved round. device: auto, cpu, cuda or cuda:<number>. data_dir:
    the directory that contains the run's data now, or None if the data have not moved. Raises
    ConfigError if the data set does not suit the model.
    """
    module, kept, parts = load_network(run, number, data_dir)
    data = load_own_data(parts) if dataset is None else convert_dataset(dataset, run, parts)
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


def load_own_data(parts: Parts, whole: bool = False) -> Data:
    """Return the run's own data, with all of its tasks and the complete test part.

    whole: whether to return the complete training part instead of a single training example.
    """
    found = parts.scenario.sequence(parts.dataset, generator_for(parts.seeds.partition, "tasks"))
    return found.data if whole else drop_training_part(found.data)


def drop_training_part(data: Data) -> Data:
    """Remove all training examples but one, whose shape is the shape of the inputs."""
    return replace(data, x_train=data.x_train[:1], y_train=data.y_train[:1], owners=None)


def convert_dataset(dataset: DataSource, run: RunDirectory, parts: Parts) -> Data:
    """Convert another data set to the format of the run's data.

    Labels refer to the run's classes. Images get the size, channels and normalisation of the run's
    images, and texts are encoded with the run's vocabulary. Raises ConfigError if one data set has
    images and the other has texts, or if the classes cannot be matched.
    """
    if dataset.kind != parts.dataset.kind:
        raise ConfigError(
            f"dataset={dataset.name} contains {dataset.kind}, but the run was trained on"
            f" {parts.dataset.kind} ({parts.dataset.name})"
        )
    if dataset.kind == "text":
        like = drop_training_part(parts.dataset.load())
    else:
        like = image_template(run, parts)
    data = load_like(dataset, like)
    classes = run.class_names
    labels, keeps = match_classes(data, classes, run.config.get("dataset", {}).get("name", ""))
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
    from fedexp.rundir import origin

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
    data: Data, classes: Sequence[str], own: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (label in the run, whether the run has the class) for each example, [M].

    Classes are matched by name if all class names of the data set occur in the run, or vice versa.
    Otherwise, they are matched by number if both have the same number of classes. Raises
    ConfigError if neither is possible, or if no example has one of the run's classes.
    """
    places = {name: number for number, name in enumerate(classes)}
    common = [name for name in data.classes if name in places]
    if common and len(common) == min(len(classes), data.num_classes):
        numbers = torch.tensor([places.get(name, -1) for name in data.classes])
    elif len(classes) == data.num_classes:
        log.warning(
            "dataset=%s: the class names (%s, ...) differ from the run's (%s, ...);"
            " class 0 is compared with class 0, and so on",
            *(data.name, data.classes[0], classes[0]),
        )
        numbers = torch.arange(data.num_classes)
    else:
        raise ConfigError(
            f"dataset={data.name} has {data.num_classes} classes ({data.classes[0]}, ...), but the"
            f" run has {len(classes)} ({classes[0]}, ... of {own}); every class name of one data"
            " set must occur in the other"
        )
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
