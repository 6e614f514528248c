"""Draw the figures of forgetting in detail, from a run and its record."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedexp.data.views import PLAIN, data_name, name_in_view
from fedexp.figures.draw import draw_cells, figure_of, name_images, name_view
from fedexp.figures.load import RunData, TaskFile
from fedexp.figures.style import (
    ABSENT,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    class_axis,
    class_names,
    colour_bar,
    colour_map,
    integers,
    legend_above,
    legend_beside,
    line,
    map_height,
    round_axis,
    stroke,
)
from fedexp.metrics.examples import forgetting_events
from fedexp.metrics.forgetting import forgetting_degree
from fedexp.metrics.own_test import own_results
from fedexp.metrics.personal import ClientResults, client_results, spread
from fedexp.metrics.record import Record
from fedexp.metrics.timing import curve_of_absence, lost, phase_ends

# key of `client_results` or `own_results` -> label and colour
MODELS = {
    "personal": ("personal model", GREEN),
    "personal_global": ("global model", BLUE),
    "own": ("model that the client uses", GREEN),
    "own_global": ("global model", BLUE),
    "own_local": ("local model", ORANGE),
}


def class_reduction(run: RunData, record: Record) -> Figure:
    """Draw the forgetting degree of classes that the schedule reduces (FedKA Eq. 1, Fig. 3).

    Values are clipped at -1. The lower panel shows how many training examples of the class the
    client has. At most six pairs of client and class are drawn.
    """
    subject = "Forgetting degree of a class whose examples are reduced"
    figure, (above, below) = figure_of(run, subject, 5.2, (2, 1), sharex=True)
    every = np.arange(1, max(record.local_rounds) + 1)
    for number, (client, label) in enumerate(run.reduced[:6]):
        look: dict[str, Any] = {"color": f"C{number}", "linewidth": stroke(0.8)}
        name = class_names(run.classes)[label] if label < len(run.classes) else label
        look_above = look | {"label": f"class {name}, client {client}"}
        rounds, degrees, _ = local_series(record, client)
        above.plot(rounds, degrees[:, label], **look_above)
        held = [record.counts_in(int(n))[client, label] for n in every]
        below.step(every, held, where="mid", **look)
    for axes in (above, below):
        for start in record.starts[1:]:
            axes.axvline(start - 0.5, color=GREY, linewidth=0.8, linestyle=":")
    above.set_ylabel("forgetting degree\n(clipped at -1)")
    legend_above(above, 3)
    below.set_ylabel("training examples")
    below.set_ylim(bottom=0)
    round_axis(below)
    return figure


def local_series(record: Record, client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rounds [T], forgetting degrees [T, C], class accuracies [T, C]) for one client.

    The values describe the client's local model after each round in which the client took part.
    Degrees are clipped at -1.
    """
    rounds, values = [], []
    for index, number in enumerate(record.local_rounds):
        for local in record.local_class_accuracy[index][record.sampled[index] == client]:
            degree = forgetting_degree(record.distributed(number), local)
            rounds.append(number)
            values.append((np.maximum(degree, -1.0), local))
    shape = (len(rounds), 2, record.counts.shape[-1])
    degrees, accuracies = np.array(values).reshape(shape).swapaxes(0, 1)
    return np.array(rounds), degrees, accuracies


def example_forgetting(run: RunData, record: Record, view: str = PLAIN) -> Figure:
    """Draw how often the examples of each class are forgotten (Toneva et al., ICLR 2019)."""
    right, labels = record.correct(), record.labels
    assert labels is not None
    events, learned = forgetting_events(right), right.any(0)
    kinds = {
        "never forgotten": learned & (events == 0),
        "once": events == 1,
        "2 to 4 times": (events >= 2) & (events <= 4),
        "5 times or more": events >= 5,
        "never learned": ~learned,
    }
    classes = record.counts.shape[-1]
    totals = np.bincount(labels, minlength=classes).clip(min=1)
    subject = f"How often {data_name(view)} examples are forgotten{name_images(view)}"
    figure, (axes,) = figure_of(run, subject, 1.6 + map_height(classes))
    start = np.zeros(classes)
    shades = [*colour_map()(np.linspace(0.9, 0.2, len(kinds) - 1)), ABSENT]
    for (name, members), colour in zip(kinds.items(), shades, strict=True):
        shares = np.bincount(labels[members], minlength=classes) / totals
        axes.barh(np.arange(classes), shares, left=start, color=colour, height=0.8, label=name)
        start += shares
    axes.set_xlim(0, 1)
    axes.set_ylim(classes - 0.5, -0.5)
    axes.set_xlabel(f"share of the {data_name(view)} examples of the class")
    legend_above(axes, 3)
    class_axis(axes, run.classes)
    return figure


