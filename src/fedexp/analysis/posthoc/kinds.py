"""The kinds of `fedexp analyse`. Each one measures, writes a table and a picture, and returns lines
that state its results."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedexp.analysis.posthoc import features, joint
from fedexp.analysis.posthoc import loss_plane as planes
from fedexp.analysis.posthoc.hessian import spectrum_of
from fedexp.analysis.posthoc.neurons import preferred_classes
from fedexp.analysis.posthoc.noise import NoiseCurve, default_strengths, noise_curve
from fedexp.analysis.posthoc.subject import (
    Examples,
    Named,
    Subject,
    models_of_round,
    round_to_show,
    rounds_to_show,
    subject_of,
)
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.npz import save_npz
from fedexp.core.storage import display_path
from fedexp.figures import save_all
from fedexp.figures.pictures import Pictures
from fedexp.rundir import kept_models
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = "analysis"  # in the run directory


@dataclass(frozen=True)
class Request:
    """The parsed command line."""

    options: argparse.Namespace
    look: Pictures

    def subject(self, run: RunDirectory, number: int | None, client: int | None = None) -> Subject:
        """Return the model and the examples that the options select."""
        options = self.options
        examples = Examples(options.data, options.examples, options.seed)
        return subject_of(run, number, client, examples, options.device, options.data_dir)

    def write(
        self,
        run: RunDirectory,
        name: str,
        table: pd.DataFrame,
        draw: "Callable[[], Figure]",
        arrays: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Write <name>.csv, the pictures and, if there are arrays, <name>.npz.

        Return lines that name the files.
        """
        folder = run.directory / FOLDER
        paths = [folder / f"{name}.csv"]
        storage.write_atomically(paths[0], table.to_csv(index=False).encode())
        if arrays:
            paths.append(folder / f"{name}.npz")
            save_npz(paths[1], **arrays)
        paths += save_all(folder, [(name, draw)], self.look)
        return [f"  {display_path(path)}" for path in paths]


def name_of(kind: str, subject: Subject, *more: str) -> str:
    """Return the base name of the files of an analysis of one model."""
    client = subject.first.client
    whose = [] if client is None else [f"client{client}"]
    return "_".join([kind, f"round{subject.first.round}", *whose, *more])


def loss_plane(run: RunDirectory, request: Request) -> list[str]:
    """Measure loss and accuracy on a plane of parameters.

    Writes `loss_plane_round<n>_<directions>.csv` with the columns x, y, loss, accuracy.
    """
    from fedexp.analysis.posthoc import draw

    options = request.options
    if options.directions == planes.MODELS:
        number = options.round if options.round is not None else round_to_show(run)
        subject = request.subject(run, number)
        plane = planes.model_plane(
            subject, chosen_models(run, subject, options.models), options.points
        )
    else:
        subject = request.subject(run, options.round, options.client)
        make = (
            planes.random_plane if options.directions == planes.RANDOM else planes.eigenvector_plane
        )
        plane = make(
            subject, options.points, options.span or planes.SPAN[options.directions], options.seed
        )
    surface = planes.surface_of(subject, plane)
    y, x = np.meshgrid(plane.y, plane.x, indexing="ij")
    columns = {"x": x, "y": y, "loss": surface.loss, "accuracy": surface.accuracy}
    table = pd.DataFrame({name: values.ravel() for name, values in columns.items()})
    arrays = columns | {"models": np.array(plane.names), "positions": plane.positions}
    drawn = partial(draw.loss_plane, surface, f"{subject.title}; {said(request, subject)}")
    name = name_of("loss_plane", subject, options.directions)
    return [lowest(surface), *request.write(run, name, table, drawn, arrays)]


def whose(subject: Subject) -> str:
    """Describe the subject's model in words."""
    of = "global model" if subject.first.client is None else f"client {subject.first.client}"
    return f"{of}, round {subject.first.round}"


