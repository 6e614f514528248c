"""The style of all figures: colours, axes and heat maps. The colours suit colour-blind readers.

Sizes, colours and fonts are set in the style file fedexp.mplstyle, which `styled` reads.
"""

import math
import textwrap
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
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
from matplotlib.font_manager import FontProperties
from matplotlib.style import context
from matplotlib.ticker import FixedLocator, MaxNLocator

from fedexp.figures.pictures import PNG, Pictures

OURS = Path(__file__).with_name("fedexp.mplstyle")
FONTS = ("font.family", "font.sans-serif", "font.serif")  # a language may need other fonts
NARROW = 6.0  # inches; a narrower figure has its legends above or below the panels
LETTER = 0.58  # mean width of a letter, relative to the size of the font
NAMED_CLASSES = 20  # maximum number of classes that are labelled by name
ABSENT = "0.85"  # grey for undefined values
# C0, C1 and C2 are colours of the style's cycle, which is the palette of Okabe and Ito.
BLUE, ORANGE, GREEN, GREY = "C0", "C1", "C2", "0.45"
_one_at_a_time = threading.RLock()  # matplotlib's style is global to the process
_named: list[Pictures] = []  # the settings of the figures that are being drawn


@contextmanager
def styled(pictures: Pictures = PNG) -> Iterator[None]:
    """Use fedexp's style for the figures that are drawn and written in the `with` block.

    pictures: the settings of the figures. A style file of the user is applied after fedexp's
    style, and the size and the colour map after it. Of the user's matplotlibrc, only the fonts are
    used: other settings, such as text.usetex, could change or prevent the figures. With a size,
    text shrinks with the square root of the width. matplotlib's warnings about missing letters and
    about the space for a legend are suppressed.
    """
    fonts: dict[str, Any] = {
        key: value for key, value in matplotlib.rcParams.items() if key in FONTS
    }
    styles: list[str | Path | dict[str, Any]] = [fonts, OURS]
    last: dict[str, Any] = {}
    if pictures.size:
        styles.append({"font.size": 10 * min(1.0, pictures.size[0] / 8) ** 0.5})
        last["figure.figsize"] = pictures.size
    if pictures.colour_map:
        last["image.cmap"] = pictures.colour_map
    styles += [pictures.style] if pictures.style else []
    styles.append(last)
    with _one_at_a_time, context(styles, after_reset=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _named.append(pictures)
        try:
            yield
        finally:
            _named.pop()


def settings() -> Pictures:
    """Return the settings of the figures that are being drawn."""
    return _named[-1] if _named else PNG


def class_names(classes: Sequence[str]) -> Sequence[str]:
    """Return the names of the classes that figures show.

    classes: the names in the data. Raises ConfigError if `figures.classes` has another number of
    names.
    """
    look = settings()
    look.check_classes(len(classes))
    return look.classes or classes


def one_line(names: Sequence[str]) -> list[str]:
    """Return the names with each white space as a blank. An empty name becomes its index."""
    return [" ".join(name.split()) or str(i) for i, name in enumerate(names)]


def width() -> float:
    """Return the width of a figure in inches."""
    return float(matplotlib.rcParams["figure.figsize"][0])


def fixed_height() -> float | None:
    """Return the height of all figures in inches, or None if it depends on the content."""
    return settings().size[1] if settings().size else None


def stroke(share: float = 1.0) -> float:
    """Return a line width in points. share: the fraction of the style's line width."""
    return share * float(matplotlib.rcParams["lines.linewidth"])


def points(name: str) -> float:
    """Return the size of a text in points. name: the key of the size in the style."""
    sizes: dict[str, Any] = matplotlib.rcParams  # type: ignore[assignment]
    return FontProperties(size=sizes[name]).get_size_in_points()


def wrapped(text: str, inches: float, size: str) -> str:
    """Break lines that are too long for a width. size: the key of the text's size in the style."""
    letters = max(int(inches * 72 / (LETTER * points(size))), 10)
    return "\n".join(textwrap.fill(line, letters) for line in text.split("\n"))


def set_title(figure: Figure, text: str) -> None:
    """Write a title above all panels. The text is not parsed as mathematics.

    Long lines are broken, and the figure becomes higher by the additional lines unless its height
    is fixed.
    """
    shown = wrapped(text, figure.get_figwidth(), "figure.titlesize")
    if fixed_height() is None:
        more = shown.count("\n") - text.count("\n")
        figure.set_figheight(figure.get_figheight() + more * 1.3 * points("figure.titlesize") / 72)
    figure.suptitle(shown, parse_math=False)


def set_panel_title(axes: Axes, text: str) -> None:
    """Write the title of a panel, and break lines that are longer than the panel is wide."""
    grid = axes.get_subplotspec()
    columns = 1 if grid is None else grid.get_gridspec().ncols
    axes.set_title(wrapped(text, 0.8 * width() / columns, "axes.titlesize"))


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
    axes: Axes, rounds: np.ndarray, values: np.ndarray, top: float, first: int = 0
) -> QuadMesh:
    """Draw a heat map without axis labels or colour bar."""
    rows, cells = np.arange(values.shape[1] + 1) + first - 0.5, np.ma.masked_invalid(values.T)
    image = axes.pcolormesh(cell_edges(rounds), rows, cells, cmap=colour_map(), vmin=0, vmax=top)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(integers(12))
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
    """Draw the colour bar of one or several panels. values: those that are shown."""
    finite, every = np.isfinite(values), np.ravel(np.asarray(axes))
    places = filter(None, (each.get_subplotspec() for each in every))
    rows = len({place.rowspan.start for place in places}) or 1
    clipped = image.norm.vmax is not None and bool((values[finite] > image.norm.vmax).any())
    look: dict[str, Any] = {"extend": "max" if clipped else "neither", "aspect": 20 * rows}
    bar = figure.colorbar(image, ax=axes, pad=0.02, **look)
    bar.ax.yaxis.set_major_locator(Fitting(6))
    text = label if finite.all() else f"{label}\n(grey: undefined)"
    bar.set_label(wrapped(text, 0.8 * figure.get_figheight(), "axes.titlesize"), size=label_size())


