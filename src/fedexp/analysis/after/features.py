"""Features of several models on the same examples: on the unit circle (FedNTD Fig. 18) and by t-SNE
(Fig. 19 to 21)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedexp.analysis.after.subject import Named, Subject
from fedexp.core.errors import ConfigError

BANDWIDTH = 0.1  # of both kernels: radians, and the same length in the plane


@dataclass(frozen=True)
class Cloud:
    """The features of one model in the plane of an embedding."""

    run: str  # label of the run, empty where there is one run only
    model: str
    places: np.ndarray  # float64 [n, 2]

    @property
    def is_global(self) -> bool:
        return self.model.startswith("global")

    @property
    def name(self) -> str:
        """Return the name of the model among those of all runs."""
        return f"{self.run}: {self.model}" if self.run else self.model


def angles(features: np.ndarray) -> np.ndarray:
    """Return arctan2(y, x) in (-pi, pi] of features [n, 2]: their places on the unit circle (FedNTD
    Fig. 18); nan for the feature (0, 0), which has none."""
    features = np.asarray(features, dtype=np.float64)
    found = np.arctan2(features[:, 1], features[:, 0])
    return np.where((features == 0).all(1), np.nan, found)


def circle_density(
    places: np.ndarray, grid: np.ndarray, bandwidth: float = BANDWIDTH
) -> np.ndarray:
    """Return the kernel density at angles `grid` [g] of angles [n]: 1/n sum_i sum_m N(grid - a_i +
    2 pi m; h^2), [g].

    The Gaussian kernel wrapped around the circle, so that the integral over it is 1; nan is left
    out, and of no angle at all the density is nan. FedNTD Fig. 18, whose bandwidth is not printed.
    """
    places = places[np.isfinite(places)]
    if not len(places):
        return np.full(len(grid), np.nan)
    gap = np.asarray(grid, dtype=np.float64)[:, None] - places[None]
    turns = int(np.ceil(5 * bandwidth / (2 * np.pi))) + 1
    total = np.zeros_like(gap)
    for turn in range(-turns, turns + 1):
        total += np.exp(-((gap + 2 * np.pi * turn) ** 2) / (2 * bandwidth**2))
    return total.mean(1) / (np.sqrt(2 * np.pi) * bandwidth)


def plane_density(
    points: np.ndarray, x: np.ndarray, y: np.ndarray, bandwidth: float = BANDWIDTH
) -> np.ndarray:
    """Return the Gaussian kernel density in R^2 of points [n, 2] on the grid of x [g] and y [h],
    [h, g]: 1/n sum_i exp(-|z - p_i|^2 / (2 h^2)) / (2 pi h^2) (FedNTD Fig. 18)."""
    across, up = (
        np.exp(-((axis[:, None] - points[None, :, i]) ** 2) / (2 * bandwidth**2))
        for i, axis in enumerate((x, y))
    )
    return up @ across.T / (len(points) * 2 * np.pi * bandwidth**2)


def on_circle(subject: Subject, models: Sequence[Named]) -> np.ndarray:
    """Return the angles [models, n] of the features; raise ConfigError where these are not
    2-dimensional."""
    found = [subject.features(each.kept) for each in models]
    if (width := found[0].shape[1]) != 2:
        raise ConfigError(
            f"{subject.run.directory}: its model has features of {width} dimensions, and the unit"
            " circle needs 2: train with model=cnn_circle, or with model.unit_features=2"
        )
    return np.stack([angles(each) for each in found])


def embedded(
    features: Sequence[np.ndarray], seed: int, perplexity: float = 30.0
) -> list[np.ndarray]:
    """Return one t-SNE of all features [n, D] together: the places [n, 2] of each model's (FedNTD
    Fig. 19 to 21).

    van der Maaten and Hinton (JMLR 2008), as scikit-learn has it, begun from the principal
    components. Raises ConfigError where there are not more points than the perplexity, or where
    features are not finite.
    """
    from sklearn.manifold import TSNE

    points = np.concatenate(features)
    if not np.isfinite(points).all():
        raise ConfigError("features are not finite: a model has diverged")
    if not 0 < perplexity < len(points):
        raise ConfigError(
            f"--perplexity {perplexity:g}: must be greater than 0 and less than the {len(points)}"
            " points"
        )
    start = "pca" if points.shape[1] >= 2 else "random"
    found = TSNE(2, perplexity=perplexity, init=start, random_state=seed).fit_transform(
        points.astype(np.float32)
    )
    return np.split(found.astype(np.float64), np.cumsum([len(each) for each in features])[:-1])
