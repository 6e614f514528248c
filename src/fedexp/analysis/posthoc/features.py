"""Compare the features of several models on the same examples: on the unit circle (FedNTD Fig. 18)
or by t-SNE (Fig. 19 to 21)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedexp.analysis.posthoc.subject import Named, Subject
from fedexp.core.errors import ConfigError

BANDWIDTH = 0.1  # of both kernels, in radians or as a length in the plane


@dataclass(frozen=True)
class Cloud:
    """The features of one model, embedded in a plane."""

    run: str  # label of the run, empty if there is only one run
    model: str
    places: np.ndarray  # float64 [n, 2]

    @property
    def is_global(self) -> bool:
        return self.model.startswith("global")

    @property
    def name(self) -> str:
        """Return the model's name, including the run's label if there are several runs."""
        return f"{self.run}: {self.model}" if self.run else self.model


def angles(features: np.ndarray) -> np.ndarray:
    """Return the angles arctan2(y, x) in (-pi, pi] of features [n, 2] (FedNTD Fig. 18).

    The angle of the feature (0, 0) is undefined, and nan is returned for it.
    """
    features = np.asarray(features, dtype=np.float64)
    found = np.arctan2(features[:, 1], features[:, 0])
    return np.where((features == 0).all(1), np.nan, found)


def circle_density(
    places: np.ndarray, grid: np.ndarray, bandwidth: float = BANDWIDTH
) -> np.ndarray:
    """Return the kernel density of angles [n], evaluated at angles `grid` [g], as [g].

    It is 1/n sum_i sum_m N(grid - a_i + 2 pi m; h^2). The Gaussian kernel is wrapped around the
    circle, so the density integrates to 1. nan angles are ignored; without any finite angle, the
    density is nan. The paper does not state the bandwidth h (FedNTD Fig. 18).
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
    """Return the Gaussian kernel density of points [n, 2] on the grid of x [g] and y [h], as [h,
    g].

    It is 1/n sum_i exp(-|z - p_i|^2 / (2 h^2)) / (2 pi h^2), with the bandwidth h (FedNTD Fig. 18).
    """
    across, up = (
        np.exp(-((axis[:, None] - points[None, :, i]) ** 2) / (2 * bandwidth**2))
        for i, axis in enumerate((x, y))
    )
    return up @ across.T / (len(points) * 2 * np.pi * bandwidth**2)


def on_circle(subject: Subject, models: Sequence[Named]) -> np.ndarray:
    """Return the angles [models, n] of the features. Raises ConfigError if features are not
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
    """Compute one t-SNE of all models' features [n, D], and return each model's points [n, 2].

    It is used for FedNTD Fig. 19 to 21. The method is by van der Maaten and Hinton (JMLR 2008), in
    scikit-learn's implementation, initialised with the principal components. Raises ConfigError if
    there are not more points than the perplexity, or if a feature is not finite.
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
