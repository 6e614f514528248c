"""The pictures of a run: one function each, from RunData to a matplotlib Figure."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from fedexp.core.views import PLAIN, VALIDATION, named
from fedexp.figures.load import RunData, TaskFile
from fedexp.figures.style import (
    BLUE,
    GREEN,
    GREY,
    NAMED_CLASSES,
    ORANGE,
    cell_edges,
    class_axis,
    colour_bar,
    colour_map,
    entitle,
    heat_map,
    integers,
    label_size,
    line,
    map_height,
    round_panel,
    say,
    small,
    width,
)
from fedexp.metrics.forgetting import normalised_heat_map
from fedexp.metrics.history import History
from fedexp.metrics.targets import rounds_to_target
from fedexp.metrics.tasks import average_accuracy, new_task_accuracy

BUBBLES = (50, 30)  # most clients and classes for a bubble chart
MOST_COLUMNS = 400  # in a heat map of clients: two pixels each


def class_accuracy(run: RunData, history: History, view: str = PLAIN) -> Figure:
    """Heat map classes x rounds of class-wise test accuracy (FedNTD Fig. 2a, Flashback Fig. 5);
    colour 0 to 1."""
    subject = f"Class-wise test accuracy{_of(view)}"
    return _class_map(run, history, subject, history.matrix, "test accuracy of the class", top=1.0)


def class_accuracy_normalised(run: RunData, history: History, view: str = PLAIN) -> Figure:
    """Heat map of class accuracy, every round divided by its sum over the classes (FedNTD Fig. 10).

    The colour ends at 3/C, three times the share of a class in a balanced model, so that runs
    compare; more is clipped.
    """
    share = normalised_heat_map(history.matrix)
    top = min(1.0, 3 / share.shape[1])
    label = f"share of the round's summed accuracy\n(uniform: 1/C = {1 / share.shape[1]:.3g})"
    subject = f"Class-wise test accuracy{_of(view)}, normalised in every round"
    return _class_map(run, history, subject, share, label, top=top)


def tasks(run: RunData, file: TaskFile, view: str = PLAIN) -> Figure:
    """Heat map tasks x rounds of test accuracy, above the two accuracies of CFeD (Fig. 3)."""
    height = map_height(file.accuracy.shape[1])
    figure, (above, below) = _figure(
        run, f"Test accuracy on the tasks{_of(view)}", 3.7 + height, rows=2, ratio=(height, 2.2)
    )
    heat_map(
        figure, above, file.rounds, file.accuracy, "test accuracy\non the task", top=1.0, first=1
    )
    above.set_xlabel("")
    above.tick_params(labelbottom=False)
    above.set_ylabel("task")
    above.yaxis.set_major_locator(integers(NAMED_CLASSES))
    task_lines(run, above, "white", cells=True)
    series = {
        "average accuracy on the learned tasks": (average_accuracy, BLUE),
        "new-task accuracy": (new_task_accuracy, ORANGE),
    }
    for label, (measure, colour) in series.items():
        values = np.array(
            [measure(row, task) for row, task in zip(file.accuracy, file.learning, strict=True)]
        )
        defined = np.isfinite(values)
        line(below, file.rounds[defined], values[defined], colour, label)
    if not below.lines:
        say(below, "undefined before the first round")
    below.set_ylim(0, 1.03)
    below.set_ylabel("test accuracy")
    task_lines(run, below, GREY, cells=True)
    # beside it would move the colour bar away
    round_panel(below, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=3)
    below.sharex(above)
    below.set_xlabel("round")
    return figure


def curves(run: RunData) -> Figure:
    """Accuracy with its best round and the targets, above forgetting (F of FedNTD Eq. 5, round
    forgetting). The best round and those that reach a target are of the validation set where there
    is one."""
    figure, (above, below) = _figure(
        run, "Accuracy and forgetting of the global model", 5.6, rows=2
    )
    on = "test" if run.has("test_accuracy") else VALIDATION
    rounds, accuracy = run.points(f"{on}_accuracy")
    line(above, rounds, accuracy, BLUE, f"{on} accuracy")
    second = run.points("test_accuracy_augmented")
    if second[0].size:
        line(above, *second, GREEN, "the same, augmented\ntest images")
    if on == "test" and run.has("validation_accuracy"):
        rounds, accuracy = run.points("validation_accuracy")
        line(above, rounds, accuracy, GREY, "validation accuracy")
    best = int(np.argmax(accuracy))
    label = f"best: {accuracy[best]:.3f}, round {rounds[best]:.0f}"
    above.plot(
        rounds[best],
        accuracy[best],
        "*",
        color=ORANGE,
        markersize=11,
        label=label,
        clip_on=False,
        zorder=3,
    )
    for target, crossed in rounds_to_target(
        rounds.tolist(), accuracy.tolist(), sorted(run.targets), ()
    ).items():
        when = "never" if crossed is None else f"round {crossed}"
        above.axhline(
            float(target),
            color=GREY,
            linewidth=0.8,
            linestyle="--",
            label=f"target {target}: {when}",
        )
    above.set_ylim(0, 1.06 * max(accuracy.max(), *run.targets, 1e-3))
    above.set_ylabel(f"{on} accuracy")
    view = PLAIN if on == "test" else VALIDATION
    for name, colour, label, faint in (
        ("round_forgetting", BLUE, "round forgetting", True),
        ("local_round_forgetting", GREEN, "local round forgetting,\nmean of clients", True),
        ("forgetting", ORANGE, "forgetting F (BwT)", False),
    ):
        line(below, *run.points(named(name, view)), colour, label, faint=faint)
    line(below, *run.points("forgetting_augmented"), GREY, "forgetting F, augmented\ntest images")
    below.set_ylabel("forgetting")
    if not below.lines:
        say(below, "undefined before the second evaluated round")
    _round_axis(run, above, below)
    return figure


def loss(run: RunData) -> Figure:
    """Training loss of the clients and test loss of the global model."""
    figure, (axes,) = _figure(run, "Loss", 3.6)
    series = [run.points(f"{name}_loss") for name in ("train", "test", VALIDATION)]
    line(axes, *series[0], BLUE, "train loss,\nmean of clients")
    line(axes, *series[1], ORANGE, "test loss")
    line(axes, *series[2], GREEN, "validation loss")
    values = np.concatenate([v for _, v in series])
    if values.min() > 0 and values.max() > 50 * values.min():
        axes.set_yscale("log")
    axes.set_ylabel("cross-entropy")
    _round_axis(run, axes)
    return figure


def data_distribution(run: RunData, counts: np.ndarray) -> Figure:
    """Training examples of every client per class: bubbles (FedNTD Fig. 3, FedKA Fig. 2a) or, for
    many, a heat map."""
    clients, classes = counts.shape
    height = 1.6 + map_height(classes)
    subject = "Training data of the clients" + (
        ", all tasks together" if run.tasks is not None else ""
    )
    figure, (sizes, axes) = _figure(run, subject, height, rows=2, ratio=(1, height - 1))
    edges = np.arange(clients + 1) - 0.5
    sizes.stairs(counts.sum(1), edges, fill=True, color=GREY)
    sizes.set_ylabel("examples")
    sizes.set_ylim(bottom=0)
    if clients <= BUBBLES[0] and classes <= BUBBLES[1]:
        _bubbles(figure, axes, counts)
    else:
        _count_map(figure, axes, counts)
    axes.set_xlim(-0.5, clients - 0.5)
    axes.set_xlabel("client")
    axes.xaxis.set_major_locator(integers(12))
    sizes.sharex(axes)
    sizes.tick_params(labelbottom=False)
    class_axis(axes, run.classes)
    return figure


def local_round(run: RunData, history: History, view: str = PLAIN) -> Figure:
    """The round picture of the last round (Flashback Fig. 2): global model before, local models,
    global model after."""
    rows, last = round_picture(history), history.local_rounds[-1]
    names = [
        f"global, round {last - 1}",
        *(f"client {k}" for k in history.sampled[-1]),
        f"global, round {last}",
    ]
    subject = (
        f"Class-wise test accuracy{_of(view)} within round {last}: before, local models, after"
    )
    figure, (axes,) = _figure(run, subject, 1.9 + map_height(len(names)))
    image = axes.imshow(
        rows, aspect="auto", interpolation="nearest", cmap=colour_map(), vmin=0, vmax=1
    )
    for boundary in (0.5, len(rows) - 1.5):
        axes.axhline(boundary, color="white", linewidth=2.5 if len(rows) < 30 else 1)
    colour_bar(figure, axes, image, "test accuracy of the class", rows)
    # name at most 30 rows, none of them beside the two global ones unless all fit
    step = -(-len(names) // 30)
    shown = [0, *range(step, len(names) - step, step), len(names) - 1]
    axes.set_yticks(shown, [names[i] for i in shown], fontsize=small())
    class_axis(axes, run.classes, horizontal=True)
    return figure


def round_picture(history: History) -> np.ndarray:
    """[S + 2, C]: class accuracy of the global model before, of the S local models, and of the
    global model after.

    The row of a global model that was not evaluated is nan.
    """
    by_round = dict(zip(history.rounds, history.class_accuracy, strict=True))
    local, last = history.local_class_accuracy[-1], history.local_rounds[-1]
    absent = np.full(local.shape[1], np.nan)
    return np.vstack([by_round.get(last - 1, absent), local, by_round.get(last, absent)])


def _of(view: str) -> str:
    """Return what a title adds for a view of the test set."""
    return {PLAIN: "", VALIDATION: ", validation set"}.get(view, f", {view} test images")


def _figure(
    run: RunData, subject: str, height: float, rows: int = 1, ratio: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width(), height), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, height_ratios=ratio)[:, 0]
    entitle(figure, f"{subject}\n{run.title}")
    return figure, list(axes)


def _class_map(
    run: RunData, history: History, subject: str, values: np.ndarray, label: str, top: float
) -> Figure:
    """Draw `values` [R, C] as a figure of one heat map."""
    figure, (axes,) = _figure(run, subject, 1.5 + map_height(values.shape[1]))
    heat_map(figure, axes, np.array(history.rounds), values, label, top)
    class_axis(axes, run.classes)
    task_lines(run, axes, "white", cells=True)
    return figure


def task_lines(run: RunData, axes: Axes, colour: str, cells: bool = False) -> None:
    """Draw a thin line where a task other than the first begins: between two rounds or, in a heat
    map, two cells."""
    if run.tasks is None:
        return
    rounds, ends = run.tasks.rounds, run.tasks.ends
    for i, border in enumerate(cell_edges(rounds)[ends + 1] if cells else rounds[ends] + 0.5):
        axes.axvline(
            border,
            color=colour,
            linewidth=0.8,
            linestyle=":",
            label="" if i else "a new task begins",
        )


def _bubbles(figure: Figure, axes: Axes, counts: np.ndarray) -> None:
    """Draw one disc per client and class, its area proportional to the number of examples."""
    clients, classes = counts.shape
    cell = min(72 * 0.75 * width() / clients, 72 * 0.9 * map_height(classes) / classes)  # points
    scale = 1.2 * cell**2 / max(counts.max(), 1)
    client, label = counts.nonzero()
    axes.scatter(
        client,
        label,
        s=np.maximum(counts[client, label] * scale, 0.8),
        color=BLUE,
        alpha=0.75,
        linewidth=0,
    )
    for example in sorted({max(int(counts.max() * part), 1) for part in (0.1, 0.5, 1)}):
        axes.scatter(
            [], [], s=example * scale, color=BLUE, alpha=0.75, linewidth=0, label=f"{example}"
        )
    axes.set_ylim(classes - 0.3, -0.7)
    axes.grid(True)
    axes.legend(
        title="examples", loc="upper left", bbox_to_anchor=(1.01, 1), labelspacing=1.2, frameon=True
    )


def _count_map(figure: Figure, axes: Axes, counts: np.ndarray) -> None:
    """Draw counts as colours on a logarithmic scale; white = none."""
    edges, pooled = pool_clients(counts, MOST_COLUMNS)
    size = int(edges[1] - edges[0])
    present = np.ma.masked_equal(pooled.T, 0)
    norm = LogNorm(1, max(counts.max(), 2))
    rows, colours = np.arange(counts.shape[1] + 1) - 0.5, colour_map().with_extremes(bad="white")
    image = axes.pcolormesh(edges - 0.5, rows, present, cmap=colours.reversed(), norm=norm)
    axes.invert_yaxis()
    pooling = f"\n(largest of {size} neighbouring clients)" if size > 1 else ""
    figure.colorbar(image, ax=axes, pad=0.02).set_label(
        f"examples, white: none{pooling}", fontsize=label_size()
    )


def pool_clients(counts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduce counts [K, C] to at most `most` rows, each the maximum over a run of neighbouring
    clients.

    Returns the borders [G + 1] of the runs and the maxima [G, C]. All runs but the last have the
    same length.
    """
    starts = np.arange(0, len(counts), -(-len(counts) // most))
    return np.append(starts, len(counts)), np.maximum.reduceat(counts, starts, axis=0)


def _round_axis(run: RunData, *panels: Axes) -> None:
    """Give all panels the same round axis, from the first row of rounds.csv to the last, and
    legends beside them."""
    rounds = run.columns["round"]
    first, last = np.nanmin(rounds), np.nanmax(rounds)
    margin = 0.02 * max(last - first, 1)
    for axes in panels:
        task_lines(run, axes, GREY)
        axes.set_xlim(first - margin, last + margin)
        round_panel(axes, loc="upper left", bbox_to_anchor=(1.01, 1))
    panels[-1].set_xlabel("round")
