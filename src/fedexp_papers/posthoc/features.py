"""Compare several models' features, on a circle (FedNTD Fig. 18) or by t-SNE (Fig. 19 to 21)."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedexp.core.errors import ConfigError
from fedexp.rundir.kept_models import KeptModel
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.posthoc.subject import Subject, model_name, models_of_round

BANDWIDTH = 0.1  # bandwidth of both kernels, in radians or as a length in the plane
PIECE = 1000  # number of images that are compared at a time
GRID = np.linspace(-np.pi, np.pi, 181)  # angles at which densities are computed


@dataclass(frozen=True)
class Cloud:
    """The features of one model, embedded in the plane."""

    run: str  # label of the run; empty if there is only one run
    model: str
    places: np.ndarray  # float64 [n, 2]

    @property
    def is_global(self) -> bool:
        return self.model.startswith("global")

    @property
    def name(self) -> str:
        """Return the model's name, preceded by the run's label if there are several runs."""
        return f"{self.run}: {self.model}" if self.run else self.model


def angles(features: np.ndarray) -> np.ndarray:
    """Return the angles arctan2(y, x) in (-pi, pi] of features [n, 2] (FedNTD Fig. 18).

    The angle of the feature (0, 0) is undefined and returned as nan.
    """
    found = np.arctan2(features[:, 1], features[:, 0])
    return np.where((features == 0).all(1), np.nan, found)


def circle_density(
    angles: np.ndarray, grid: np.ndarray, bandwidth: float = BANDWIDTH
) -> np.ndarray:
    """Return the kernel density [g] of angles [n], evaluated at the angles `grid` [g].

    The density is 1/n sum_i sum_m N(grid - a_i + 2 pi m; h^2). The Gaussian kernel is wrapped
    around the circle, so the density integrates to 1. Angles that are nan are ignored. If all
    angles are nan, the density is nan. The paper does not state the bandwidth h (FedNTD Fig. 18).
    """
    angles = angles[np.isfinite(angles)]
    if not len(angles):
        return np.full(len(grid), np.nan)
    turns = int(np.ceil(5 * bandwidth / (2 * np.pi))) + 1
    shifts = 2 * np.pi * np.arange(-turns, turns + 1)
    gaps = grid[:, None, None] - angles[:, None] + shifts  # [g, n, 2 turns + 1]
    kernel = np.exp(-(gaps**2) / (2 * bandwidth**2)).sum(2)
    return kernel.mean(1) / (np.sqrt(2 * np.pi) * bandwidth)


def plane_density(
    points: np.ndarray, x: np.ndarray, y: np.ndarray, bandwidth: float = BANDWIDTH
) -> np.ndarray:
    """Return the Gaussian kernel density [h, g] of points [n, 2] on the grid of x [g] and y [h].

    The density is 1/n sum_i exp(-|z - p_i|^2 / (2 h^2)) / (2 pi h^2), where h is the bandwidth
    (FedNTD Fig. 18).
    """
    across, up = (
        np.exp(-((axis[:, None] - points[:, i]) ** 2) / (2 * bandwidth**2))
        for i, axis in enumerate((x, y))
    )
    return up @ across.T / (len(points) * 2 * np.pi * bandwidth**2)


def circle_angles(subject: Subject, models: Sequence[KeptModel]) -> np.ndarray:
    """Return the angles [models, n] of the features.

    Raises ConfigError if the features are not 2-dimensional.
    """
    features = [subject.features(model) for model in models]
    size = features[0].shape[1]
    if size != 2:
        raise ConfigError(
            f"{subject.run.directory}: the model has {size}-dimensional features, but the unit"
            " circle needs 2 dimensions; train with model=cnn_circle or model.unit_features=2"
        )
    return np.stack([angles(each) for each in features])


def label_runs(runs: Sequence[RunDirectory]) -> dict[str, RunDirectory]:
    """Return a dict that maps labels to the runs.

    A run's label is its algorithm or, if several runs have the same algorithm, the run's directory.
    A single run has the label "". Raises ConfigError if a run is given twice.
    """
    if len(runs) == 1:
        return {"": runs[0]}
    folders = [run.directory.resolve() for run in runs]
    algorithms = [str(run.summary.get("algorithm", "")) for run in runs]
    for labels in (algorithms, [folder.name for folder in folders], list(map(str, folders))):
        if all(labels) and len(set(labels)) == len(runs):
            return dict(zip(labels, runs, strict=True))
    raise ConfigError(f"--with {runs[-1].directory}: the same run is given twice")


def require_same_examples(subjects: Sequence[Subject]) -> None:
    """Raise ConfigError unless all subjects use the same examples."""
    first, *others = (subject.runtime.data for subject in subjects)
    for data, subject in zip(others, subjects[1:], strict=True):
        pairs = map(torch.equal, data.x_test.split(PIECE), first.x_test.split(PIECE))
        same = torch.equal(data.y_test, first.y_test) and all(pairs)
        if not same:
            raise ConfigError(
                f"{subject.run.directory}: the features of this run and {subjects[0].run.directory}"
                " cannot be embedded together, because the runs use different examples"
            )


def embed_models(subjects: Mapping[str, Subject], number: int, options: Namespace) -> list[Cloud]:
    """Embed the features of all saved models of one round jointly in the plane by t-SNE.

    number: the round. options: the flags of `fedexp-papers analyse <run> tsne`. Raises ConfigError
    if the runs' features have different dimensions.
    """
    models = [
        (label, model)
        for label, subject in subjects.items()
        for model in models_of_round(subject.run, number, options.clients)
    ]
    features = [subjects[label].features(model) for label, model in models]
    sizes = sorted({each.shape[1] for each in features})
    if len(sizes) > 1:
        raise ConfigError(
            f"{' and '.join(subjects)}: the features of these runs have"
            f" {' and '.join(map(str, sizes))} dimensions, so they cannot be embedded together"
        )
    places = embed(features, options.seed, options.perplexity)
    return [
        Cloud(label, model_name(model), each)
        for (label, model), each in zip(models, places, strict=True)
    ]


def embed(features: Sequence[np.ndarray], seed: int, perplexity: float) -> list[np.ndarray]:
    """Return each model's points [n, 2] in a joint t-SNE of all models' features [n, D].

    FedNTD uses t-SNE (van der Maaten and Hinton, JMLR 2008) for Fig. 19 to 21. The implementation
    is scikit-learn's, initialised with the principal components. Raises ConfigError unless there
    are more points than the perplexity, or if a feature is not finite.
    """
    from sklearn.manifold import TSNE

    points = np.concatenate(features)
    if not np.isfinite(points).all():
        raise ConfigError("some features are not finite, because a model has diverged")
    if not 0 < perplexity < len(points):
        raise ConfigError(
            f"--perplexity {perplexity:g}: must be greater than 0 and less than"
            f" {len(points)}, the number of points"
        )
    start = "pca" if points.shape[1] >= 2 else "random"
    method = TSNE(2, perplexity=perplexity, init=start, random_state=seed)
    found = method.fit_transform(points.astype(np.float32)).astype(np.float64)
    return np.split(found, np.cumsum([len(each) for each in features])[:-1])
