"""Loss and accuracy on a plane of parameters and under noise, and the loss's curvature.

FedNTD Fig. 14 shows all three. Each kind of `fedexp-papers analyse` measures a table, from which
its figure is drawn.
"""

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from fedexp.analysis.draw_sweep import MARKERS, look
from fedexp.analysis.naming import number_methods
from fedexp.core.console import plural
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params
from fedexp.figures.style import colour_map, panels
from fedexp.rundir import kept_models
from fedexp.rundir.kept_models import KeptModel
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.draw import draw_lines, is_wide
from fedexp_papers.posthoc.base import (
    Result,
    Runs,
    Subject,
    last_local_round,
    load_subject,
    model_name,
)
from fedexp_papers.posthoc.hessian import largest_eigenvalues
from fedexp_papers.posthoc.vectors import (
    filter_normalised,
    gaussian,
    move,
    plane_through,
    relative_to,
    unflatten,
)

log = logging.getLogger("fedexp")
MARGIN = 0.25  # margin around the models, as a fraction of the side of their bounding box
UNITS = {
    "absolute": "standard deviation",
    "relative": "standard deviation / root mean square of the tensor",
}
LARGEST = {"absolute": 0.05, "relative": 0.5}  # the largest default strength
COLUMNS = {"loss": "cross-entropy", "accuracy": "accuracy"}


# --- a plane of parameters (Li et al., NeurIPS 2018)


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


def loss_plane(runs: Runs, number: int | None, options: Namespace, title: str = "") -> Result:
    """Measure loss and accuracy on a plane in parameter space.

    The table has the columns x, y, loss and accuracy.
    """
    (run,) = runs.values()
    if options.directions == "models":
        if (options.span, options.client) != (None, None):
            raise ConfigError("--directions models: cannot be used with --span or --client")
        number = last_local_round(run) if number is None else number
        subject = load_subject(run, options, number)
        models = chosen_models(run, subject.model.round, options.models)
        plane = model_plane(subject, models, options.points)
    else:
        if options.models is not None:
            raise ConfigError("--models: can only be used with --directions models")
        subject = load_subject(run, options, number, options.client)
        plane = plane_around(
            subject, options.directions, options.points, options.span, options.seed
        )
    table = measure_surface(subject, plane)
    lowest = "the loss is not finite anywhere on the plane"
    if np.isfinite(table["loss"]).any():
        best = table.iloc[int(table["loss"].argmin())]
        lowest = (
            f"lowest loss {best['loss']:.4f} at ({best['x']:.3g}, {best['y']:.3g}), accuracy"
            f" {best['accuracy']:.4f}"
        )
    shape = len(plane.y), len(plane.x)
    maps = {str(name): table[name].to_numpy().reshape(shape) for name in table}
    return Result(
        subject.file_name("loss_plane", options.directions),
        table,
        partial(draw_plane, plane, maps, subject.title(title)),
        maps | {"models": np.array(plane.names), "positions": plane.positions},
        [lowest],
    )


def chosen_models(run: RunDirectory, number: int, names: str | None) -> list[KeptModel]:
    """Return the three models that `--models` names, or by default the global and two local models.

    A name is `global` (the global model after the round), `before` (the global model before the
    round) or the number of a client. Raises ConfigError unless the names select three different
    models that were saved.
    """
    folder = run.directory
    if names is None:
        first = kept_models.kept_clients(folder, number)[:2]
        if len(first) < 2:
            raise ConfigError(
                f"{folder}: a plane through models needs two local models from round {number}, but"
                f" only {len(first)} were saved; {kept_models.LOCAL_HINT}"
            )
        names = ",".join(["global", *map(str, first)])
    chosen = names.split(",")
    known = all(name in ("global", "before") or name.isdecimal() for name in chosen)
    if not known or len(chosen) != 3 or len(set(chosen)) != 3:
        raise ConfigError(
            f"--models {names}: must be three different names, each of them global, before or"
            " a client number"
        )
    clients = [int(name) if name.isdecimal() else None for name in chosen]
    return [
        kept_models.load(folder, number - (name == "before"), client)
        for name, client in zip(chosen, clients, strict=True)
    ]


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
        vectors = torch.from_numpy(largest_eigenvalues(subject, 2, seed)[1])
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


def measure_surface(subject: Subject, plane: Plane) -> pd.DataFrame:
    """Measure loss and accuracy on the subject's examples at each point of the grid.

    The columns are x, y, loss and accuracy. The points are sorted by y, then by x.
    """
    points = [(x, y) for y in plane.y.tolist() for x in plane.x.tolist()]
    log.info("evaluating %d grid points on %d examples each", len(points), len(subject.labels))
    rows = []
    for x, y in points:
        point = move(plane.origin, [(x, plane.u), (y, plane.v)])
        rows.append((x, y, *subject.measure(point)))
    return pd.DataFrame(rows, columns=["x", "y", *COLUMNS])


