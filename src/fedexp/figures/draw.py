"""Draw the figures of a run. Each function takes RunData and returns a matplotlib Figure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fedexp.data.views import AUGMENTED, PLAIN, VALIDATION, data_name
from fedexp.figures.load import RunData, TaskFile
from fedexp.figures.style import (
    BLUE,
    GREEN,
    GREY,
    NAMED_CLASSES,
    ORANGE,
    class_axis,
    colour_bar,
    colour_map,
    fitting,
    integers,
    is_narrow,
    label_size,
    legend_above,
    legend_beside,
    line,
    map_cells,
    map_height,
    panels,
    points,
    round_axis,
    set_panel_title,
    write_note,
)
from fedexp.metrics.forgetting import normalised_heat_map
from fedexp.metrics.forgetting_metric import FORGETTING, LOCAL_ROUND_FORGETTING, ROUND_FORGETTING
from fedexp.metrics.quantity import ACCURACY, LOSS, TRAIN_LOSS, Column
from fedexp.metrics.record import Record
from fedexp.metrics.targets import rounds_to_target
from fedexp.metrics.tasks import AVERAGE_ACCURACY, NEW_TASK_ACCURACY

PER_ROW = 4  # maximum number of heat maps side by side
WHAT_F_IS = "forgetting F: best since\nround 1 minus last;\nnegative if the last is best"
ACCURACIES = (
    (Column(ACCURACY), BLUE),
    (Column(ACCURACY, AUGMENTED), GREEN),
    (Column(ACCURACY, VALIDATION), GREY),
)
TASK_ACCURACIES = (
    (AVERAGE_ACCURACY, BLUE, "average accuracy on the learned tasks"),
    (NEW_TASK_ACCURACY, ORANGE, "new-task accuracy"),
)
LOSSES = (
    (Column(TRAIN_LOSS), BLUE),
    (Column(LOSS), ORANGE),
    (Column(LOSS, VALIDATION), GREEN),
)


def class_accuracy(
    run: RunData, record: Record, view: str = PLAIN, normalised: bool = False
) -> Figure:
    """Draw class accuracies as a heat map (classes x rounds; FedNTD Fig. 2a, Flashback Fig. 5)."""
    return class_maps([("", run, record)], run.title, normalised, view)


def domain_accuracy(run: RunData, record: Record, view: str = PLAIN) -> Figure:
    """Draw the accuracies on the domains as a heat map (domains x rounds)."""
    assert record.domains is not None, "listed for runs with domains"
    shown = replace(run, classes=run.domains)
    return class_maps([("", shown, record.domains)], run.title, False, view, "domain")


def class_maps(
    shown: Sequence[tuple[str, RunData, Record]],
    title: str,
    normalised: bool,
    view: str = PLAIN,
    word: str = "class",
) -> Figure:
    """Draw the runs' heat maps (classes x rounds) side by side, on the same colour scale.

    normalised: divide the values of each round by their sum over classes (FedNTD Fig. 10). The
    colour scale then ends at 3/C (three times the share of a class in a balanced model), so that
    runs can be compared. Larger values are clipped. view: the data of the records. word: what the
    rows are.
    """
    classes = shown[0][1].classes
    columns = fitting(len(shown), 1.6, PER_ROW)
    rows = -(-len(shown) // columns)
    height = 0.9 + rows * (0.6 + map_height(len(classes)) * (1 if len(shown) == 1 else 0.75))
    end = ", normalised in every round" if normalised else ""
    figure, grid = panels(
        f"{word.capitalize()}-wise {data_name(view)} accuracy{name_images(view)}{end}\n{title}",
        height,
        rows,
        columns,
        sharex=True,
        sharey=True,
    )
    top, label = 1.0, f"{data_name(view)} accuracy of the {word}"
    if normalised:
        top = min(1.0, 3 / len(classes))
        label = f"share of the round's summed accuracy\n(uniform: 1/C = {1 / len(classes):.3g})"
    maps = []
    for number, (axes, (name, run, record)) in enumerate(zip(grid.flat, shown, strict=False)):
        maps.append(normalised_heat_map(record.matrix) if normalised else record.matrix)
        image = map_cells(axes, np.array(record.rounds), maps[-1], top)
        task_lines(run, axes, "white")
        axes.tick_params(labelbottom=number + columns >= len(shown))
        set_panel_title(axes, name)
    grid.flat[0].set_ylim(len(classes) - 0.5, -0.5)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    class_axis(grid[0, 0], classes, word=word)
    size = rcParams["axes.labelsize"]
    figure.supylabel(grid[0, 0].get_ylabel(), fontsize=size)
    grid[0, 0].set_ylabel("")
    figure.supxlabel("round", fontsize=size)
    values = np.concatenate([each.ravel() for each in maps])
    colour_bar(figure, list(grid.flat), image, label, values)
    return figure


def tasks(run: RunData, file: TaskFile, view: str = PLAIN) -> Figure:
    """Draw the accuracy as a heat map (tasks x rounds) above the curves of CFeD Fig. 3."""
    height = map_height(file.accuracy.shape[1])
    subject = f"{data_name(view).capitalize()} accuracy on the tasks{name_images(view)}"
    figure, (above, below) = figure_of(run, subject, 3.7 + height, (height, 2.2))
    image = map_cells(above, file.rounds, file.accuracy, 1.0, first=1)
    colour_bar(figure, above, image, f"{data_name(view)} accuracy\non the task", file.accuracy)
    above.tick_params(labelbottom=False)
    above.set_ylabel("task")
    above.yaxis.set_major_locator(integers(NAMED_CLASSES))
    task_lines(run, above, "white")
    for quantity, colour, label in TASK_ACCURACIES:
        line(below, *run.points(Column(quantity, view).name), colour, label)
    if not below.lines:
        write_note(below, "undefined before the first round")
    below.set_ylim(0, 1.03)
    below.set_ylabel(f"{data_name(view)} accuracy")
    task_lines(run, below, GREY)
    below.sharex(above)
    round_axis(below)
    if below.lines:
        legend_above(below, 3)  # a legend beside the panel would move the colour bar
    return figure


def curves(run: RunData) -> Figure:
    """Draw accuracy and forgetting against the round (F of FedNTD Eq. 5, and round forgetting).

    The accuracy panel marks the best round and the targets. If the run has a validation set, the
    best round and the rounds that reach a target are determined from the validation accuracy.
    """
    figure, (above, below) = figure_of(
        run, "Accuracy and forgetting of the global model", 5.6, (1, 1)
    )
    for column, colour in ACCURACIES:
        line(above, *run.points(column.name), colour, column.label)
    validated = run.has("validation_accuracy")
    chosen = "validation_accuracy" if validated else "test_accuracy"
    rounds, accuracy = run.points(chosen)
    best = int(np.argmax(np.where(rounds > 0, accuracy, -1)))  # not of the initial model
    size = 1.3 * points("legend.fontsize")  # no higher than a line of the legend
    look: dict[str, Any] = {"color": ORANGE, "markersize": size, "clip_on": False, "zorder": 3}
    label = f"best: {accuracy[best]:.3f}, round {rounds[best]:.0f}"
    above.plot(rounds[best], accuracy[best], "*", **look, label=label)
    reached = rounds_to_target(rounds.tolist(), accuracy.tolist(), sorted(run.targets), ())
    for target, crossed in reached.items():
        label = f"target {target}: {'never' if crossed is None else f'round {crossed}'}"
        above.axhline(float(target), color=GREY, linewidth=0.8, linestyle="--", label=label)
    above.set_ylim(0, 1.06 * max(accuracy.max(), *run.targets, 1e-3))
    above.set_ylabel("accuracy")
    view = PLAIN if run.has("test_accuracy") else VALIDATION
    for quantity, colour in ((ROUND_FORGETTING, BLUE), (LOCAL_ROUND_FORGETTING, GREEN)):
        there = run.points(Column(quantity, view).name)
        line(below, *there, colour, quantity.label, faint=True)
    label = FORGETTING.label if is_narrow() else WHAT_F_IS  # a narrow figure has a caption
    line(below, *run.points(Column(FORGETTING, view).name), ORANGE, label)
    augmented = Column(FORGETTING, AUGMENTED)
    line(below, *run.points(augmented.name), GREY, augmented.label)
    below.set_ylabel(f"forgetting,\n{data_name(view)} set" if validated else "forgetting")
    if not below.lines:
        write_note(below, "undefined before the second evaluated round")
    _round_axes(run, above, below)
    return figure


def loss(run: RunData) -> Figure:
    """Draw the clients' training loss and the global model's test and validation loss.

    The training loss is what clients minimise, with penalties; the others are cross-entropies.
    """
    figure, (axes,) = figure_of(run, "Loss", 3.6)
    for column, colour in LOSSES:
        line(axes, *run.points(column.name), colour, column.label)
    low, high = axes.dataLim.intervaly
    if low > 0 and high > 50 * low:
        axes.set_yscale("log")
    axes.set_ylabel("loss")
    _round_axes(run, axes)
    return figure


def data_distribution(run: RunData, counts: np.ndarray) -> Figure:
    """Draw each client's number of training examples per class (FedNTD Fig. 3, FedKA Fig. 2a).

    The colour scale is logarithmic, from light for one example to dark. White cells contain no
    examples. The colours differ from those of accuracies, for which bright is much.
    """
    clients, classes = counts.shape
    height = 1.6 + map_height(classes)
    more = ", all tasks together" if run.tasks is not None else ""
    subject = f"Training data of the clients{more}"
    figure, (sizes, axes) = figure_of(run, subject, height, (1, height - 1))
    sizes.stairs(counts.sum(1), np.arange(clients + 1) - 0.5, fill=True, color=GREY)
    sizes.set_ylabel("examples")
    sizes.set_ylim(bottom=0)
    sizes.tick_params(labelbottom=False)
    shown, colours = np.ma.masked_equal(counts.T, 0), colormaps["Blues"].with_extremes(bad="white")
    scale = LogNorm(0.5, max(counts.max(), 2))  # the lightest blue, of 0.5, is almost white
    image = draw_cells(axes, shown, colours, norm=scale)
    bar = figure.colorbar(image, ax=axes, pad=0.02, format="{x:.0f}")
    bar.ax.set_ylim(1, scale.vmax)
    bar.set_label("examples, white: none", fontsize=label_size())
    axes.set_xlabel("client")
    axes.xaxis.set_major_locator(integers(12))
    sizes.sharex(axes)
    class_axis(axes, run.classes)
    return figure


def local_round(run: RunData, record: Record, view: str = PLAIN) -> Figure:
    """Draw class accuracies in the last round with local models (Flashback Fig. 2).

    The rows are the global model before the round, the local models, and the global model after the
    round.
    """
    rows, last = round_picture(record), record.local_rounds[-1]
    clients = [f"client {k}" for k in record.sampled[-1]]
    names = [f"global, round {last - 1}", *clients, f"global, round {last}"]
    what = f"Class-wise {data_name(view)} accuracy{name_images(view)}"
    subject = f"{what} before, within and after round {last}"
    figure, (axes,) = figure_of(run, subject, 1.9 + map_height(len(names)))
    image = round_map(axes, rows)
    colour_bar(figure, axes, image, f"{data_name(view)} accuracy of the class", rows)
    # Label only rows that are not too close. If some rows have no label, leave a gap next to the
    # two global models.
    step = -(-len(names) // (6 if is_narrow() else 30))
    shown = [0, *range(step, len(names) - step, step), len(names) - 1]
    axes.set_yticks(shown, [names[i] for i in shown], fontsize="small")
    class_axis(axes, run.classes, horizontal=True)
    return figure


def round_map(axes: Axes, rows: np.ndarray) -> AxesImage:
    """Draw the heat map of a round. Lines separate the global models from the local models."""
    image = draw_cells(axes, rows, colour_map(), vmin=0, vmax=1)
    for boundary in (0.5, len(rows) - 1.5):
        axes.axhline(boundary, color="white", linewidth=2.5 if len(rows) < 30 else 1)
    return image


def draw_cells(axes: Axes, cells: np.ndarray, colours: Colormap, **scale: Any) -> AxesImage:
    """Draw a matrix as coloured cells. scale: arguments of `Axes.imshow` for the colours."""
    axes.grid(False)
    return axes.imshow(cells, colours, aspect="auto", interpolation="nearest", **scale)


def round_picture(record: Record) -> np.ndarray:
    """Return the class accuracies before, during and after a round, [S + 2, C].

    The round is the last one in which local models were tested. The rows are the global model
    before the round, the S local models, and the global model after the round. If a global model
    was not evaluated, its row is nan.
    """
    by_round = dict(zip(record.rounds, record.class_accuracy, strict=True))
    local, last = record.local_class_accuracy[-1], record.local_rounds[-1]
    absent = np.full(local.shape[1], np.nan)
    before = record.distributed_accuracy[-1:] or [by_round.get(last - 1, absent)]
    return np.vstack([before[0], local, by_round.get(last, absent)])


def name_view(view: str) -> str:
    """Return the part of a figure's title that names a view, if the title names no data."""
    return ", validation set" if view == VALIDATION else name_images(view)


