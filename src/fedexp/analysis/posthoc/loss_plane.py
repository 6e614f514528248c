"""Measure loss and accuracy on a plane in parameter space (FedNTD Fig. 14; Li et al., NeurIPS
2018)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedexp.analysis.posthoc.hessian import spectrum_of
from fedexp.analysis.posthoc.subject import Named, Subject
from fedexp.analysis.posthoc.vectors import moved, plane_through, random_direction, unflatten
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params

log = logging.getLogger("fedexp")
RANDOM, EIGENVECTORS, MODELS = "random", "eigenvectors", "models"
# half the side of the plane, in units of its directions
SPAN = {RANDOM: 1.0, EIGENVECTORS: 0.5}
MARGIN = 0.25  # around the models, as a fraction of the side of their bounding box


@dataclass(frozen=True)
class Plane:
    """The points origin + x u + y v, and the models' positions."""

    origin: Params
    u: Params
    v: Params
    x: np.ndarray  # [n]
    y: np.ndarray  # [m]
    names: tuple[str, ...]  # of the models
    positions: np.ndarray  # [models, 2]
    unit: str  # unit of both axes, in words


@dataclass(frozen=True)
class Surface:
    """Loss and accuracy on the grid of a plane."""

    plane: Plane
    loss: np.ndarray  # float64 [m, n]: mean cross-entropy at (x_j, y_i)
    accuracy: np.ndarray  # float64 [m, n]


def random_plane(subject: Subject, points: int, span: float, seed: int) -> Plane:
    """Return the plane of two filter-normalised random directions around the subject's model."""
    origin = subject.use(subject.first)
    u, v = (random_direction(origin, seed, number) for number in (0, 1))
    return around(subject, origin, u, v, points, span, "filter-normalised random directions")


def eigenvector_plane(subject: Subject, points: int, span: float, seed: int) -> Plane:
    """Return the plane of two unit eigenvectors around the subject's model.

    They belong to the two largest eigenvalues of the Hessian.
    """
    origin = subject.use(subject.first)
    vectors = torch.from_numpy(spectrum_of(subject, 2, seed).vectors).T
    like = next(iter(origin.values()))
    u, v = (unflatten(vector.to(like), origin) for vector in vectors.contiguous())
    return around(subject, origin, u, v, points, span, "eigenvectors of the Hessian, L2 distance")


def around(
    subject: Subject, origin: Params, u: Params, v: Params, points: int, span: float, unit: str
) -> Plane:
    """Return a square plane centred on the subject's model."""
    axis = np.linspace(-span, span, points)
    who = "global" if subject.first.client is None else f"client {subject.first.client}"
    return Plane(
        origin, u, v, axis, axis, (f"{who}, round {subject.first.round}",), np.zeros((1, 2)), unit
    )


def model_plane(subject: Subject, models: Sequence[Named], points: int) -> Plane:
    """Return the plane through three models.

    Running statistics are those of the subject's model at every point. Raises ConfigError if the
    models lie on a line.
    """
    params = [subject.use(each.kept) for each in models]
    subject.use(subject.first)
    try:
        u, v, positions = plane_through(params)
    except ValueError as error:
        raise ConfigError(f"--models {','.join(each.name for each in models)}: {error}") from error
    found = positions.numpy()
    low, high = found.min(0), found.max(0)
    pad = MARGIN * (high - low)
    x, y = (np.linspace(a, b, points) for a, b in zip(low - pad, high + pad, strict=True))
    return Plane(params[0], u, v, x, y, tuple(each.name for each in models), found, "L2 distance")


def surface_of(subject: Subject, plane: Plane) -> Surface:
    """Measure loss and accuracy on the subject's examples at every grid point."""
    log.info("%d tests of %d examples", len(plane.x) * len(plane.y), len(subject.labels))
    loss, accuracy = (np.empty((len(plane.y), len(plane.x))) for _ in range(2))
    for i, y in enumerate(plane.y.tolist()):
        for j, x in enumerate(plane.x.tolist()):
            found = subject.runtime.evaluate(moved(plane.origin, [(x, plane.u), (y, plane.v)]))
            loss[i, j] = float(found.loss)
            accuracy[i, j] = int(found.class_correct.sum()) / len(subject.labels)
    return Surface(plane, loss, accuracy)
