"""Draw the figures of `fedexp-papers analyse`, one function per figure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from fedexp.analysis import draw_sweep
from fedexp.analysis.naming import number_methods
from fedexp.figures.style import (
    NAMED_CLASSES,
    colour_map,
    integers,
    label_size,
    legend,
    one_line,
    panels,
    points,
    stroke,
    width,
)
from fedexp_papers.posthoc.features import GRID, Cloud, circle_density, plane_density
from fedexp_papers.posthoc.hessian import Spectrum
from fedexp_papers.posthoc.loss_plane import Surface
from fedexp_papers.posthoc.neurons import Preferences
from fedexp_papers.posthoc.noise import UNITS, NoiseCurve

MARKERS = "osD^vPX*"  # for models, and for classes if the style's colours repeat
LINES = ("-", "--", ":")  # for classes if the style's colours repeat
POINTS: dict[str, Any] = {"markersize": 2.5, "linestyle": "", "alpha": 0.7, "markeredgewidth": 0}
RIM = 1.35  # half the side length of the plane that is drawn around the unit circle


def loss_plane(surface: Surface, title: str) -> Figure:
    """Draw loss and accuracy on a plane in parameter space, and mark the models (FedNTD Fig. 14).

    Values are shown as colours with contours.
    """
    plane = surface.plane
    text = f"Loss and accuracy on a plane of parameters ({plane.unit})\n{title}"
    figure, (row,) = panels(text, 4.0, columns=2, sharex=True, sharey=True)
    loss, accuracy = (np.ma.masked_invalid(each) for each in (surface.loss, surface.accuracy))
    wide = is_wide(surface.loss)
    levels = np.geomspace(loss.min(), loss.max(), 10) if wide else 10
    for axes, name, values, norm, contours in (
        (row[0], "cross-entropy", loss, LogNorm() if wide else Normalize(), levels),
        (row[1], "accuracy", accuracy, Normalize(0, 1), 10),
    ):
        image = axes.pcolormesh(plane.x, plane.y, values, norm=norm, cmap=colour_map())
        if values.min() < values.max():
            look = {"colors": "white", "linewidths": 0.6, "alpha": 0.7}
            axes.contour(plane.x, plane.y, values, levels=contours, **look)
        for marker, model, place in zip(MARKERS, plane.names, plane.positions, strict=False):
            look = {"markersize": 7, "color": "white", "markeredgecolor": "black"}
            axes.plot(*place, marker=marker, linestyle="", **look, label=model)
        axes.set_xlabel("first direction")
        axes.set_title(name)
        axes.set_aspect("equal")
        figure.colorbar(image, ax=axes, pad=0.02, shrink=0.85)
    row[0].set_ylabel("second direction")
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def is_wide(losses: np.ndarray) -> bool:
    """Return whether losses need a logarithmic scale: the largest is over 20 times the smallest."""
    finite = losses[np.isfinite(losses)]
    return bool(finite.size) and 0 < finite.min() < finite.max() / 20


def noise(curves: Sequence[tuple[str, NoiseCurve]], title: str) -> Figure:
    """Draw loss and accuracy against the strength of the noise (FedNTD Fig. 14).

    curves: the (label, curve) of each model. A line is the mean over draws, in a band of one
    standard deviation.
    """
    first = curves[0][1]
    text = f"Gaussian noise on the parameters: mean ± standard deviation, {len(first.loss)} draws"
    figure, ((left, right),) = panels(f"{text}\n{title}", 3.6, columns=2)
    numbers = number_methods(label for label, _ in curves)
    for label, each in curves:
        for axes, values in ((left, each.loss), (right, each.accuracy)):
            draw_sweep.curve(
                axes, each.strengths, np.ma.masked_invalid(values), numbers[label], label
            )
    if is_wide(np.concatenate([each.loss.ravel() for _, each in curves])):
        left.set_yscale("log")
    right.set_ylim(0, 1.02)
    for axes, name in ((left, "cross-entropy"), (right, "accuracy")):
        axes.set_xlabel(f"noise, {UNITS[first.scale]}")
        axes.set_ylabel(name)
    if len(curves) > 1:
        legend(figure, left)
    return figure


def spectrum(found: Spectrum, title: str) -> Figure:
    """Draw the largest eigenvalues, each with a bar whose length is the eigenvalue's residual."""
    figure, ((axes,),) = panels(
        f"Largest eigenvalues of the Hessian of the mean loss\n{title}", 3.4
    )
    numbers = np.arange(1, len(found.values) + 1)
    look: dict[str, Any] = {"color": "C0", "markersize": 5, "capsize": 3, "linewidth": stroke(0.8)}
    axes.errorbar(numbers, found.values, found.residuals, fmt="o", **look)
    axes.axhline(0, color="0.45", linewidth=0.8)
    axes.set_xlabel("number (bars: ||Hv - lambda v||)")
    axes.set_ylabel("eigenvalue")
    axes.xaxis.set_major_locator(integers(20))
    return figure


