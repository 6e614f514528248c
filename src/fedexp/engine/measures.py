"""Measurements of a model other than the test accuracy at the end of a round.

These are the numbers of correct predictions during local training, on the test set and on the
client's training examples, and a model's features and mean activations.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedexp.core.tree import Params
from fedexp.engine.base import ClientRuntime, Probe
from fedexp.engine.network import FunctionalNetwork

NOT_TESTED = -1  # value of a count if the model was not tested


def empty_counts(runtime: ClientRuntime, count: int, max_marks: int) -> dict[str, Tensor]:
    """Return arrays for the correct predictions of probes, filled with NOT_TESTED.

    "test" is int64 [count, max_marks, C], and "train" is int64 [count, max_marks].

    count: the number of clients.
    max_marks: the largest number of tests of a client.
    """
    shapes = {"test": (count, max_marks, runtime.data.num_classes), "train": (count, max_marks)}
    return {
        name: torch.full(shape, NOT_TESTED, device=runtime.device) for name, shape in shapes.items()
    }


def count_correct(runtime: ClientRuntime, model: Params, numbers: Tensor) -> int:
    """Return the number of training examples that a model predicts correctly.

    The examples are not augmented. The result is NOT_TESTED if the model has a head for each task
    or if `numbers` is empty.

    model: the parameters and buffers of the model.
    numbers: the indices of the training examples.
    """
    if runtime.heads is not None or not len(numbers):
        return NOT_TESTED
    labels = runtime.data.y_train[numbers.to(runtime.device)]
    return int((runtime.logits(model, numbers).argmax(-1) == labels).sum())


@dataclass
class ClientProbe:
    """Tests the model of one client during training, at the steps that its probe marks."""

    runtime: ClientRuntime
    probe: Probe
    seconds: float = 0.0  # time for tests
    counts: dict[str, Tensor] = field(init=False)  # leaves [1, max_marks, ...]

    def __post_init__(self) -> None:
        self.counts = empty_counts(self.runtime, 1, self.probe.max_marks)

    def test_after(self, step: int, live: FunctionalNetwork, params: Params) -> None:
        """Test the model if the probe marks the current step.

        step: the number of local steps so far.
        live: the network in training.
        params: the parameters of the model.
        """
        if step not in self.probe.marks:
            return
        start, place = time.perf_counter(), self.probe.marks.index(step)
        model = {name: leaf.detach() for name, leaf in params.items()} | live.buffers()
        shown = self.runtime.tested_on(self.runtime.views[0])
        self.counts["test"][0, place] = shown.evaluate(model).class_correct
        self.counts["train"][0, place] = count_correct(self.runtime, model, self.probe.numbers)
        self.seconds += time.perf_counter() - start


@torch.no_grad()
def collect_features(runtime: ClientRuntime, params: Params) -> Tensor | None:
    """Return the features of the test examples, [n, D], or None if the model has no features."""
    numbers = torch.arange(len(runtime.data.y_test), device=runtime.device)
    batches = []
    for index in numbers.split(runtime.evaluation_batch):
        features: Tensor | None = runtime.net(params, runtime.load_test(index)[0]).features
        if features is None:
            return None
        batches.append(features.flatten(1))
    return torch.cat(batches)


@torch.no_grad()
def class_means(runtime: ClientRuntime, model: Mapping[str, Params]) -> list[np.ndarray]:
    """Return the mean activations of the neurons in each fully connected hidden layer.

    The activations are averaged over the test examples of each class. For a layer with d neurons,
    the array is float64 [C, d], with nan for classes without test examples.

    model: a dict with `params` and `buffers`.
    """
    labels, classes = runtime.data.y_test, runtime.data.num_classes
    runtime.net.set_buffers(model["buffers"])
    sums: list[Tensor] = []
    for index in torch.arange(len(labels), device=runtime.device).split(runtime.evaluation_batch):
        x, y = runtime.load_test(index)
        layers = [
            layer.to(torch.float64) for layer in runtime.net.hidden_activations(model["params"], x)
        ]
        sums = sums or [layer.new_zeros(classes, layer.shape[1]) for layer in layers]
        for total, layer in zip(sums, layers, strict=True):
            total.index_add_(0, y, layer)
    counts = torch.bincount(labels, minlength=classes).to(torch.float64)[:, None]
    return [(total / counts).cpu().numpy() for total in sums]
