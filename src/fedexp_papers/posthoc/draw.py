"""Draw the figures of `fedexp-papers analyse`, one function per figure."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from fedexp.analysis.draw_sweep import look, shortened
from fedexp.analysis.naming import number_methods
from fedexp.figures.style import colour_bar, colour_map, legend_beside, panels, stroke, width
from fedexp_papers.draw import (
    MARKERS,
    POINTS,
    class_styles,
    draw_class_legend,
    draw_lines,
    draw_maps,
    is_wide,
)
from fedexp_papers.posthoc.features import GRID, Cloud, circle_density, plane_density
from fedexp_papers.posthoc.hessian import Spectrum
from fedexp_papers.posthoc.loss_plane import Surface
from fedexp_papers.posthoc.neurons import Preferences
from fedexp_papers.posthoc.noise import UNITS, NoiseCurve

RIM = 1.35  # half the side length of the plane that is drawn around the unit circle


def draw_plane(surface: Surface, title: str) -> Figure:
    """Draw loss and accuracy on a plane in parameter space, and mark the models (FedNTD Fig. 14).

    Values are shown as colours with contours.
    """
    plane = surface.plane
    text = f"Loss and accuracy on a plane of parameters ({plane.unit})\n{title}"
    figure, (row,) = panels(text, 4.0, columns=2, sharex=True, sharey=True)
    wide = is_wide(surface.loss)
    for axes, name, values, norm in (
        (row[0], "cross-entropy", surface.loss, LogNorm() if wide else Normalize()),
        (row[1], "accuracy", surface.accuracy, Normalize(0, 1)),
    ):
        known = np.ma.masked_invalid(values)
        image = axes.pcolormesh(plane.x, plane.y, known, norm=norm, cmap=colour_map())
        if known.min() < known.max():
            levels = np.geomspace(known.min(), known.max(), 10) if axes is row[0] and wide else 10
            lines: dict[str, Any] = {"colors": "white", "linewidths": 0.6, "alpha": 0.7}
            axes.contour(plane.x, plane.y, known, levels=levels, **lines)
        for marker, model, place in zip(MARKERS, plane.names, plane.positions, strict=False):
            style = {"markersize": 7, "color": "white", "markeredgecolor": "black"}
            axes.plot(*place, marker=marker, linestyle="", **style, label=model)
        axes.set(xlabel="first direction", title=name, aspect="equal")
        figure.colorbar(image, ax=axes, pad=0.02, shrink=0.85)
    row[0].set_ylabel("second direction")
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_noise(curves: Sequence[tuple[str, NoiseCurve]], title: str) -> Figure:
    """Draw loss and accuracy against the strength of the noise (FedNTD Fig. 14).

    curves: the (label, curve) of each model. A line is the mean over draws, with one standard
    deviation.
    """
    first, numbers = curves[0][1], number_methods(label for label, _ in curves)
    series = {
        label or "_": pd.DataFrame(
            {"cross-entropy": each.loss.ravel(), "accuracy": each.accuracy.ravel()},
            np.tile(each.strengths, len(each.loss)),
        )
        for label, each in curves
    }
    styles = {label or "_": look(number) for label, number in numbers.items()}
    text = f"Gaussian noise on the parameters: mean ± standard deviation, {len(first.loss)} draws"
    return draw_lines(f"{text}\n{title}", series, styles, f"noise, {UNITS[first.scale]}")


def draw_spectrum(found: Spectrum, title: str) -> Figure:
    """Draw the largest eigenvalues, each with a bar whose length is the eigenvalue's residual."""
    text = f"Largest eigenvalues of the Hessian of the mean loss\n{title}"
    figure, ((axes,),) = panels(text, 3.4)
    numbers = np.arange(1, len(found.values) + 1)
    axes.errorbar(numbers, found.values, found.residuals, fmt="o", capsize=3)
    axes.axhline(0, color="0.45", linewidth=0.8)
    axes.set(xlabel="number (bars: ||Hv - lambda v||)", ylabel="eigenvalue", xticks=numbers)
    return figure