def lowest(surface: planes.Surface) -> str:
    """Describe in words where the loss is lowest."""
    if not np.isfinite(surface.loss).any():
        return "the loss is not finite anywhere on the plane"
    i, j = np.unravel_index(np.nanargmin(surface.loss), surface.loss.shape)
    where = f"({surface.plane.x[j]:.3g}, {surface.plane.y[i]:.3g})"
    return f"lowest loss {surface.loss[i, j]:.4f} at {where}, accuracy {surface.accuracy[i, j]:.4f}"


def said(request: Request, subject: Subject) -> str:
    """Describe the analysed examples in words."""
    of = request.options.data
    whose = {"test": "test", "train": "training"}.get(of)
    kind = f"{whose} examples" if whose else f"training examples of client {of}"
    return f"{len(subject.labels):,} {kind}"


def chosen_models(run: RunDirectory, subject: Subject, names: str | None) -> list[Named]:
    """Return the three models in `--models`. Raises ConfigError unless they are three different,
    kept models."""
    number = subject.first.round
    clients = kept_models.kept_clients(run.directory, number)
    asked = (names or ",".join(["global", *map(str, clients[:2])])).split(",")
    if names is None and len(clients) < 2:
        raise ConfigError(
            f"{run.directory}: a plane through models needs two local models of round {number}, and"
            f" {len(clients)} are kept; {kept_models.LOCAL_HINT}"
        )
    if len(set(asked)) != 3:
        raise ConfigError(
            f"--models {names}: must be three different ones of global, before and numbers of"
            " clients"
        )
    return [named_model(run, number, name) for name in asked]


def named_model(run: RunDirectory, number: int, name: str) -> Named:
    """Return a model of a round.

    name: `global` for the global model after the round, `before` for the global model before it, or
    the number of a client.
    """
    if name in ("global", "before"):
        after = number - (name == "before")
        return Named(f"global, round {after}", kept_models.load(run.directory, after))
    if not name.isdecimal():
        raise ConfigError(f"--models: {name} must be global, before or the number of a client")
    return Named(f"client {name}", kept_models.load(run.directory, number, int(name)))


def noise(run: RunDirectory, request: Request) -> list[str]:
    """Measure loss and accuracy under noise.

    Writes `noise_round<n>_<scale>.csv` with the columns draw, strength, loss, accuracy.
    """
    from fedexp.analysis.posthoc import draw

    subject = request.subject(run, request.options.round, request.options.client)
    found = noise_of(subject, request)
    draws = np.arange(len(found.loss)).repeat(len(found.strengths))
    columns = {"draw": draws, "strength": np.tile(found.strengths, len(found.loss))}
    table = pd.DataFrame(columns | {"loss": found.loss.ravel(), "accuracy": found.accuracy.ravel()})
    drawn = partial(draw.noise, [("", found)], f"{subject.title}; {said(request, subject)}")
    lines = [
        f"noise {strength:g}: loss {loss.mean():.4f}, accuracy {accuracy.mean():.4f} (mean of"
        f" {len(loss)} draws)"
        for strength, loss, accuracy in zip(
            found.strengths, found.loss.T, found.accuracy.T, strict=True
        )
    ]
    return [*lines, *request.write(run, name_of("noise", subject, found.scale), table, drawn)]


def noise_of(subject: Subject, request: Request) -> NoiseCurve:
    """Return loss and accuracy of the subject's model under the noise that the options select."""
    options = request.options
    strengths = options.strengths or default_strengths(options.scale)
    return noise_curve(subject, strengths, options.draws, options.scale, options.seed)


def hessian(run: RunDirectory, request: Request) -> list[str]:
    """Compute the largest eigenvalues of the Hessian.

    Writes `hessian_round<n>.csv` with the columns number, eigenvalue, residual.
    """
    from fedexp.analysis.posthoc import draw

    options = request.options
    subject = request.subject(run, options.round, options.client)
    found = spectrum_of(subject, options.eigenvalues, options.seed, options.tolerance)
    numbers = np.arange(1, len(found.values) + 1)
    table = pd.DataFrame(
        {"number": numbers, "eigenvalue": found.values, "residual": found.residuals}
    )
    drawn = partial(draw.spectrum, found, f"{subject.title}; {said(request, subject)}")
    values = ", ".join(f"{value:.5g}" for value in found.values)
    line = (
        f"largest eigenvalues of the Hessian: {values} ({found.products} products,"
        f" {said(request, subject)})"
    )
    return [line, *request.write(run, name_of("hessian", subject), table, drawn)]


