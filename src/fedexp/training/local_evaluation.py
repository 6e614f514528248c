"""Tests of local models on a part of the test set (`local_evaluation`)."""

import logging
from typing import Any

import numpy as np
import torch

from fedexp.core.errors import require
from fedexp.core.rng import generator_for
from fedexp.data.held_out import draw_balanced
from fedexp.engine.base import ClientRuntime
from fedexp.training.simulation import Simulation, class_counts

log = logging.getLogger("fedexp")


def choose(runtime: ClientRuntime, examples: int | None) -> dict[str, torch.Tensor]:
    """Return view -> indices of the test examples for local models, or {} for all examples.

    The indices are the same in every run on the same data.

    Raises ConfigError if `examples` is smaller than the number of classes.
    """
    if examples is None:
        return {}
    found = {}
    for view in runtime.views:
        data = runtime.tested_on(view).data
        labels, classes = data.y_test.cpu().numpy(), data.num_classes
        least = len(np.unique(labels))
        allowed = f"at least {least}, one of each class"
        require(examples >= least, "local_evaluation.examples", examples, allowed)
        rng = generator_for(0, "local evaluation")
        numbers = draw_balanced(labels, classes, examples, rng)
        found[view] = torch.from_numpy(numbers).to(runtime.device)
        part, whole = (np.bincount(each, minlength=classes) for each in (labels[numbers], labels))
        log.info(
            "local models are tested on %d of %d examples (%s); the standard error of their"
            " accuracy on a class is at most %.3f",
            len(numbers),
            len(labels),
            view,
            standard_error(part, whole),
        )
    return found


def standard_error(part: np.ndarray, whole: np.ndarray) -> float:
    """Return the largest standard error of an accuracy on one class.

    It is sqrt(p (1 - p) / n_c * (N_c - n_c) / (N_c - 1)) with p = 1/2, if n_c examples are drawn
    from N_c without replacement.

    part: n, int [C].
    whole: N, int [C].
    """
    n, total = part[part > 0], whole[part > 0]
    return float(np.sqrt(0.25 / n * (total - n) / np.maximum(total - 1, 1)).max())


def describe(simulation: Simulation) -> dict[str, Any]:
    """Return what summary.json says about reduced tests of local models, or {} if they are
    complete.

    The keys are `every` and, for each view, a dict with `examples` and `standard_error`.
    """
    chosen, runtime = simulation.local_evaluation, simulation.runtime
    found: dict[str, Any] = {} if chosen.every is None else {"every": chosen.every}
    for view, numbers in runtime.local_examples.items():
        tested = runtime.local_test(view, 0)[0], runtime.tested_on(view)
        part, whole = (class_counts(each.data) for each in tested)
        error = standard_error(part, whole)
        found[view] = {"examples": len(numbers), "standard_error": error}
    return found
