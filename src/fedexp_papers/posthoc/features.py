"""What the models of a round have learned: their features and the classes their neurons prefer.

FedNTD shows features on a circle (Fig. 18) and by t-SNE (Fig. 19 to 21), and preferred classes
(Fig. 17). Each kind of `fedexp-papers analyse` measures a table, from which its figure is drawn.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fedexp.analysis.draw_sweep import MARKERS, look, shortened
from fedexp.analysis.naming import displayed, number_methods
from fedexp.core.console import plural
from fedexp.core.errors import ConfigError
from fedexp.figures.style import (
    Thinned,
    colour_bar,
    colour_map,
    legend_beside,
    panels,
    stroke,
    width,
)
from fedexp.rundir import kept_models
from fedexp.rundir.kept_models import LOCAL_HINT
from fedexp.rundir.reader import RunDirectory, require_run
from fedexp_papers.analyses.neurons import preferences
from fedexp_papers.analyses.test_set import class_means
from fedexp_papers.draw import POINTS, class_styles, draw_class_legend, draw_maps
from fedexp_papers.posthoc.base import (
    Result,
    Runs,
    Subject,
    last_local_round,
    load_subject,
    model_name,
    models_of_round,
)

BANDWIDTH = 0.1  # bandwidth of both kernels, in radians or as a length in the plane
PIECE = 1000  # number of images that are compared at a time
GRID = np.linspace(-np.pi, np.pi, 181)  # angles at which densities are computed
RIM = 1.35  # half the side length of the plane that is drawn around the unit circle
MOST_CLIENTS = 20  # maximum number of clients whose neurons are shown


def load_subjects(runs: Runs, number: int | None, options: Namespace) -> dict[str, Subject]:
    """Return the subject of each run in a round, by label.

    number: the round, or None for the last round with saved local models of the first run or, if it
    has none, its last saved round.
    """
    (first, *_) = runs.values()
    if number is None:
        number = last_local_round(first) or kept_models.load(first.directory).round
    return {label: load_subject(run, options, number) for label, run in runs.items()}


# --- features on the unit circle


def hypersphere(runs: Runs, number: int | None, options: Namespace, title: str = "") -> Result:
    """Compute the angles of 2-dimensional features.

    The table has the columns model, class, angle and density. The arrays contain the examples'
    angles.
    """
    (subject,) = load_subjects(runs, number, options).values()
    models = models_of_round(subject.run, subject.model.round, options.clients)
    features = [subject.features(model) for model in models]
    size = features[0].shape[1]
    if size != 2:
        raise ConfigError(
            f"{subject.run.directory}: the model has {size}-dimensional features, but the unit"
            " circle needs 2 dimensions; train with model=cnn_circle or model.unit_features=2"
        )
    found = {model_name(m): angles(each) for m, each in zip(models, features, strict=True)}
    frames = []
    for name, each in found.items():
        for label in np.unique(subject.labels):
            density = circle_density(each[subject.labels == label], GRID)
            columns = {"model": name, "class": label, "angle": GRID, "density": density}
            frames.append(pd.DataFrame(columns))
    table = pd.concat(frames)
    arrays = {"models": np.array(list(found)), "angles": np.stack(list(found.values()))}
    return Result(
        subject.file_name("hypersphere"),
        table,
        partial(draw_circle, found, table, subject.classes, subject.title(title)),
        arrays | {"labels": subject.labels},
    )


def angles(features: np.ndarray) -> np.ndarray:
    """Return the angles arctan2(y, x) in (-pi, pi] of features [n, 2] (FedNTD Fig. 18).

    The angle of the feature (0, 0) is undefined and returned as nan.
    """
    found = np.arctan2(features[:, 1], features[:, 0])
    return np.where((features == 0).all(1), np.nan, found)


def circle_density(angles: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the kernel density [g] of angles [n], evaluated at the angles `grid` [g].

    The density is 1/n sum_i sum_m N(grid - a_i + 2 pi m; h^2) for the bandwidth h. The Gaussian
    kernel is wrapped around the circle, so the density integrates to 1; further turns than m = -1,
    0, 1 add nothing. Angles that are nan are ignored. If all angles are nan, the density is nan.
    The paper does not state the bandwidth (FedNTD Fig. 18).
    """
    known = angles[np.isfinite(angles)]
    if not len(known):
        return np.full(len(grid), np.nan)
    gaps = grid[:, None, None] - known[:, None] + 2 * np.pi * np.arange(-1, 2)  # [g, n, 3]
    kernel = np.exp(-(gaps**2) / (2 * BANDWIDTH**2)).sum(2)
    return kernel.mean(1) / (np.sqrt(2 * np.pi) * BANDWIDTH)