def label_size() -> Any:
    """Return the font size of colour bar labels and panel titles."""
    return matplotlib.rcParams["axes.titlesize"]


class Fitting(MaxNLocator):
    """Ticks at multiples of 1, 2 or 5 times a power of ten, not more than fit beside each other."""

    axis: Any

    def __init__(self, most: int, **options: Any):
        super().__init__(most, min_n_ticks=1, steps=[1, 2, 5, 10], **options)
        self.most = most

    def __call__(self) -> Any:
        self.set_params(nbins=int(np.clip(self.axis.get_tick_space(), 2, self.most)))
        return super().__call__()


def integers(most: int) -> Fitting:
    """Return a locator of ticks at integers. most: the approximate maximum number of ticks."""
    return Fitting(most, integer=True)


class Thinned(FixedLocator):
    """Ticks at 0 to count - 1, or at every n-th of them if not all labels fit beside each other.

    length: the length of a label along the axis, relative to the size of its font.
    """

    axis: Any

    def __init__(self, count: int, length: float):
        super().__init__(range(count))
        self.count, self.length = count, length

    def tick_values(self, vmin: Any, vmax: Any) -> Any:
        of_axis = 3 if self.axis.axis_name == "x" else 2  # length for which it computes the space
        fit = max(self.axis.get_tick_space() * of_axis / self.length, 1)
        return range(0, self.count, int(np.ceil(self.count / fit)))