def draw_plane(plane: Plane, maps: Mapping[str, np.ndarray], title: str) -> Figure:
    """Draw loss and accuracy on a plane in parameter space, and mark the models (FedNTD Fig. 14).

    Values are shown as colours with contours. maps: the columns of the table, [m, n] each.
    """
    text = f"Loss and accuracy on a plane of parameters ({plane.unit})\n{title}"
    figure, (row,) = panels(text, 4.0, columns=2, sharex=True, sharey=True)
    scales = {"loss": LogNorm() if is_wide(maps["loss"]) else Normalize()}
    scales["accuracy"] = Normalize(0, 1)
    for axes, (column, norm) in zip(row, scales.items(), strict=True):
        known = np.ma.masked_invalid(maps[column])
        image = axes.pcolormesh(plane.x, plane.y, known, norm=norm, cmap=colour_map())
        if known.min() < known.max():
            is_log = isinstance(norm, LogNorm)
            levels = np.geomspace(known.min(), known.max(), 10) if is_log else 10
            lines: dict[str, Any] = {"colors": "white", "linewidths": 0.6, "alpha": 0.7}
            axes.contour(plane.x, plane.y, known, levels=levels, **lines)
        for marker, model, place in zip(MARKERS, plane.names, plane.positions, strict=False):
            style = {"markersize": 7, "color": "white", "markeredgecolor": "black"}
            axes.plot(*place, marker=marker, linestyle="", **style, label=model)
        axes.set(xlabel="first direction", title=COLUMNS[column], aspect="equal")
        figure.colorbar(image, ax=axes, pad=0.02, shrink=0.85)
    row[0].set_ylabel("second direction")
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# --- Gaussian noise


def noise(runs: Runs, number: int | None, options: Namespace, title: str = "") -> Result:
    """Measure loss and accuracy under noise.

    The table has the columns draw, strength, loss and accuracy.
    """
    tables = {}
    for label, run in runs.items():
        subject = load_subject(run, options, number, options.client)
        found = measure_noise(
            subject, options.strengths, options.draws, options.scale, options.seed
        )
        tables[", ".join(filter(None, [label, model_name(subject.model)]))] = found
    every = pd.concat(tables)
    means = complete_strengths(every).groupby(level=0).mean()
    draws = plural(options.draws, "draw")
    lines = [
        f"noise {strength:g}: loss {loss:.4f}, accuracy {accuracy:.4f} (mean of {draws})"
        for strength, loss, accuracy in means.itertuples(name=None)
    ]
    return Result(
        subject.file_name("noise", options.scale),
        every,
        partial(draw_noise, tables, options.scale, subject.title(title)),
        lines=lines,
    )


def measure_noise(
    subject: Subject,
    strengths: Sequence[float] | None,
    draws: int,
    scale: str,
    seed: int,
) -> pd.DataFrame:
    """Return loss and accuracy at the parameters w + s e, for each draw e and strength s.

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
    points, examples = draws * len(strengths), len(subject.labels)
    log.info("evaluating %d noisy models on %d examples each", points, examples)
    rows = []
    for draw in range(draws):
        direction = gaussian(origin, seed, draw)
        if scale == "relative":
            direction = relative_to(origin, direction)
        for strength in strengths:
            point = move(origin, [(strength, direction)])
            rows.append((draw, strength, *subject.measure(point)))
    return pd.DataFrame(rows, columns=["draw", "strength", *COLUMNS])


def complete_strengths(table: pd.DataFrame) -> pd.DataFrame:
    """Return loss and accuracy by strength, with nan for all draws if a draw has nan.

    A mean over the other draws would flatter a model whose loss is undefined in one of them.
    """
    shown = table.set_index("strength")[[*COLUMNS]]
    return shown.where(shown.notna().groupby(level=0).transform("all"))


def draw_noise(tables: Mapping[str, pd.DataFrame], scale: str, title: str) -> Figure:
    """Draw loss and accuracy against the strength of the noise (FedNTD Fig. 14).

    A line is the mean over draws, with one standard deviation. A strength at which a value is nan
    is left out. tables: by the name of the model.
    """
    lines, numbers = [], number_methods(tables)
    for label, table in tables.items():
        shown = complete_strengths(table).rename(columns=COLUMNS)
        lines.append((shown, look(numbers[label]) | {"label": label}))
    draws = plural(next(iter(tables.values()))["draw"].nunique(), "draw")
    text = f"Gaussian noise on the parameters: mean ± standard deviation, {draws}"
    return draw_lines(f"{text}\n{title}", lines, f"noise, {UNITS[scale]}")


# --- curvature


def hessian(runs: Runs, number: int | None, options: Namespace, title: str = "") -> Result:
    """Compute the largest eigenvalues of the Hessian.

    The table has the columns number, eigenvalue and residual.
    """
    (run,) = runs.values()
    subject = load_subject(run, options, number, options.client)
    found, _, residuals = largest_eigenvalues(
        subject, options.eigenvalues, options.seed, options.tolerance
    )
    numbers = np.arange(1, len(found) + 1)
    table = pd.DataFrame({"number": numbers, "eigenvalue": found, "residual": residuals})
    values = ", ".join(f"{value:.5g}" for value in found)
    line = f"largest eigenvalues of the Hessian: {values} ({subject.examples})"
    draw = partial(draw_spectrum, table, subject.title(title))
    return Result(subject.file_name("hessian"), table, draw, lines=[line])


def draw_spectrum(table: pd.DataFrame, title: str) -> Figure:
    """Draw the largest eigenvalues, each with a bar whose length is the eigenvalue's residual."""
    text = f"Largest eigenvalues of the Hessian of the mean loss\n{title}"
    figure, ((axes,),) = panels(text, 3.4)
    axes.errorbar(table["number"], table["eigenvalue"], table["residual"], fmt="o", capsize=3)
    axes.axhline(0, color="0.45", linewidth=0.8)
    label = "rank of the eigenvalue $\\lambda$ (bars: $\\Vert Hv - \\lambda v\\Vert$)"
    axes.set(xlabel=label, ylabel="eigenvalue", xticks=table["number"])
    return figure