def circle(
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
    figure, rows = panels(
        f"Features on the unit circle, kernel densities\n{title}",
        4.6,
        rows=2,
        columns=len(names),
        wide=1.75 * len(names) + 1.6,
        sharex="row",
        sharey="row",
        height_ratios=(1.15, 1),
    )
    axis = np.linspace(-RIM, RIM, 90)
    points = [np.stack([np.cos(each), np.sin(each)], 1) for each in angles]
    maps = [plane_density(each[np.isfinite(each[:, 0])], axis, axis) for each in points]
    norm = Normalize(0, np.nanmax(maps))
    for name, above, below, found, density in zip(names, *rows, angles, maps, strict=True):
        image = above.pcolormesh(axis, axis, density, norm=norm, cmap=colour_map())
        above.set_aspect("equal")
        above.set_title(name)
        for label in np.unique(labels):
            curve = circle_density(found[labels == label], GRID)
            below.plot(GRID, curve, **class_style(label, len(classes)), linewidth=stroke(0.7))
        below.set_xticks([-np.pi, 0, np.pi], ["-π", "0", "π"])
    rows[1, 0].set_ylabel("density of the angle")
    rows[1, len(names) // 2].set_xlabel("arctan2(y, x)")
    bar = figure.colorbar(image, ax=list(rows[0]), pad=0.02)
    bar.set_label("density in the plane", fontsize=label_size())
    draw_class_legend(figure, list(rows[1]), np.unique(labels), classes)
    return figure


def neurons(
    labels: Sequence[str], found: Sequence[Preferences], classes: int, title: str
) -> Figure:
    """Draw the class that each neuron of the last hidden layer prefers (FedNTD Fig. 17).

    Each run has a panel, in which each model is a row. Neurons are sorted by their class in the
    first model. If a column has the same colour in all rows, all models agree on the class of that
    neuron.
    """
    heights = [0.5 + len(each.names) for each in found]
    figure, grid = panels(
        f"Class that each neuron of the last hidden layer prefers\n{title}",
        1.2 + 0.2 * sum(heights) + 0.3 * len(found),
        rows=len(found),
        height_ratios=heights,
    )
    limits: dict[str, Any] = {"vmin": -0.5, "vmax": classes - 0.5}
    for axes, label, each in zip(grid[:, 0], labels, found, strict=True):
        order = np.argsort(each.classes[0], kind="stable")
        colours = colour_map().resampled(classes)
        image = axes.imshow(
            each.classes[:, order], aspect="auto", interpolation="nearest", cmap=colours, **limits
        )
        axes.grid(False)
        axes.set_yticks(range(len(each.names)), each.names, fontsize=points("legend.fontsize") - 2)
        agreement = f"{each.agreement:.2f} of the neurons keep their class in local training"
        axes.set_title(f"{label}: {agreement}" if label else agreement)
    grid[-1, 0].set_xlabel("neuron, sorted by its class in the first model")
    bar = figure.colorbar(image, ax=list(grid[:, 0]), pad=0.02, ticks=integers(10))
    bar.set_label("preferred class")
    return figure


def embedding(
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
    figure, grid = panels(
        f"t-SNE of the features of all models together\n{title}",
        0.6 + 3.6 * len(rows),
        rows=len(rows),
        columns=2,
        wide=width() + 1.2,
    )
    for (name, clouds), (left, right) in zip(rows, grid, strict=True):
        places = np.stack([each.places for each in clouds])  # [models, n, 2]
        for label in np.unique(labels):
            points = places[:, labels == label].reshape(-1, 2)
            left.plot(*points.T, **class_style(label, len(classes), points=True))
        left.set_title(f"{name}, by class")
        several = len({each.run for each in clouds}) > 1
        if several:
            draw_runs(right, clouds)
        else:
            draw_models(right, clouds)
        right.set_title(f"{name}, by {'run' if several else 'model'}")
        for axes in (left, right):
            axes.set_xticks([])
            axes.set_yticks([])
        right.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, markerscale=2)
    draw_class_legend(figure, list(grid[:, 0]), np.unique(labels), classes, points=True)
    return figure


def draw_models(axes: Axes, clouds: Sequence[Cloud]) -> None:
    """Draw the points of each model, with global models in black."""
    colours = colormaps["cividis"].resampled(len(clouds))
    for index, each in enumerate(clouds):
        colour = "black" if each.is_global else colours(index)
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(*each.places.T, **POINTS, color=colour, marker=marker, label=each.model)


def draw_runs(axes: Axes, clouds: Sequence[Cloud]) -> None:
    """Draw the points of each run in one colour, with global models in a darker shade."""
    runs = list(dict.fromkeys(each.run for each in clouds))
    numbers = number_methods(runs)
    for is_global, noun in ((False, "local model"), (True, "global model")):
        for index, run in enumerate(runs):
            found = [c.places for c in clouds if c.run == run and c.is_global == is_global]
            if not found:
                continue
            colour = (
                ("black", "0.45")[index % 2]
                if is_global
                else draw_sweep.look(numbers[run])["color"]
            )
            label = f"{run}: {len(found)} {noun}{'s' if len(found) > 1 else ''}"
            marker = MARKERS[index % len(MARKERS)]
            points = np.concatenate(found)
            axes.plot(*points.T, **POINTS, color=colour, marker=marker, label=label)


def class_style(label: int, count: int, points: bool = False) -> dict[str, Any]:
    """Return the colour and the line style of one of `count` classes.

    Colours are taken from the style's cycle or, if there are many classes, from its colour map.
    points: whether to return a marker for points instead of a line style.
    """
    turn, number = divmod(int(label), len(rcParams["axes.prop_cycle"]))
    colour: Any = f"C{number}"
    if count > NAMED_CLASSES:
        turn, colour = 0, colormaps[rcParams["image.cmap"]](label / (count - 1))
    style = POINTS | {"marker": MARKERS[turn]} if points else {"linestyle": LINES[turn]}
    return {"color": colour} | style


def draw_class_legend(
    figure: Figure,
    panels: Sequence[Axes],
    labels: np.ndarray,
    classes: Sequence[str],
    points: bool = False,
) -> None:
    """Draw a legend of the classes in `labels`.

    If there are many classes, draw a colour bar of their indices instead.
    """
    if len(classes) > NAMED_CLASSES:
        scale = ScalarMappable(Normalize(0, len(classes) - 1), rcParams["image.cmap"])
        bar = figure.colorbar(scale, ax=list(panels), pad=0.02)
        bar.set_label("class (index)", fontsize=label_size())
        return
    shown = one_line(classes)
    handles = []
    for label in labels:
        look = class_style(label, len(classes), points)
        handles += panels[0].plot([], [], **look, label=shown[label])
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 10),
        markerscale=2.4 if points else 1,
        fontsize=label_size(),
    )
