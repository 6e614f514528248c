"""Measure loss and accuracy on a plane of parameters (FedNTD Fig. 14; Li et al., NeurIPS 2018)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params
from fedexp.rundir.kept_models import KeptModel
from fedexp_papers.posthoc.hessian import largest_eigenvalues
from fedexp_papers.posthoc.subject import Subject, model_name
from fedexp_papers.posthoc.vectors import (
    filter_normalised,
    gaussian,
    move,
    plane_through,
    unflatten,
)

log = logging.getLogger("fedexp")
MARGIN = 0.25  # margin around the models, as a fraction of the side of their bounding box


@dataclass(frozen=True)
class Plane:
    """A plane of points origin + x u + y v, and the positions of the models on it."""

    origin: Params
    u: Params
    v: Params
    x: np.ndarray  # [n]
    y: np.ndarray  # [m]
    names: list[str]  # names of the models
    positions: np.ndarray  # [models, 2]
    unit: str  # unit of both axes, in words


@dataclass(frozen=True)
class Surface:
    """Loss and accuracy on the grid of a plane."""

    plane: Plane
    loss: np.ndarray  # float64 [m, n]: mean cross-entropy at (x_j, y_i)
    accuracy: np.ndarray  # float64 [m, n]


def plane_around(
    subject: Subject, directions: str, points: int, span: float | None, seed: int
) -> Plane:
    """Return a square plane centred on the subject's model.

    directions: `random` for two filter-normalised Gaussian directions; `eigenvectors` for unit
    eigenvectors of the two largest eigenvalues of the Hessian. span: half the side length of the
    plane, in units of the directions, or None for 1 (`random`) or 0.5 (`eigenvectors`).
    """
    origin = subject.load(subject.model)
    if directions == "random":
        u, v = (filter_normalised(gaussian(origin, seed, i), origin) for i in (0, 1))
        side, unit = span or 1.0, "filter-normalised random directions"
    else:
        vectors = torch.from_numpy(largest_eigenvalues(subject, 2, seed).vectors)
        u, v = (unflatten(vector, origin) for vector in vectors.T)
        side, unit = span or 0.5, "eigenvectors of the Hessian, L2 distance"
    axis = np.linspace(-side, side, points)
    return Plane(origin, u, v, axis, axis, [model_name(subject.model)], np.zeros((1, 2)), unit)


def model_plane(subject: Subject, models: Sequence[KeptModel], points: int) -> Plane:
    """Return the plane through three models.

    The running statistics of the subject's model are used at every point. Raises ConfigError if the
    models lie on a line.
    """
    params = [subject.load(model) for model in models]
    names = [model_name(model) for model in models]
    subject.load(subject.model)
    try:
        u, v, places = plane_through(params)
    except ValueError as error:
        raise ConfigError(f"--models: {error} ({'; '.join(names)})") from error
    positions = places.numpy()
    low, high = positions.min(0), positions.max(0)
    margin = MARGIN * (high - low)
    x, y = np.linspace(low - margin, high + margin, points).T
    return Plane(params[0], u, v, x, y, names, positions, "L2 distance")


def measure_surface(subject: Subject, plane: Plane) -> Surface:
    """Measure loss and accuracy on the subject's examples at each point of the grid."""
    log.info(
        "evaluating %d grid points on %d examples each",
        len(plane.x) * len(plane.y),
        len(subject.labels),
    )
    loss, accuracy = (np.empty((len(plane.y), len(plane.x))) for _ in range(2))
    for i, y in enumerate(plane.y.tolist()):
        for j, x in enumerate(plane.x.tolist()):
            point = move(plane.origin, [(x, plane.u), (y, plane.v)])
            loss[i, j], accuracy[i, j] = subject.measure(point)
    return Surface(plane, loss, accuracy)
