"""The kinds of `fedexp-papers analyse`. Each kind measures models and yields tables and figures."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.storage import display_path, save_npz
from fedexp.figures import save_all
from fedexp.figures.pictures import Pictures
from fedexp.rundir import kept_models
from fedexp.rundir.kept_models import KeptModel
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.posthoc import features
from fedexp_papers.posthoc import loss_plane as planes
from fedexp_papers.posthoc.draw import (
    draw_circle,
    draw_embedding,
    draw_neurons,
    draw_noise,
    draw_plane,
    draw_spectrum,
)
from fedexp_papers.posthoc.hessian import largest_eigenvalues
from fedexp_papers.posthoc.neurons import preferred_classes
from fedexp_papers.posthoc.noise import measure_noise
from fedexp_papers.posthoc.subject import (
    Subject,
    last_local_round,
    load_subject,
    model_name,
    models_of_round,
    rounds_to_show,
)

FOLDER = "analysis"  # name of the folder in the run directory


@dataclass(frozen=True)
class Result:
    """The results of one analysis."""

    name: str  # base name of the result's files
    table: pd.DataFrame
    draw: Callable[[], Figure]
    arrays: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()  # sentences that state the results

    def write(self, run: RunDirectory, look: Pictures) -> list[str]:
        """Write <name>.csv, the figure and, if the result has arrays, <name>.npz.

        Return lines of text that state the results and list the files.
        """
        folder = run.directory / FOLDER
        paths = [folder / f"{self.name}.csv"]
        storage.write_atomically(paths[0], self.table.to_csv(index=False).encode())
        if self.arrays:
            paths.append(folder / f"{self.name}.npz")
            save_npz(paths[1], **self.arrays)
        paths += save_all(folder, [(self.name, self.draw)], look)
        return [*self.lines, *(f"  {display_path(path)}" for path in paths)]


def title_of(subject: Subject) -> str:
    return f"{subject.title}; {subject.examples}"


def file_name(kind: str, subject: Subject, *more: str) -> str:
    """Return the base name of the files for an analysis of one model."""
    client = subject.model.client
    suffix = [] if client is None else [f"client{client}"]
    return "_".join([kind, f"round{subject.model.round}", *suffix, *more])


def loss_plane(run: RunDirectory, options: Namespace) -> Iterator[Result]:
    """Measure loss and accuracy on a plane in parameter space.

    The table has the columns x, y, loss and accuracy.
    """
    if options.directions == "models":
        number = last_local_round(run) if options.round is None else options.round
        subject = load_subject(run, options, number)
        models = chosen_models(run, subject.model.round, options.models)
        plane = planes.model_plane(subject, models, options.points)
    else:
        subject = load_subject(run, options, options.round, options.client)
        plane = planes.plane_around(
            subject, options.directions, options.points, options.span, options.seed
        )
    surface = planes.measure_surface(subject, plane)
    x, y = np.meshgrid(plane.x, plane.y)
    columns = {"x": x, "y": y, "loss": surface.loss, "accuracy": surface.accuracy}
    table = pd.DataFrame({name: values.ravel() for name, values in columns.items()})
    lowest = "the loss is not finite anywhere on the plane"
    if np.isfinite(surface.loss).any():
        best = np.nanargmin(surface.loss)
        lowest = (
            f"lowest loss {surface.loss.flat[best]:.4f} at ({x.flat[best]:.3g},"
            f" {y.flat[best]:.3g}), accuracy {surface.accuracy.flat[best]:.4f}"
        )
    yield Result(
        file_name("loss_plane", subject, options.directions),
        table,
        partial(draw_plane, surface, title_of(subject)),
        columns | {"models": np.array(plane.names), "positions": plane.positions},
        (lowest,),
    )


def chosen_models(run: RunDirectory, number: int, names: str | None) -> list[KeptModel]:
    """Return the three models that `--models` names, or by default the global and two local models.

    A name is `global` (the global model after the round), `before` (the global model before the
    round) or the number of a client. Raises ConfigError unless the names select three different
    models that were saved.
    """
    folder = run.directory
    if names is None:
        clients = kept_models.kept_clients(folder, number)[:2]
        if len(clients) < 2:
            raise ConfigError(
                f"{folder}: a plane through models needs two local models from round {number}, but"
                f" only {len(clients)} were saved; {kept_models.LOCAL_HINT}"
            )
        names = ",".join(["global", *map(str, clients)])
    chosen = names.split(",")
    known = all(name in ("global", "before") or name.isdecimal() for name in chosen)
    if not known or len(chosen) != 3 or len(set(chosen)) != 3:
        raise ConfigError(
            f"--models {names}: must be three different names, each of them global, before or"
            " a client number"
        )
    models = []
    for name in chosen:
        if name.isdecimal():
            models.append(kept_models.load(folder, number, int(name)))
        else:
            models.append(kept_models.load(folder, number - (name == "before")))
    return models


def noise(run: RunDirectory, options: Namespace) -> Iterator[Result]:
    """Measure loss and accuracy under noise.

    The table has the columns draw, strength, loss and accuracy.
    """
    subject = load_subject(run, options, options.round, options.client)
    found = measure_noise(subject, options.strengths, options.draws, options.scale, options.seed)
    draws, strengths = np.indices(found.loss.shape)
    columns = {"draw": draws, "strength": found.strengths[strengths]}
    columns |= {"loss": found.loss, "accuracy": found.accuracy}
    table = pd.DataFrame({name: values.ravel() for name, values in columns.items()})
    means = zip(found.strengths, found.loss.mean(0), found.accuracy.mean(0), strict=True)
    lines = [
        f"noise {strength:g}: loss {loss:.4f}, accuracy {accuracy:.4f} (mean of"
        f" {options.draws} draws)"
        for strength, loss, accuracy in means
    ]
    yield Result(
        file_name("noise", subject, found.scale),
        table,
        partial(draw_noise, [("", found)], title_of(subject)),
        lines=tuple(lines),
    )


def hessian(run: RunDirectory, options: Namespace) -> Iterator[Result]:
    """Compute the largest eigenvalues of the Hessian.

    The table has the columns number, eigenvalue and residual.
    """
    subject = load_subject(run, options, options.round, options.client)
    found = largest_eigenvalues(subject, options.eigenvalues, options.seed, options.tolerance)
    numbers = np.arange(1, len(found.values) + 1)
    table = pd.DataFrame(
        {"number": numbers, "eigenvalue": found.values, "residual": found.residuals}
    )
    values = ", ".join(f"{value:.5g}" for value in found.values)
    yield Result(
        file_name("hessian", subject),
        table,
        partial(draw_spectrum, found, title_of(subject)),
        lines=(f"largest eigenvalues of the Hessian: {values} ({subject.examples})",),
    )


def hypersphere(run: RunDirectory, options: Namespace) -> Iterator[Result]:
    """Compute the angles of 2-dimensional features.

    The table has the columns model, class, angle and density. The arrays contain the examples'
    angles.
    """
    for number in rounds_to_show(run, options.round):
        subject = load_subject(run, options, number)
        models = models_of_round(run, number, options.clients)
        angles, labels = features.circle_angles(subject, models), subject.labels
        names = [model_name(model) for model in models]
        frames = []
        for name, found in zip(names, angles, strict=True):
            for label in np.unique(labels):
                density = features.circle_density(found[labels == label], features.GRID)
                columns = {"model": name, "class": label, "angle": features.GRID}
                frames.append(pd.DataFrame(columns | {"density": density}))
        classes = subject.runtime.data.classes
        yield Result(
            f"hypersphere_round{number}",
            pd.concat(frames),
            partial(draw_circle, names, angles, labels, classes, title_of(subject)),
            {"models": np.array(names), "angles": angles, "labels": labels},
        )


def tsne(run: RunDirectory, options: Namespace) -> Iterator[Result]:
    """Embed the features of a round's models by t-SNE, including models of the `--with` runs.

    The table has the columns round, model, example, class, x and y. Each round is embedded
    separately.
    """
    others = [RunDirectory(path) for path in options.others]
    rounds = rounds_to_show(run, options.round)
    subjects = comparable_subjects(features.label_runs([run, *others]), options, rounds[0])
    first = next(iter(subjects.values()))
    rows, frames = [], []
    for number in rounds:
        clouds = features.embed_models(subjects, number, options)
        rows.append((f"round {number}", clouds))
        for cloud in clouds:
            columns = {
                "round": number,
                "model": cloud.name,
                "example": np.arange(len(cloud.places)),
            }
            columns |= {"class": first.labels, "x": cloud.places[:, 0], "y": cloud.places[:, 1]}
            frames.append(pd.DataFrame(columns))
    title = f"{' and '.join(subjects) if others else first.title}; {first.examples}"
    name = "tsne_round" + "_".join(map(str, rounds))
    yield Result(
        "_with_".join([name, *(each.directory.resolve().name for each in others)]),
        pd.concat(frames),
        partial(draw_embedding, rows, first.labels, first.runtime.data.classes, title),
    )


def comparable_subjects(
    runs: Mapping[str, RunDirectory], options: Namespace, number: int
) -> dict[str, Subject]:
    """Return a dict that maps labels to the runs' subjects in one round.

    Raises ConfigError if the runs use different examples.
    """
    subjects = {label: load_subject(run, options, number) for label, run in runs.items()}
    features.require_same_examples(list(subjects.values()))
    return subjects


def neurons(run: RunDirectory, options: Namespace) -> Iterator[Result]:
    """Find the class that each neuron of the last hidden layer prefers, for each model of a round.

    The table has the columns model, neuron and class.
    """
    for number in rounds_to_show(run, options.round):
        subject = load_subject(run, options, number)
        found = preferred_classes(subject)
        size = found.classes.shape[1]
        frames = [
            pd.DataFrame({"model": name, "neuron": np.arange(size), "class": classes})
            for name, classes in zip(found.names, found.classes, strict=True)
        ]
        classes = len(subject.runtime.data.classes)
        line = f"{found.agreement:.4f} of the neurons keep their class in local training"
        yield Result(
            f"neurons_round{number}",
            pd.concat(frames),
            partial(draw_neurons, [f"round {number}"], [found], classes, title_of(subject)),
            lines=(f"round {number}: {line}",),
        )


KINDS: dict[str, Callable[[RunDirectory, Namespace], Iterator[Result]]] = {
    function.__name__: function
    for function in (loss_plane, noise, hessian, hypersphere, tsne, neurons)
}
