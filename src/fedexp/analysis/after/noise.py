"""Loss and accuracy of a model with Gaussian noise on its parameters (FedNTD Fig. 14)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedexp.analysis.after.subject import Subject
from fedexp.analysis.after.vectors import gaussian, moved, relative_to

log = logging.getLogger("fedexp")
ABSOLUTE, RELATIVE = "absolute", "relative"
MOST = {ABSOLUTE: 0.05, RELATIVE: 0.5}  # the largest strength, unless strengths are given
STEPS = 11  # strengths from 0 to that


@dataclass(frozen=True)
class NoiseCurve:
    """Loss and accuracy against the strength of the noise, draw by draw."""

    scale: str
    strengths: np.ndarray  # float64 [s]
    loss: np.ndarray  # float64 [draws, s]: mean cross-entropy
    accuracy: np.ndarray  # float64 [draws, s]
    examples: int

    @property
    def unit(self) -> str:
        """Return what a strength of 1 is, in words."""
        return "standard deviation" + (
            "" if self.scale == ABSOLUTE else " / root mean square of the tensor"
        )


def noise_curve(
    subject: Subject, strengths: Sequence[float], draws: int, scale: str, seed: int
) -> NoiseCurve:
    """Return loss and accuracy of a subject's model at w + s e for each strength s and draw e, on
    its examples.

    e has one standard normal number for each trained parameter (FedNTD Fig. 14 perturbs the
    parameters "with Gaussian noise" and states no scale); `relative` multiplies it by the root mean
    square of the parameter's tensor. A draw keeps its direction e at all strengths, so that its
    curve is continuous; equal seeds give equal draws. Running statistics of batch norm stay.
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
    """Return the strengths of a scale where none are given: equally spaced from 0."""
    return np.linspace(0, MOST[scale], STEPS).tolist()