def plane_density(angles: np.ndarray, axis: np.ndarray) -> np.ndarray:
    """Return the Gaussian kernel density [g, g] of points on the circle, on a grid of axis [g].

    The density is 1/n sum_i exp(-|z - p_i|^2 / (2 h^2)) / (2 pi h^2), where h is the bandwidth
    (FedNTD Fig. 18). Rows are y, columns x. Angles that are nan are ignored.
    """
    known = angles[np.isfinite(angles)]
    across, up = (
        np.exp(-((axis[:, None] - points) ** 2) / (2 * BANDWIDTH**2))
        for points in (np.cos(known), np.sin(known))
    )
    return up @ across.T / (len(known) * 2 * np.pi * BANDWIDTH**2)


def draw_circle(
    angles: Mapping[str, np.ndarray], table: pd.DataFrame, classes: Sequence[str], title: str
) -> Figure:
    """Draw kernel densities of features on the unit circle, one column per model (FedNTD Fig. 18).

    The upper row shows the density in the plane, for all classes together. The lower row shows the
    density of the angle for each class, from the table. angles: by model, [n] each.
    """
    count = len(angles)
    size: dict[str, Any] = {"wide": 1.75 * count + 1.6, "height_ratios": (1.15, 1)}
    text = f"Features on the unit circle, kernel densities\n{title}"
    figure, rows = panels(text, 4.6, 2, count, sharex="row", sharey="row", **size)
    axis, styles = np.linspace(-RIM, RIM, 90), class_styles(classes)
    maps = {name: plane_density(each, axis) for name, each in angles.items()}
    every = np.stack(list(maps.values()))
    norm = Normalize(0, np.nanmax(every))
    for above, below, (name, density) in zip(*rows, maps.items(), strict=True):
        image = above.pcolormesh(axis, axis, density, norm=norm, cmap=colour_map())
        above.set(title=name, aspect="equal")
        for label, curve in table[table["model"] == name].groupby("class"):
            look = styles[int(str(label))]
            below.plot(curve["angle"], curve["density"], **look, linewidth=stroke(0.7))
        below.set_xticks([-np.pi, 0, np.pi], ["-π", "0", "π"])
    rows[1, 0].set_ylabel("density of the angle")
    rows[1, count // 2].set_xlabel("arctan2(y, x)")
    colour_bar(figure, list(rows[0]), image, "density in the plane", every)
    draw_class_legend(figure, list(rows[1]), classes)
    return figure


# --- t-SNE


def tsne(runs: Runs, number: int | None, options: Namespace, title: str = "") -> Result:
    """Embed the features of a round's models jointly in the plane by t-SNE.

    The models are those of all runs, including the `--with` runs. The table has the columns round,
    model, example, class, x and y. Raises ConfigError if the features cannot be compared.
    """
    others = [require_run(path) for path in options.others]
    if others:
        runs = label_runs([*runs.values(), *others])
    subjects = load_subjects(runs, number, options)
    first = next(iter(subjects.values()))
    number = first.model.round
    require_same_examples(list(subjects.values()))
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
    frames = []
    places = embed(features, options.seed, options.perplexity)
    for (label, model), points in zip(models, places, strict=True):
        name = model_name(model)
        columns = {"round": number, "run": label, "is_global": model.client is None}
        columns |= {"model": f"{label}: {name}" if label else name}
        columns |= {"example": np.arange(len(points)), "class": first.labels}
        frames.append(pd.DataFrame(columns | {"x": points[:, 0], "y": points[:, 1]}))
    table = pd.concat(frames)
    if others:
        title = " and ".join(displayed(list(subjects)))
    return Result(
        "_with_".join([f"tsne_round{number}", *(run.directory.resolve().name for run in others)]),
        table.drop(columns=["run", "is_global"]),
        partial(draw_embedding, table, first.classes, first.title(title)),
    )


def label_runs(runs: Sequence[RunDirectory]) -> dict[str, RunDirectory]:
    """Return a dict that maps labels to the runs.

    A run's label is its algorithm or, if several runs have the same algorithm, the run's directory.
    Raises ConfigError if a run is given twice.
    """
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


def draw_embedding(table: pd.DataFrame, classes: Sequence[str], title: str) -> Figure:
    """Draw a joint t-SNE of all models.

    The left panel is coloured by class. The right panel is coloured by model (FedNTD Fig. 19, 20)
    or, if there are several runs, by run (Fig. 21). table: see `tsne`, with the columns `run`
    (label) and `is_global`.
    """
    text = f"t-SNE of the features of all models together\n{shortened(title)}"
    figure, ((left, right),) = panels(text, 4.2, 1, 2, width() + 1.2)
    styles = class_styles(classes, points=True)
    for label, points in table.groupby("class"):
        left.plot(points["x"], points["y"], **styles[int(str(label))])
    several = table["run"].nunique() > 1
    for points, style in style_groups(table, several):
        right.plot(points["x"], points["y"], **POINTS | style)
    name = f"round {table['round'].iloc[0]}"
    left.set(title=f"{name}, by class", xticks=[], yticks=[])
    right.set(title=f"{name}, by {'run' if several else 'model'}", xticks=[], yticks=[])
    legend_beside(right, markerscale=2)
    draw_class_legend(figure, [left], classes)
    return figure


def style_groups(
    table: pd.DataFrame, several: bool
) -> Iterator[tuple[pd.DataFrame, dict[str, Any]]]:
    """Yield the points and the style of each model or, of several runs, of each run's models.

    Global models are black or, of every second run, grey, and drawn above the runs' local models.
    """
    numbers = number_methods(table["run"])
    groups = list(table.groupby(["is_global", "run"] if several else "model", sort=several))
    colours = colormaps["cividis"].resampled(len(groups))
    for index, (_, points) in enumerate(groups):
        colour: Any = colours(index)
        label = points["model"].iloc[0]
        run, is_global = points["run"].iloc[0], points["is_global"].iloc[0]
        if several:
            index, count = list(numbers).index(run), points["model"].nunique()
            colour = look(numbers[run])["color"]
            noun = "global model" if is_global else "local model"
            label = f"{displayed([run])[0]}: {plural(count, noun)}"
        if is_global:
            colour = "0.45" if several and index % 2 else "black"
        yield points, {"color": colour, "marker": MARKERS[index % len(MARKERS)], "label": label}


# --- neurons


def neurons(runs: Runs, number: int | None, options: Namespace, title: str = "") -> Result:
    """Find the class that each neuron of the last hidden layer prefers, for each model of a round.

    The table has the columns model, neuron and class.
    """
    subjects = load_subjects(runs, number, options)
    found = {label: preferred_classes(subject) for label, subject in subjects.items()}
    first = next(iter(subjects.values()))
    tables = [pd.Series(each.stack(), name="class").reset_index() for each in found.values()]
    lines = {label: agreement(each) for label, each in found.items()}
    shown = f"round {first.model.round}"
    maps = {f"{label or shown}: {lines[label]}": each for label, each in found.items()}
    return Result(
        first.file_name("neurons"),
        pd.concat(tables),
        partial(draw_neurons, maps, len(first.classes), first.title(title)),
        lines=[f"{label or shown}: {line}" for label, line in lines.items()],
    )


def preferred_classes(subject: Subject) -> pd.DataFrame:
    """Return the preferred classes in the models of the subject's round, [models, neurons].

    The models are the global model before the round, local models, and the global model after the
    round. Raises ConfigError if no local models or no global model from before were saved, or if
    the model has no fully connected hidden layer.
    """
    folder, number = subject.run.directory, subject.model.round
    models = models_of_round(subject.run, number, MOST_CLIENTS)
    if len(models) < 3 or models[0].client is not None:
        raise ConfigError(
            f"{folder}: the local models from round {number} or the global model from before this"
            f" round were not saved; {LOCAL_HINT}"
        )
    if not hasattr(subject.runtime.net.module, "hidden_activations"):
        raise ConfigError(
            f"{folder}: the model has no fully connected hidden layer; model=cnn and model=cnn_3fc"
            " have one"
        )
    rows = [preferences(class_means(subject.runtime, subject.load(each))[-1]) for each in models]
    names = pd.Index(map(model_name, models), name="model")
    return pd.DataFrame(rows, names).rename_axis(columns="neuron")


def agreement(classes: pd.DataFrame) -> str:
    """Return the share of neurons that prefer the same class as in the first model, as text.

    The share is averaged over the local models. This is the alignment in FedNTD Table 2.
    """
    share = classes.iloc[1:-1].eq(classes.iloc[0]).to_numpy().mean()
    return f"{share:.4f} of the neurons keep their class in local training"


def draw_neurons(maps: Mapping[str, pd.DataFrame], classes: int, title: str) -> Figure:
    """Draw the class that each neuron of the last hidden layer prefers (FedNTD Fig. 17).

    Each run has a panel, in which each model is a row. Neurons are sorted by their class in the
    first model. If a column has the same colour in all rows, all models agree on the class of that
    neuron. maps: the title of each panel -> see `preferred_classes`.
    """
    figure, grid = draw_maps(
        f"Class that each neuron of the last hidden layer prefers\n{title}",
        {
            name: each.to_numpy()[:, np.argsort(each.iloc[0], kind="stable")]
            for name, each in maps.items()
        },
        "preferred class",
        0.8 + 0.2 * max(map(len, maps.values())),
        columns=1,
        norm=Normalize(-0.5, classes - 0.5),
        colours=colour_map().resampled(classes),
        xlabel="neuron, sorted by its class in the first model",
    )
    for axes, each in zip(grid, maps.values(), strict=True):
        axes.set_yticks(range(len(each)), each.index, fontsize="x-small")
        axes.yaxis.set_major_locator(Thinned(len(each), 1.2))
    return figure
