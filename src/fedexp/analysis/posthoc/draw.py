"""Draw the pictures of `fedexp analyse`. Each function takes measurements and returns a matplotlib
Figure."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from fedexp.analysis import draw_sweep
from fedexp.analysis.posthoc.features import Cloud, circle_density, plane_density
from fedexp.analysis.posthoc.hessian import Spectrum
from fedexp.analysis.posthoc.loss_plane import Surface
from fedexp.analysis.posthoc.neurons import Preferences
from fedexp.analysis.posthoc.noise import NoiseCurve
from fedexp.figures.fonts import drawable
from fedexp.figures.style import (
    NAMED_CLASSES,
    colour_map,
    entitle,
    integers,
    label_size,
    legend,
    stroke,
    width,
)

MARKERS = "osD^vPX*"  # for models, and for classes when the style's colours repeat
MODEL_POINTS: dict[str, Any] = {
    "markersize": 2.5,
    "linestyle": "",
    "alpha": 0.7,
    "markeredgewidth": 0,
}
RIM = 1.35  # half the side of the plane that is drawn around the unit circle


def loss_plane(surface: Surface, title: str) -> Figure:
    """Draw loss and accuracy on a plane of parameters, with the models on it (FedNTD Fig. 14).

    Values are shown as colours with contours.
    """
    plane = surface.plane
    figure = Figure(figsize=(width(), 4.0), layout="constrained")
    entitle(figure, f"Loss and accuracy on a plane of parameters ({plane.unit})\n{title}")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    finite = surface.loss[np.isfinite(surface.loss)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    wide = low > 0 and high > 20 * low
    loss_norm: Normalize = LogNorm(low, high) if wide else Normalize(low, high)
    for axes, values, norm, name in (
        (panels[0], surface.loss, loss_norm, "cross-entropy"),
        (panels[1], surface.accuracy, Normalize(0, 1), "accuracy"),
    ):
        shown = np.ma.masked_invalid(values)
        image = axes.pcolormesh(
            plane.x, plane.y, shown, norm=norm, cmap=colour_map(), shading="nearest"
        )
        if shown.count() > 3 and shown.min() < shown.max():
            levels = np.geomspace(low, high, 10) if wide and name == "cross-entropy" else 10
            axes.contour(
                plane.x, plane.y, shown, levels=levels, colors="white", linewidths=0.6, alpha=0.7
            )
        for number, (model, place) in enumerate(zip(plane.names, plane.positions, strict=True)):
            look: dict[str, Any] = {
                "marker": MARKERS[number % len(MARKERS)],
                "markersize": 7,
                "linestyle": "",
            }
            axes.plot(*place, **look, color="white", markeredgecolor="black", label=model)
        axes.set_xlabel("first direction")
        axes.set_title(name)
        axes.set_aspect("equal")
        figure.colorbar(image, ax=axes, pad=0.02, shrink=0.85)
    panels[0].set_ylabel("second direction")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def noise(curves: Sequence[tuple[str, NoiseCurve]], title: str) -> Figure:
    """Draw loss and accuracy against the strength of the noise (FedNTD Fig. 14).

    curves: (label, curve) of each model. A line is the mean over draws, in a band of one standard
    deviation.
    """
    figure = Figure(figsize=(width(), 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for number, (label, each) in enumerate(curves):
        for axes, values in zip(panels, (each.loss, each.accuracy), strict=True):
            draw_sweep.curve(axes, each.strengths, np.ma.masked_invalid(values), number, label)
    losses = np.concatenate(
        [each.loss[np.isfinite(each.loss)] for _, each in curves] or [np.empty(0)]
    )
    if losses.size and 0 < losses.min() < losses.max() / 20:
        panels[0].set_yscale("log")
    panels[1].set_ylim(0, 1.02)
    draws, unit = len(curves[0][1].loss), curves[0][1].unit
    for axes, name in zip(panels, ("cross-entropy", "accuracy"), strict=True):
        axes.set_xlabel(f"noise, {unit}")
        axes.set_ylabel(name)
    if len(curves) > 1:
        legend(figure, panels[0])
    entitle(
        figure,
        f"Gaussian noise on the parameters: mean ± standard deviation, {draws} draws\n{title}",
    )
    return figure


def spectrum(found: Spectrum, title: str) -> Figure:
    """Draw the largest eigenvalues, each with a bar as long as its residual."""
    figure = Figure(figsize=(width(), 3.4), layout="constrained")
    entitle(figure, f"Largest eigenvalues of the Hessian of the mean loss\n{title}")
    axes = figure.subplots()
    numbers = np.arange(1, len(found.values) + 1)
    axes.errorbar(
        numbers,
        found.values,
        found.residuals,
        fmt="o",
        color="C0",
        markersize=5,
        capsize=3,
        linewidth=stroke(0.8),
    )
    axes.axhline(0, color="0.45", linewidth=0.8)
    axes.set_xlabel("number (bars: ||Hv - lambda v||)")
    axes.set_ylabel("eigenvalue")
    axes.xaxis.set_major_locator(integers(20))
    return figure


def circle(
    names: Sequence[str],
    places: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    grid: np.ndarray,
    title: str,
) -> Figure:
    """Draw kernel densities of features on the unit circle, one column per model (FedNTD Fig. 18).

    The upper row shows the density in the plane for all classes together, the lower row the density
    of the angle for each class.

    places: angles [models, n]. labels: classes [n]. grid: angles [g] at which the curves are
    evaluated.
    """
    columns = len(names)
    figure = Figure(figsize=(max(width(), 1.75 * columns + 1.6), 4.6), layout="constrained")
    entitle(figure, f"Features on the unit circle, kernel densities\n{title}")
    rows = figure.subplots(
        2, columns, squeeze=False, sharex="row", sharey="row", height_ratios=(1.15, 1)
    )
    axis = np.linspace(-RIM, RIM, 90)
    maps = [plane_density(on_plane(each), axis, axis) for each in places]
    norm = Normalize(0, max(float(np.nanmax(each)) for each in maps))
    for name, above, below, found, density in zip(names, *rows, places, maps, strict=True):
        image = above.pcolormesh(
            axis, axis, density, norm=norm, cmap=colour_map(), shading="nearest"
        )
        above.set_aspect("equal")
        above.set_title(name)
        for label in np.unique(labels):
            curve = circle_density(found[labels == label], grid)
            below.plot(grid, curve, **class_look(int(label), len(classes)), linewidth=stroke(0.7))
        below.set_xticks([-np.pi, 0, np.pi], ["-π", "0", "π"])
    rows[1, 0].set_ylabel("density of the angle")
    rows[1, columns // 2].set_xlabel("arctan2(y, x)")
    figure.colorbar(image, ax=list(rows[0]), pad=0.02).set_label(
        "density in the plane", fontsize=label_size()
    )
    class_key(figure, list(rows[1]), np.unique(labels), classes, lines=True)
    return figure


def neurons(
    labels: Sequence[str], found: Sequence[Preferences], classes: int, title: str
) -> Figure:
    """Draw the class that each neuron of the last hidden layer prefers (FedNTD Fig. 17).

    Each run has a panel, and each model a row. Neurons are sorted by their class in the first
    model. If a column has the same colour in all rows, the models agree on that neuron's class.
    """
    rows = [0.5 + len(each.names) for each in found]
    figure = Figure(
        figsize=(width(), 1.2 + 0.2 * sum(rows) + 0.3 * len(found)), layout="constrained"
    )
    entitle(figure, f"Class that each neuron of the last hidden layer prefers\n{title}")
    panels = figure.subplots(len(found), 1, squeeze=False, height_ratios=rows)[:, 0]
    colours = colour_map().resampled(classes)
    for axes, label, each in zip(panels, labels, found, strict=True):
        order = np.argsort(each.classes[0], kind="stable")
        axes.grid(False)
        image = axes.imshow(
            each.classes[:, order],
            aspect="auto",
            interpolation="nearest",
            cmap=colours,
            vmin=-0.5,
            vmax=classes - 0.5,
        )
        axes.set_yticks(
            range(len(each.names)), each.names, fontsize=rcParams["legend.fontsize"] - 2
        )
        said = f"{each.agreement:.2f} of the neurons keep their class in local training"
        axes.set_title(f"{label}: {said}" if label else said)
    panels[-1].set_xlabel("neuron, sorted by its class in the first model")
    figure.colorbar(image, ax=list(panels), pad=0.02, ticks=integers(10)).set_label(
        "preferred class"
    )
    return figure


def on_plane(places: np.ndarray) -> np.ndarray:
    """Return the points [n, 2] of the unit circle at the finite angles."""
    finite = places[np.isfinite(places)]
    return np.stack([np.cos(finite), np.sin(finite)], 1)


def embedding(
    rows: Sequence[tuple[str, Sequence[Cloud]]],
    labels: np.ndarray,
    classes: Sequence[str],
    title: str,
) -> Figure:
    """Draw the t-SNE of all models together, one row per name (a round or a setting).

    The left panel is coloured by class. The right panel is coloured by model (FedNTD Fig. 19, 20)
    or, if there are several runs, by run (Fig. 21). labels: classes [n] of the examples, which are
    the same for each model.
    """
    figure = Figure(figsize=(width() + 1.2, 0.6 + 3.6 * len(rows)), layout="constrained")
    entitle(figure, f"t-SNE of the features of all models together\n{title}")
    grid = figure.subplots(len(rows), 2, squeeze=False)
    for (name, clouds), (left, right) in zip(rows, grid, strict=True):
        every, whose = (
            np.concatenate([each.places for each in clouds]),
            np.tile(labels, len(clouds)),
        )
        for label in np.unique(labels):
            points = every[whose == label]
            style = {"markersize": 2.5, "linestyle": "", "alpha": 0.7, "markeredgewidth": 0} | {
                "marker": class_marker(int(label), len(classes)),
                "color": class_look(int(label), len(classes))["color"],
            }
            left.plot(*points.T, **style)
        several = len({each.run for each in clouds}) > 1
        for label, points, look in (by_run if several else by_model)(clouds):
            right.plot(*points.T, **MODEL_POINTS | look, label=label)
        left.set_title(f"{name}, by class")
        right.set_title(f"{name}, by {'run' if several else 'model'}")
        for axes in (left, right):
            axes.set_xticks([])
            axes.set_yticks([])
        right.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, markerscale=2)
    class_key(figure, list(grid[:, 0]), np.unique(labels), classes, lines=False)
    return figure


def class_look(label: int, count: int) -> dict[str, Any]:
    """Return the colour and line style of a class among `count` classes.

    Colours are taken from the style's cycle or, if there are many classes, from its colour map.
    """
    colours = len(rcParams["axes.prop_cycle"])
    if count > NAMED_CLASSES:
        return {"color": colormaps[rcParams["image.cmap"]](label / (count - 1)), "linestyle": "-"}
    return {"color": f"C{label % colours}", "linestyle": ("-", "--", ":")[label // colours % 3]}


def class_marker(label: int, count: int) -> str:
    """Return the marker of a class. It changes each time the style's colours repeat."""
    return (
        "o"
        if count > NAMED_CLASSES
        else MARKERS[label // len(rcParams["axes.prop_cycle"]) % len(MARKERS)]
    )


def by_model(clouds: Sequence[Cloud]) -> Iterator[tuple[str, np.ndarray, dict[str, Any]]]:
    """Yield (label, points [n, 2], look) of each model.

    Global models are black; the others have colours from a colour map.
    """
    for index, each in enumerate(clouds):
        colour = (
            "black" if each.is_global else colormaps["cividis"](index / max(len(clouds) - 1, 1))
        )
        yield each.model, each.places, {"color": colour, "marker": MARKERS[index % len(MARKERS)]}


def by_run(clouds: Sequence[Cloud]) -> Iterator[tuple[str, np.ndarray, dict[str, Any]]]:
    """Yield (label, points [n, 2], look) of each run's local models, then of each run's global
    models.

    Each run's local models share a colour; global models are dark.
    """
    runs = list(dict.fromkeys(each.run for each in clouds))
    for whole, colours in ((False, [f"C{i}" for i in range(len(runs))]), (True, ["black", "0.45"])):
        for index, run in enumerate(runs):
            found = [each for each in clouds if each.run == run and each.is_global == whole]
            if found:
                one = "global model" if whole else "local model"
                label = f"{run}: {len(found)} {one}{'s' if len(found) > 1 else ''}"
                points = np.concatenate([each.places for each in found])
                yield (
                    label,
                    points,
                    {
                        "color": colours[index % len(colours)],
                        "marker": MARKERS[index % len(MARKERS)],
                    },
                )


def class_key(
    figure: Figure, panels: Sequence[Axes], labels: np.ndarray, classes: Sequence[str], lines: bool
) -> None:
    """Draw a legend of the classes in `labels` or, if there are many classes, a colour bar of their
    indices."""
    if len(classes) > NAMED_CLASSES:
        scale = ScalarMappable(Normalize(0, len(classes) - 1), rcParams["image.cmap"])
        figure.colorbar(scale, ax=list(panels), pad=0.02).set_label(
            "class (index)", fontsize=label_size()
        )
        return
    shown, families = drawable(classes)
    handles = []
    for label in labels.tolist():
        look = class_look(label, len(classes))
        style = (
            look
            if lines
            else {
                "color": look["color"],
                "linestyle": "",
                "marker": class_marker(label, len(classes)),
            }
        )
        handles += panels[0].plot([], [], **style, label=shown[label])
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 10),
        prop={"family": families, "size": label_size()},
    )
