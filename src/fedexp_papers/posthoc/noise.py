"""Measure loss and accuracy under Gaussian noise on a model's parameters (FedNTD Fig. 14)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedexp_papers.posthoc.subject import Subject
from fedexp_papers.posthoc.vectors import gaussian, move, relative_to

log = logging.getLogger("fedexp")
UNITS = {
    "absolute": "standard deviation",
    "relative": "standard deviation / root mean square of the tensor",
}
LARGEST = {"absolute": 0.05, "relative": 0.5}  # the largest default strength


@dataclass(frozen=True)
class NoiseCurve:
    """Loss and accuracy against the strength of the noise, for each draw."""

    scale: str
    strengths: np.ndarray  # float64 [s]
    loss: np.ndarray  # float64 [draws, s]: mean cross-entropy
    accuracy: np.ndarray  # float64 [draws, s]


def measure_noise(
    subject: Subject,
    strengths: Sequence[float] | None,
    draws: int,
    scale: str,
    seed: int,
) -> NoiseCurve:
    """Return loss and accuracy at the parameters w + s e, for each strength s and draw e.

    w contains the parameters of the subject's model. Loss and accuracy are computed on the
    subject's examples. e contains one standard normal number for each trained parameter. With the
    scale `relative`, e is multiplied by the root mean square of the parameter's tensor. (FedNTD
    Fig. 14 perturbs the parameters "with Gaussian noise" without stating the scale.) strengths:
    None for 11 equally spaced strengths that start at 0.

    A draw uses the same direction e at all strengths, so the curve of a draw is continuous. The
    same seed gives the same draws. The running statistics of batch norm are not changed.
    """
    if strengths is None:
        strengths = np.linspace(0, LARGEST[scale], 11).tolist()
    origin = subject.load(subject.model)
    log.info(
        "evaluating %d noisy models on %d examples each",
        draws * len(strengths),
        len(subject.labels),
    )
    loss, accuracy = (np.empty((draws, len(strengths))) for _ in range(2))
    for i in range(draws):
        direction = gaussian(origin, seed, i)
        if scale == "relative":
            direction = relative_to(origin, direction)
        for j, strength in enumerate(strengths):
            point = move(origin, [(strength, direction)])
            loss[i, j], accuracy[i, j] = subject.measure(point)
    return NoiseCurve(scale, np.array(strengths), loss, accuracy)