def panels(
    title: str, height: float, rows: int = 1, columns: int = 1, wide: float = 0, **options: Any
) -> tuple[Figure, Any]:
    """Return a figure and its panels as an array [rows, columns].

    height, wide: the size in inches. The figure is as wide as the style's, or `wide` if this is
    more. If the style is narrower than 8 inches, a height above 3 inches is reduced. Both are
    ignored if the settings have a size. options: keyword arguments of `Figure.subplots`.
    """
    height = min(height, max(3.0, height * (width() / 8) ** 0.5))
    size: Any = settings().size or (max(width(), wide), height)
    figure = Figure(figsize=size, layout="constrained")
    if title:
        set_title(figure, title)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def fitting(count: int, inches: float, most: int = 100, between: float = 0.35) -> int:
    """Return how many of `count` panels to draw side by side, so that the last row is not short.

    Each is at least `inches` wide, and at most `most` are in a row. If the height of the figure is
    fixed, the panels are as large as possible instead. between: the height of the texts of a row.
    """
    high = fixed_height()
    best = int(np.clip(width() / inches, 1, min(count, most)))
    if high is not None:

        def size(columns: int) -> float:
            rows = -(-count // columns)
            return min(width() / columns - 0.4, 1.6 * ((high - 0.8) / rows - between))

        best = max(range(1, count + 1), key=size)
    return -(-count // -(-count // best))


def stacked(count: int, least: float = 1.0) -> int:
    """Return in how many rows to draw `count` panels that share their axis of rounds.

    They are above each other, or side by side if the height of the figure is fixed and a panel
    would be lower than `least` inches.
    """
    high = fixed_height()
    return count if high is None or (high - 0.8) / count - 0.35 >= least else 1


def is_narrow() -> bool:
    """Return whether a figure has no room for a legend beside its panels."""
    return width() < NARROW


def legend(figure: Figure, grid: Iterable[Axes], title: str = "") -> None:
    """Draw one legend for all panels next to them, or below them in a narrow figure."""
    found: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = list(found)
    if not labels:
        return
    place: dict[str, Any] = {"loc": "outside right center"}
    if is_narrow():
        columns = legend_columns(labels, len(labels))
        place = {"loc": "outside lower center", "ncols": columns, "columnspacing": 1}
        place |= {"labelspacing": 0.2, "borderpad": 0}
        title = " ".join(title.split("\n"))
    figure.legend(found.values(), labels, title=title or None, **place)


def legend_columns(labels: Sequence[str], most: int) -> int:
    """Return how many columns of a legend fit into the width of a figure, at most `most`."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    wide = (LETTER * longest + (4 if is_narrow() else 5)) * points("legend.fontsize") / 72
    return int(np.clip(0.85 * width() / wide, 1, most))


def legend_beside(axes: Axes, **options: Any) -> None:
    """Draw a panel's legend beside the panel, or above it in a narrow figure.

    Above the panel, each label is one line. options: of `Axes.legend`.
    """
    if is_narrow():
        for artist, label in zip(*axes.get_legend_handles_labels(), strict=True):
            artist.set_label(" ".join(label.split("\n")))
        legend_above(axes, 2, **options)
    else:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, **options)


def legend_above(axes: Axes, columns: int, **options: Any) -> None:
    """Draw a panel's legend above the panel. columns: the largest number of columns."""
    fit = legend_columns(axes.get_legend_handles_labels()[1], columns)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.01), "ncols": fit}
    axes.legend(**place, borderaxespad=0, **options)


def marker_distance(axes: Axes, points: int) -> int:
    """Return n if every n-th point of a curve has room for a marker. points: their number."""
    grid = axes.get_subplotspec()
    columns = 1 if grid is None else grid.get_gridspec().ncols
    return max(math.ceil(points * columns / (5 * width())), 1)


def line(
    axes: Axes, rounds: np.ndarray, values: np.ndarray, colour: str, label: str, faint: bool = False
) -> None:
    """Draw a curve, with markers if it has few points. Without points, nothing is drawn."""
    if rounds.size:
        marker = "o" if rounds.size <= 40 else None
        look: dict[str, Any] = {"marker": marker, "markersize": 3.5, "color": colour}
        axes.plot(rounds, values, **look, linewidth=stroke(0.6 if faint else 1.0), label=label)


def round_axis(axes: Axes) -> None:
    """Label the axis of rounds."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(integers(12))


def write_note(axes: Axes, why: str) -> None:
    """Write into a panel why it has no curves."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center")
    axes.set_yticks([])


def class_axis(
    axes: Axes, classes: Sequence[str], horizontal: bool = False, word: str = "class"
) -> None:
    """Label the axis of classes, or of what `word` says.

    Up to 20 classes are labelled by name, or by number if the name is empty; some labels are left
    out if they do not fit. With more classes, only some class numbers are labelled.
    """
    axis = axes.xaxis if horizontal else axes.yaxis
    if len(classes) > NAMED_CLASSES:
        axis.set_label_text(f"{word} (index)")
        axis.set_major_locator(integers(10))
        return
    axis.set_label_text(word)
    shown = one_line(class_names(classes))
    names = [name if len(name) <= 20 else f"{name[:9]}…{name[-10:]}" for name in shown]
    axis.set_ticks(range(len(names)), names, parse_math=False)
    longest = max(map(len, names))
    is_upright = horizontal and longest <= 4
    axis.set_major_locator(Thinned(len(names), 0.8 + LETTER * longest if is_upright else 1.2))
    if horizontal and not is_upright:
        axes.tick_params("x", rotation=90)