def draw_circle(
    names: Sequence[str],
    angles: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    title: str,
) -> Figure:
    """Draw kernel densities of features on the unit circle, one column per model (FedNTD Fig. 18).

    The upper row shows the density in the plane, for all classes together. The lower row shows the
    density of the angle for each class.

    angles: float [models, n]. labels: the classes of the n examples.
    """
    size: dict[str, Any] = {"wide": 1.75 * len(names) + 1.6, "height_ratios": (1.15, 1)}
    text = f"Features on the unit circle, kernel densities\n{title}"
    figure, rows = panels(text, 4.6, 2, len(names), sharex="row", sharey="row", **size)
    axis, styles = np.linspace(-RIM, RIM, 90), class_styles(classes)
    known = [each[np.isfinite(each)] for each in angles]
    maps = [plane_density(np.stack([np.cos(a), np.sin(a)], 1), axis, axis) for a in known]
    norm = Normalize(0, np.nanmax(maps))
    for name, above, below, found, density in zip(names, *rows, angles, maps, strict=True):
        image = above.pcolormesh(axis, axis, density, norm=norm, cmap=colour_map())
        above.set(title=name, aspect="equal")
        for label in np.unique(labels):
            curve = circle_density(found[labels == label], GRID)
            below.plot(GRID, curve, **styles[label], linewidth=stroke(0.7))
        below.set_xticks([-np.pi, 0, np.pi], ["-π", "0", "π"])
    rows[1, 0].set_ylabel("density of the angle")
    rows[1, len(names) // 2].set_xlabel("arctan2(y, x)")
    colour_bar(figure, list(rows[0]), image, "density in the plane", np.stack(maps))
    draw_class_legend(figure, list(rows[1]), classes)
    return figure


def draw_neurons(
    labels: Sequence[str], found: Sequence[Preferences], classes: int, title: str
) -> Figure:
    """Draw the class that each neuron of the last hidden layer prefers (FedNTD Fig. 17).

    Each run has a panel, in which each model is a row. Neurons are sorted by their class in the
    first model. If a column has the same colour in all rows, all models agree on the class of that
    neuron.
    """
    maps = {}
    for label, each in zip(labels, found, strict=True):
        order = np.argsort(each.classes[0], kind="stable")
        agreement = f"{each.agreement:.2f} of the neurons keep their class in local training"
        maps[f"{label}: {agreement}".removeprefix(": ")] = each.classes[:, order]
    figure, grid = draw_maps(
        f"Class that each neuron of the last hidden layer prefers\n{title}",
        maps,
        "preferred class",
        0.8 + 0.2 * max(len(each.names) for each in found),
        columns=1,
        norm=Normalize(-0.5, classes - 0.5),
        colours=colour_map().resampled(classes),
        xlabel="neuron, sorted by its class in the first model",
    )
    for axes, each in zip(grid, found, strict=True):
        axes.set_yticks(range(len(each.names)), each.names, fontsize="x-small")
    return figure


def draw_embedding(
    rows: Sequence[tuple[str, Sequence[Cloud]]],
    labels: np.ndarray,
    classes: Sequence[str],
    title: str,
) -> Figure:
    """Draw a joint t-SNE of all models, with one row per name (a round or a setting).

    The left panel is coloured by class. The right panel is coloured by model (FedNTD Fig. 19, 20)
    or, if there are several runs, by run (Fig. 21). labels: the classes [n] of the examples, which
    are the same for all models.
    """
    text = f"t-SNE of the features of all models together\n{shortened(title)}"
    figure, grid = panels(text, 0.6 + 3.6 * len(rows), len(rows), 2, width() + 1.2)
    styles = class_styles(classes, points=True)
    for (name, clouds), (left, right) in zip(rows, grid, strict=True):
        places = np.stack([each.places for each in clouds])  # [models, n, 2]
        for label in np.unique(labels):
            left.plot(*places[:, labels == label].reshape(-1, 2).T, **styles[label])
        several = len({each.run for each in clouds}) > 1
        for points, style in runs_of(clouds) if several else models_of(clouds):
            right.plot(*points.T, **POINTS | style)
        left.set(title=f"{name}, by class", xticks=[], yticks=[])
        right.set(title=f"{name}, by {'run' if several else 'model'}", xticks=[], yticks=[])
        legend_beside(right)
    draw_class_legend(figure, list(grid[:, 0]), classes)
    return figure


def models_of(clouds: Sequence[Cloud]) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Yield the points [n, 2] and the style of each model, with global models in black."""
    colours = colormaps["cividis"].resampled(len(clouds))
    for index, each in enumerate(clouds):
        colour = "black" if each.is_global else colours(index)
        marker = MARKERS[index % len(MARKERS)]
        yield each.places, {"color": colour, "marker": marker, "label": each.model}


def runs_of(clouds: Sequence[Cloud]) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Yield the points and the style of each run, with global models in a darker shade."""
    numbers = number_methods(dict.fromkeys(each.run for each in clouds))
    for is_global, noun in ((False, "local model"), (True, "global model")):
        for index, (run, number) in enumerate(numbers.items()):
            found = [c.places for c in clouds if c.run == run and c.is_global == is_global]
            if found:
                colour = ("black", "0.45")[index % 2] if is_global else look(number)["color"]
                label = f"{run}: {len(found)} {noun}{'s' if len(found) > 1 else ''}"
                marker = MARKERS[index % len(MARKERS)]
                points = np.concatenate(found)
                yield points, {"color": colour, "marker": marker, "label": label}
