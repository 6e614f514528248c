"""Measure loss and accuracy of a model with Gaussian noise on its parameters (FedNTD Fig. 14)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedexp.analysis.posthoc.subject import Subject
from fedexp.analysis.posthoc.vectors import gaussian, moved, relative_to

log = logging.getLogger("fedexp")
ABSOLUTE, RELATIVE = "absolute", "relative"
MOST = {ABSOLUTE: 0.05, RELATIVE: 0.5}  # the largest default strength
STEPS = 11  # number of default strengths


@dataclass(frozen=True)
class NoiseCurve:
    """Loss and accuracy against the strength of the noise, for each draw."""

    scale: str
    strengths: np.ndarray  # float64 [s]
    loss: np.ndarray  # float64 [draws, s]: mean cross-entropy
    accuracy: np.ndarray  # float64 [draws, s]
    examples: int

    @property
    def unit(self) -> str:
        """Return the unit of a strength in words."""
        return "standard deviation" + (
            "" if self.scale == ABSOLUTE else " / root mean square of the tensor"
        )


def noise_curve(
    subject: Subject, strengths: Sequence[float], draws: int, scale: str, seed: int
) -> NoiseCurve:
    """Return loss and accuracy at parameters w + s e for each strength s and draw e.

    They are measured for the subject's model on the subject's examples. e has one standard normal
    number per trained parameter. (FedNTD Fig. 14 perturbs the parameters "with Gaussian noise" and
    states no scale.) The scale `relative` multiplies e by the root mean square of the parameter's
    tensor.

    A draw has the same direction e at all strengths, so its curve is continuous. Equal seeds give
    equal draws. Running statistics of batch norm are not changed.
    """
    origin = subject.use(subject.first)
    log.info("%d tests of %d examples", draws * len(strengths), len(subject.labels))
    loss, accuracy = (np.empty((draws, len(strengths))) for _ in range(2))
    for i in range(draws):
        direction = gaussian(origin, seed, i)
        if scale == RELATIVE:
            direction = relative_to(origin, direction)
        for j, strength in enumerate(strengths):
            found = subject.runtime.evaluate(moved(origin, [(strength, direction)]))
            loss[i, j] = float(found.loss)
            accuracy[i, j] = int(found.class_correct.sum()) / len(subject.labels)
    return NoiseCurve(
        scale, np.array(strengths, dtype=np.float64), loss, accuracy, len(subject.labels)
    )


def default_strengths(scale: str) -> list[float]:
    """Return a scale's default strengths, equally spaced from 0."""
    return np.linspace(0, MOST[scale], STEPS).tolist()
