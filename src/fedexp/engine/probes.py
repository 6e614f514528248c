"""Tests of local models in the middle of local training: on the test set, and on the client's own
examples."""

import time
from dataclasses import dataclass, field

import torch

from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime, Probe
from fedexp.engine.network import FunctionalNetwork

NONE = -1  # in place of a number of right answers that was not counted


def no_counts(bench: ClientRuntime, count: int, room: int) -> dict[str, torch.Tensor]:
    """Return room for the right answers of `count` clients: `test` int64 [count, room, C], `train`
    [count, room]."""
    shapes = {"test": (count, room, bench.data.num_classes), "train": (count, room)}
    return {name: torch.full(shape, NONE, device=bench.device) for name, shape in shapes.items()}


def right_on_own(bench: ClientRuntime, model: Params, numbers: torch.Tensor) -> int:
    """Return how many of these training examples, not augmented, a model with its buffers answers
    right; NONE where the model has a head for each task."""
    if bench.heads is not None or not len(numbers):
        return NONE
    labels = bench.data.y_train[numbers.to(bench.device)]
    return int((bench.logits(model, numbers).argmax(-1) == labels).sum())


@dataclass
class Watch:
    """One client in training: tests its model where the probe has a mark."""

    bench: ClientRuntime
    server: Tree  # what was sent: held again after each test
    probe: Probe
    seconds: float = 0.0  # spent on tests
    counts: dict[str, torch.Tensor] = field(init=False)  # leaves [1, room, ...]

    def __post_init__(self) -> None:
        self.counts = no_counts(self.bench, 1, self.probe.room)

    def after(self, step: int, live: FunctionalNetwork, params: Params) -> None:
        """Test the model after so many local steps, where there is a mark. live: the network in
        training."""
        if step not in self.probe.marks:
            return
        start, place = time.perf_counter(), self.probe.marks.index(step)
        model = {name: leaf.detach() for name, leaf in params.items()} | live.buffers()
        shown = self.bench.tested_on(self.bench.views[0])
        self.counts["test"][0, place] = shown.evaluate(model).class_correct
        self.counts["train"][0, place] = right_on_own(self.bench, model, self.probe.numbers)
        self.bench.net.hold(self.server["params"])
        self.seconds += time.perf_counter() - start