def name_images(view: str) -> str:
    """Return the part of a figure's title that names a view, after the word `data_name`."""
    return f", {AUGMENTED} test images" if view == AUGMENTED else ""


def figure_of(
    run: RunData, subject: str, height: float, ratio: Sequence[float] = (1,), **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of a run with one column of panels.

    ratio: the relative heights of the panels. options: see `panels`.
    """
    title = f"{subject}\n{run.title}"
    figure, grid = panels(title, height, rows=len(ratio), height_ratios=ratio, **options)
    return figure, list(grid[:, 0])


def task_lines(run: RunData, axes: Axes, colour: str) -> None:
    """Draw a thin line after the last round of each task that is followed by another task."""
    for i, last in enumerate(run.tasks.last_rounds if run.tasks else ()):
        label = "" if i else "a new task begins"
        axes.axvline(last + 0.5, color=colour, linewidth=0.8, linestyle=":", label=label)


def _round_axes(run: RunData, *every: Axes) -> None:
    """Draw the same axis of rounds in all panels, and the legends next to the panels.

    The axis covers all rounds in rounds.csv.
    """
    first, last = run.rounds["round"].min(), run.rounds["round"].max()
    margin = 0.02 * max(last - first, 1)
    for axes in every:
        task_lines(run, axes, GREY)
        axes.set_xlim(first - margin, last + margin)
        round_axis(axes)
        axes.label_outer()
        if axes.lines:
            legend_beside(axes)
