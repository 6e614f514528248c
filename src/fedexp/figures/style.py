"""The style of all figures: colours, axes and heat maps. The colours suit colour-blind readers.

Sizes, colours and fonts are set in the style file fedexp.mplstyle, which `styled` reads.
"""

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import MaxNLocator

from fedexp.figures.fonts import drawable, drawable_text

OURS = Path(__file__).with_name("fedexp.mplstyle")
NAMED_CLASSES = 20  # maximum number of classes that are labelled by name
ABSENT = "0.85"  # grey for undefined values
# C0, C1 and C2 are colours of the style's cycle, which is the palette of Okabe and Ito.
BLUE, ORANGE, GREEN, GREY = "C0", "C1", "C2", "0.45"
_one_at_a_time = threading.RLock()  # matplotlib's style is global to the process


@contextmanager
def styled(style: str | None = None) -> Iterator[None]:
    """Use fedexp's style for the figures that are drawn and written in the `with` block.

    style: a matplotlib style file from the user. It is applied after fedexp's style. matplotlib's
    warnings about missing letters and about the space for a legend are suppressed.
    """
    with _one_at_a_time, context([OURS, *([style] if style else [])]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def width() -> float:
    """Return the width of a figure in inches."""
    return float(matplotlib.rcParams["figure.figsize"][0])


def stroke(share: float = 1.0) -> float:
    """Return a line width in points. share: the fraction of the style's line width."""
    return share * float(matplotlib.rcParams["lines.linewidth"])


def set_title(figure: Figure, text: str) -> None:
    """Write a title above all panels. The text is not parsed as mathematics."""
    shown, families = drawable_text(text)
    figure.suptitle(shown, fontfamily=families, parse_math=False)


def map_height(rows: int) -> float:
    """Return the height, in inches, of a map with this many rows.

    A row is as high as a line of text, but the map is at least 1 and at most 5.5 inches high.
    """
    return float(np.clip(0.22 * rows, 1.0, 5.5))


def cell_edges(rounds: np.ndarray) -> np.ndarray:
    """Return the borders of cells, [R + 1], which are halfway between evaluated rounds [R]."""
    before = rounds[0] - (rounds[1] - rounds[0] if len(rounds) > 1 else 1)
    after = rounds[-1] + (rounds[-1] - rounds[-2] if len(rounds) > 1 else 1)
    padded = np.concatenate([[before], rounds, [after]])
    return (padded[1:] + padded[:-1]) / 2


def map_cells(
    axes: Axes, rounds: np.ndarray, values: np.ndarray, top: float, first: int = 0, ticks: int = 12
) -> QuadMesh:
    """Draw a heat map without axis labels or colour bar."""
    rows, cells = np.arange(values.shape[1] + 1) + first - 0.5, np.ma.masked_invalid(values.T)
    image = axes.pcolormesh(cell_edges(rounds), rows, cells, cmap=colour_map(), vmin=0, vmax=top)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(integers(ticks))
    return image


def colour_map() -> Colormap:
    """Return the style's colour map, with grey for undefined values."""
    return matplotlib.colormaps[matplotlib.rcParams["image.cmap"]].with_extremes(bad=ABSENT)


def colour_bar(
    figure: Figure,
    axes: Axes | Sequence[Axes],
    image: ScalarMappable,
    label: str,
    values: np.ndarray,
) -> None:
    finite = np.isfinite(values)
    clipped = image.norm.vmax is not None and bool((values[finite] > image.norm.vmax).any())
    bar = figure.colorbar(image, ax=axes, extend="max" if clipped else "neither", pad=0.02)
    bar.set_label(label if finite.all() else f"{label}\n(grey: undefined)", fontsize=label_size())


def label_size() -> Any:
    """Return the font size of colour bar labels and panel titles."""
    return matplotlib.rcParams["axes.titlesize"]


def integers(most: int) -> MaxNLocator:
    """Return a tick locator for integers, at multiples of 1, 2 or 5 times a power of ten."""
    return MaxNLocator(nbins=most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def panels(
    title: str, height: float, rows: int = 1, columns: int = 1, wide: float = 0, **options: Any
) -> tuple[Figure, Any]:
    """Return a figure and its panels as an array [rows, columns].

    height, wide: the size in inches. The figure is at least as wide as the style's default width.
    options: keyword arguments of `Figure.subplots`.
    """
    figure = Figure(figsize=(max(width(), wide), height), layout="constrained")
    if title:
        set_title(figure, title)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def legend(figure: Figure, axes: Axes, title: str = "") -> None:
    """Draw the legend of one panel next to all panels, since it may be taller than a panel."""
    handles = axes.get_legend_handles_labels()
    if handles[0]:
        figure.legend(*handles, loc="outside right center", title=title or None)


def line(
    axes: Axes, rounds: np.ndarray, values: np.ndarray, colour: str, label: str, faint: bool = False
) -> None:
    """Draw a curve, with markers if it has few points. Without points, nothing is drawn."""
    if rounds.size:
        marker = "o" if rounds.size <= 40 else None
        look: dict[str, Any] = {"marker": marker, "markersize": 3.5, "color": colour}
        axes.plot(rounds, values, **look, linewidth=stroke(0.6 if faint else 1.0), label=label)


def round_axis(axes: Axes, ticks: int = 12) -> None:
    """Label the axis of rounds. ticks: the approximate maximum number of ticks."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(integers(ticks))


def write_note(axes: Axes, why: str) -> None:
    """Write into a panel why it has no curves."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center")
    axes.set_yticks([])


def class_axis(axes: Axes, classes: Sequence[str], horizontal: bool = False) -> None:
    """Label the axis of classes.

    Up to 20 classes are labelled by name, or by number if no font contains the letters of the name.
    With more classes, only some class numbers are labelled.
    """
    axis = axes.xaxis if horizontal else axes.yaxis
    if len(classes) > NAMED_CLASSES:
        axis.set_label_text("class (index)")
        axis.set_major_locator(integers(10))
        return
    axis.set_label_text("class")
    shown, families = drawable(classes)
    names = [name if len(name) <= 20 else f"{name[:9]}…{name[-10:]}" for name in shown]
    axis.set_ticks(
        range(len(names)),
        names,
        fontsize="small",
        fontfamily=families,
        parse_math=False,
    )
    if horizontal and max(map(len, names)) > 4:
        axes.tick_params("x", rotation=90)