def hypersphere(run: RunDirectory, request: Request) -> list[str]:
    """Compute the angles of 2-dimensional features.

    Writes `hypersphere_round<n>.csv` with the columns model, class, angle, density. The examples'
    angles are in the .npz file.
    """
    from fedexp.analysis.posthoc import draw

    lines, grid = [], np.linspace(-np.pi, np.pi, 181)
    for number in rounds_to_show(run, request.options.round):
        subject = request.subject(run, number)
        models = models_of_round(run, number, request.options.clients)
        places, labels = features.on_circle(subject, models), subject.labels
        names = [each.name for each in models]
        rows = [
            pd.DataFrame(
                {
                    "model": name,
                    "class": label,
                    "angle": grid,
                    "density": features.circle_density(found[labels == label], grid),
                }
            )
            for name, found in zip(names, places, strict=True)
            for label in np.unique(labels)
        ]
        arrays = {"models": np.array(names), "angles": places, "labels": labels}
        title = f"{subject.title}; {said(request, subject)}"
        drawn = partial(
            draw.circle, names, places, labels, subject.runtime.data.classes, grid, title
        )
        lines += request.write(run, f"hypersphere_round{number}", pd.concat(rows), drawn, arrays)
    return lines


def tsne(run: RunDirectory, request: Request) -> list[str]:
    """Embed the features of all models of each round together, including the runs in `--with`.

    Writes `tsne_round<n>.csv` with the columns round, model, example, class, x, y. Each round is
    embedded separately.
    """
    from fedexp.analysis.posthoc import draw

    others = [RunDirectory(path) for path in request.options.others]
    rounds = rounds_to_show(run, request.options.round)
    subjects = joint.subjects_alike(joint.told_apart([run, *others]), request, rounds[0])
    rows = [
        (f"round {number}", joint.embedded_models(subjects, request, number)) for number in rounds
    ]
    first = next(iter(subjects.values()))
    frames = [
        pd.DataFrame(
            {
                "round": number,
                "model": cloud.name,
                "example": np.arange(len(cloud.places)),
                "class": first.labels,
                "x": cloud.places[:, 0],
                "y": cloud.places[:, 1],
            }
        )
        for number, (_, clouds) in zip(rounds, rows, strict=True)
        for cloud in clouds
    ]
    title = f"{' and '.join(subjects) if others else first.title}; {said(request, first)}"
    drawn = partial(draw.embedding, rows, first.labels, first.runtime.data.classes, title)
    own = "tsne_round" + "_".join(map(str, rounds))
    name = "_with_".join([own, *(each.directory.resolve().name for each in others)])
    return request.write(run, name, pd.concat(frames), drawn)


def neurons(run: RunDirectory, request: Request) -> list[str]:
    """Find the class that each neuron of the last hidden layer prefers, in each model of a round.

    Writes `neurons_round<n>.csv` with the columns model, neuron, class.
    """
    from fedexp.analysis.posthoc import draw

    lines = []
    for number in rounds_to_show(run, request.options.round):
        subject = request.subject(run, number)
        found = preferred_classes(run, number=number, subject=subject)
        size = found.classes.shape[1]
        rows = [
            pd.DataFrame({"model": name, "neuron": np.arange(size), "class": classes})
            for name, classes in zip(found.names, found.classes, strict=True)
        ]
        title = f"{subject.title}; {said(request, subject)}"
        drawn = partial(
            draw.neurons, [f"round {number}"], [found], len(subject.runtime.data.classes), title
        )
        lines.append(
            f"round {number}: {found.agreement:.4f} of the neurons keep their class in local"
            " training"
        )
        lines += request.write(run, f"neurons_round{number}", pd.concat(rows), drawn)
    return lines