def phases(run: RunData, record: Record, view: str = PLAIN) -> Figure:
    """Draw the accuracy lost since round 1, and how much of it each third of the rounds lost."""
    subject = f"Accuracy lost in each third of the rounds{name_view(view)}"
    figure, (axes,) = figure_of(run, subject, 3.6)
    rounds, values = np.array(record.rounds[1:]), lost(record.matrix)
    line(axes, rounds, values, ORANGE, "")
    ends = phase_ends(rounds)
    if ends is not None:
        edges = [rounds[0], *rounds[ends]]
        shares = np.diff(values[ends], prepend=0.0)
        for start, end, share in zip(edges, edges[1:], shares, strict=False):
            axes.axvline(end, color=GREY, linewidth=0.8, linestyle=":")
            axes.text(
                (start + end) / 2,
                1.0,
                f"{share:+.3f}",
                ha="center",
                va="bottom",
                transform=axes.get_xaxis_transform(),
            )
    else:
        axes.set_title("thirds undefined: one of them has no evaluated round")
    axes.set_ylabel("best class accuracy so far\nminus now, mean over classes")
    axes.set_ylim(bottom=0)
    round_axis(axes)
    return figure


def absence(run: RunData, record: Record, view: str = PLAIN) -> Figure:
    """Draw forgetting against the rounds since the cohort last held a class, and how often each."""
    subject = f"Forgetting of a class by its absence from the cohorts{name_view(view)}"
    figure, (above, below) = figure_of(run, subject, 5.2, (2, 1), sharex=True)
    steps, means, pairs = curve_of_absence(record)
    line(above, steps, means, ORANGE, "")
    above.set_ylabel("forgetting of the class,\nmean over rounds")
    below.bar(steps, pairs, color=BLUE)
    below.set_yscale("log")
    below.set_ylim(bottom=0.5)  # a bar of one class in one round is visible
    below.set_ylabel("classes, summed\nover rounds")
    below.set_xlabel("rounds since a client of the cohort held the class")
    below.xaxis.set_major_locator(integers(12))
    return figure


def task_matrix(run: RunData, file: TaskFile, view: str = PLAIN) -> Figure:
    """Draw the accuracy on each learned task after each task as a heat map with numbers.

    Numbers, in per cent, are left out if there are more than 12 tasks.
    """
    cells, of = file.matrix, data_name(view).capitalize()
    subject = f"{of} accuracy on the tasks after each task{name_images(view)}"
    figure, (axes,) = figure_of(run, subject, 1.6 + 1.4 * map_height(len(cells)))
    image = draw_cells(axes, cells, colour_map().with_extremes(bad="white"), vmin=0, vmax=1)
    tasks = [np.arange(count) for count in cells.shape]
    for after, task in np.argwhere(~np.isnan(cells)) if cells.shape[1] <= 12 else ():
        value = cells[after, task]
        colour = "white" if sum(image.to_rgba(value)[:3]) < 1.5 else "black"
        axes.text(
            task,
            after,
            f"{100 * value:.1f}",
            color=colour,
            ha="center",
            va="center",
            fontsize="small",
        )
    axes.set_xticks(tasks[1], tasks[1] + 1)
    axes.set_yticks(tasks[0], tasks[0] + 1)
    axes.set_xlabel("accuracy on task")
    axes.set_ylabel("after task")
    label = f"{data_name(view)} accuracy{' (numbers: in %)' if axes.texts else ''}"
    colour_bar(figure, axes, image, label, cells[~np.isnan(cells)])
    return figure


def clients(run: RunData, record: Record, view: str = PLAIN) -> Figure:
    """Draw the accuracy and forgetting of every client on its own classes."""
    found = client_results(record)
    if len(found) == 1:  # clients have no other model than the global one
        found = {"personal_global": found["personal"]}
    elif name_in_view("personal_global_accuracy", view) not in run.rounds:  # no global model
        del found["personal_global"]
    return sorted_clients(
        run, found, f"Results of the clients on their own classes{name_view(view)}"
    )


def own_tests(run: RunData, record: Record, view: str = PLAIN) -> Figure:
    """Draw the accuracy and forgetting of every client on examples of its own."""
    own = f"their own {data_name(view)} examples{name_images(view)}"
    return sorted_clients(run, own_results(record), f"Results of the clients on {own}")


def sorted_clients(run: RunData, found: ClientResults, subject: str) -> Figure:
    """Draw results of the clients, each sorted from the worst to the best.

    Thin lines show the mean over the clients and, dotted, that of the worst tenth, which is shaded.
    """
    figure, both = figure_of(run, subject, 5.6, (1, 1))
    for axes, which, measure in zip(both, (0, 1), ("accuracy", "forgetting"), strict=True):
        most = 0
        for name, values in found.items():
            text, colour = MODELS[name]
            shown = np.sort(values[which][~np.isnan(values[which])])
            shown = shown if which == 0 else shown[::-1]
            mean, deviation, worst = spread(shown, low_is_bad=which == 0)
            label = f"{text}: {mean:.3f} ± {deviation:.3f},\nworst tenth {worst:.3f}"
            axes.plot(np.arange(1, len(shown) + 1), shown, color=colour, label=label)
            axes.axhline(mean, color=colour, linewidth=stroke(0.5))
            axes.axhline(worst, color=colour, linestyle=":", linewidth=stroke(0.5))
            axes.axvspan(0.5, np.ceil(len(shown) / 10) + 0.5, color=ABSENT, zorder=0)
            most = max(most, len(shown))
        axes.set_ylabel(measure)
        axes.set_xlim(0.5, most + 0.5)
        axes.xaxis.set_major_locator(integers(12))
        legend_beside(axes)
    both[0].set_ylim(-0.03, 1.03)  # a line at 0 is visible
    axes.set_xlabel("clients, from the worst to the best")
    return figure
