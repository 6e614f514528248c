"""Figures in the layouts of the papers: one function each, from labelled runs to a matplotlib
Figure.

Every function has the settings of a sweep (`sweep_figures.Setting`), the title of the sweep, and
options of its own.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedexp.analysis import draw_sweep
from fedexp.analysis.draw_sweep import panels_of, shortened
from fedexp.analysis.posthoc import draw as draw_models
from fedexp.analysis.posthoc.neurons import preferred_classes
from fedexp.analysis.posthoc.subject import last_local_round, load_subject
from fedexp.analysis.sweep_figures import Method, Setting
from fedexp.core.errors import ConfigError
from fedexp.figures import draw
from fedexp.figures.load import RunData
from fedexp.figures.style import (
    class_axis,
    colour_bar,
    legend,
    map_height,
    panels,
    round_axis,
    stroke,
)
from fedexp.metrics import forgetting
from fedexp.metrics.history import History

KINDS = {"dominant": "C1", "non-dominant": "C0", "missing": "C3"}  # of a client's classes -> colour
DOMINANCE = 0.5  # times 1/C: the share from which on a class is dominant (docs/papers/fedka.md)


def flat(settings: Sequence[Setting]) -> list[Method]:
    """Return the methods of all settings under their labels; of settings with one and the same
    method each, the setting is the label."""
    if len(settings) == 1:
        return list(settings[0].methods)
    same = len({method.name for setting in settings for method in setting.methods}) == 1
    pairs = [(setting, method) for setting in settings for method in setting.methods]
    return [
        Method(s.name if same else f"{s.name}, {m.name}", m.runs, number)
        for number, (s, m) in enumerate(pairs)
    ]


def history_of(method: Method, local: bool = False) -> History:
    """Return the class accuracies of a method's first run; raise ConfigError where it has none
    (local: of local models)."""
    found = method.files[0].history
    if found is None or (local and not found.local_rounds):
        needs = " of local models (forgetting_metric=all)" if local else ""
        raise ConfigError(f"{method.runs[0].directory}: no class accuracies{needs}")
    return found


def class_maps(settings: Sequence[Setting], title: str, normalised: bool = False) -> Figure:
    """Draw heat maps classes x rounds of all runs beside each other (FedNTD Fig. 2a, 10; Flashback
    Fig. 1b, 5)."""
    shown = tuple(flat(settings))
    for method in shown:
        history_of(method)
    return draw_sweep.class_accuracy(Setting(title, shown, settings[0].common), normalised)


def class_curves(settings: Sequence[Setting], title: str) -> Figure:
    """Draw the accuracy of each class over the rounds, and that of all together, a panel a run
    (FedKA Fig. 1)."""
    shown = flat(settings)
    text = f"Class-wise test accuracy of the global model\n{said_of(settings, title)}"
    figure, ((*every,),) = panels(shortened(text), 3.7, columns=len(shown), sharey=True)
    for axes, method in zip(every, shown, strict=True):
        history = history_of(method)
        count = history.matrix.shape[1]
        for c, values in enumerate(history.matrix.T):
            style = draw_models.class_style(c, count) | {"linewidth": stroke(0.5), "alpha": 0.8}
            axes.plot(history.rounds, values, **style)
        mean, style = np.nanmean(history.matrix, 1), {"color": "black", "linewidth": stroke(1.6)}
        axes.plot(history.rounds, mean, **style, label="mean of the classes")
        axes.set_title(method.name)
        round_axis(axes, 8)
    every[0].set_ylabel("test accuracy")
    every[0].legend(loc="lower right")
    classes = shown[0].files[0].classes
    draw_models.draw_class_legend(figure, every, np.arange(len(classes)), classes)
    return figure


def consistency(settings: Sequence[Setting], title: str) -> Figure:
    """Draw the cosine of the class accuracies of consecutive rounds (FedNTD Fig. 2b), mean over
    seeds."""
    series = []
    for method in flat(settings):
        history_of(method)
        histories = [file.history for file in method.files if file.history]
        size = min(len(history.rounds) for history in histories)
        values = np.stack([forgetting.consistency(history.matrix[:size]) for history in histories])
        series.append((method, np.array(histories[0].rounds[1:size]), values))
    subject = "Cosine similarity of class accuracies with the round before"
    text = f"{subject}\n{said_of(settings, title)}"
    return draw_sweep.curves_of(text, "cosine similarity", series)


def curves(
    settings: Sequence[Setting], title: str, column: str = "test_accuracy", label: str = ""
) -> Figure:
    """Draw a column of rounds.csv over the rounds, mean over seeds in a band of one standard
    deviation."""
    label = label or column.replace("_", " ")
    series = [(method, *method.curve(column)) for method in flat(settings)]
    if not any(rounds.size for _, rounds, _ in series):
        raise ConfigError(f"no run has the column {column} in its rounds.csv")
    return draw_sweep.curves_of(f"{label}\n{said_of(settings, title)}", label, series)


def levels(settings: Sequence[Setting], title: str, value: str = "forgetting") -> Figure:
    """Draw a value of summary.json by setting, a line of bars for each method (FedNTD Fig. 2c,
    whose settings are levels of heterogeneity and whose "methods" are data sets): mean over seeds,
    bars of one standard deviation."""
    subject = f"{value.capitalize()} by heterogeneity"
    figure, (axes,) = panels_of(f"{subject}\n{said_of(settings, title)}")
    names = list(dict.fromkeys(method.name for setting in settings for method in setting.methods))
    for number, name in enumerate(names):
        points = [
            (i, *found)
            for i, setting in enumerate(settings)
            for method in setting.methods
            if method.name == name and (found := draw_sweep.mean_and_spread(method.runs, value))
        ]
        if points:
            at, mean, spread = np.array(points).T
            places = at + (number - (len(names) - 1) / 2) * 0.8 / len(names)
            bars = spread if np.isfinite(spread).any() else None  # one seed alone has none
            look = f"C{number}"
            wide = 0.75 / len(names)
            axes.bar(places, mean, wide, yerr=bars, color=look, label=name, capsize=3)
    axes.set_xticks(range(len(settings)), [setting.name for setting in settings])
    axes.set_ylabel(value)
    axes.grid(False, axis="x")
    if len(names) > 1:
        legend(figure, axes)
    return figure


def data(settings: Sequence[Setting], title: str) -> Figure:
    """Draw the training data of the clients of the first run (FedKA Fig. 2a)."""
    run = settings[0].methods[0].files[0]
    if run.counts is None:
        raise ConfigError("no partition.npz is there")
    return draw.data_distribution(run, run.counts)


def client_classes(settings: Sequence[Setting], title: str, client: int = 3) -> Figure:
    """Draw the forgetting degree (FedKA Eq. 1, clipped at -1) of each class in the local model of
    one client over the rounds (FedKA Fig. 2b), of the first run; colours say which classes are
    dominant for it."""
    method = settings[0].methods[0]
    run, (rounds, degree, _) = method.files[0], series_of(method, client)
    kinds = kinds_of_classes(counts_of(run, client))
    subject = f"Forgetting degree of each class, client {client}"
    figure, (axes,) = panels_of(f"{subject}\n{said_of(settings, title)}: {method.label}")
    for c, kind in enumerate(kinds):
        style = draw_models.class_style(c, len(kinds)) | {"color": KINDS[kind]}
        share = f"{run.classes[c]} ({kind})" if len(kinds) <= 20 else None
        thick = stroke(1.3 if kind == "dominant" else 0.6)
        axes.plot(rounds, degree[:, c], **style, linewidth=thick, label=share)
    axes.axhline(0, color="0.45", linewidth=0.8)
    axes.set_ylabel("forgetting degree (gains clipped at -1)")
    round_axis(axes, 8)
    legend(figure, axes)
    return figure


def client_class(
    settings: Sequence[Setting], title: str, client: int = 0, label: int | None = None
) -> Figure:
    """Draw forgetting degree and local accuracy of one class of one client, method by method (FedKA
    Fig. 6). label: the class; None: the non-dominant class of which the client has most
    examples."""
    shown = flat(settings)
    counts = counts_of(shown[0].files[0], client)
    chosen = non_dominant(counts, client) if label is None else label
    name = shown[0].files[0].classes[chosen]
    subject = f"Class {name} of client {client} ({counts[chosen]} of its {counts.sum()} examples)"
    figure, grid = panels_of(f"{subject}\n{said_of(settings, title)}", 2)
    for method in shown:
        rounds, *series = series_of(method, client)
        for axes, values in zip(grid, series, strict=True):
            own = values[None, :, chosen]
            draw_sweep.curve(axes, rounds, own, method.number, method.name)
    grid[0].set_ylabel("forgetting degree\n(gains clipped at -1)")
    grid[1].set_ylabel("test accuracy of the\nlocal model on the class")
    round_axis(grid[1])
    legend(figure, grid[0])
    return figure


def series_of(method: Method, client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rounds [T] in which a client took part, forgetting degree [T, C] clipped at -1, class
    accuracies [T, C] of its local model) of a method's first run; raise ConfigError where it never
    did."""
    history = history_of(method, local=True)
    rows = [(i, np.flatnonzero(sampled == client)) for i, sampled in enumerate(history.sampled)]
    found = [(history.local_rounds[i], i, int(at[0])) for i, at in rows if len(at)]
    if not found:
        raise ConfigError(f"{method.runs[0].directory}: client {client} never took part")
    local = np.stack([history.local_class_accuracy[i][at] for _, i, at in found])
    before = np.stack([history.distributed(number) for number, _, _ in found])
    degree = np.maximum(forgetting.forgetting_degree(before, local), -1.0)
    return np.array([number for number, _, _ in found]), degree, local


def counts_of(run: RunData, client: int) -> np.ndarray:
    """Return a client's training examples of each class, int [C]."""
    if run.counts is None or not 0 <= client < len(run.counts):
        raise ConfigError(f"no client {client} in partition.npz")
    return np.asarray(run.counts[client])


def kinds_of_classes(counts: np.ndarray, dominance: float = DOMINANCE) -> list[str]:
    """Return dominant, non-dominant or missing for each class of a client, from its examples [C]: a
    class is dominant from the share `dominance`/C on (FedKA section 3, whose threshold is not
    printed)."""
    share = counts / counts.sum()
    return [
        "missing" if n == 0 else "dominant" if p >= dominance / len(counts) else "non-dominant"
        for n, p in zip(counts, share, strict=True)
    ]


def non_dominant(counts: np.ndarray, client: int) -> int:
    """Return the non-dominant class with most examples; without one, the rarest that the client
    has."""
    kinds = np.array(kinds_of_classes(counts))
    if (kinds == "non-dominant").any():
        return int(np.argmax(np.where(kinds == "non-dominant", counts, -1)))
    return int(np.argmin(np.where(counts > 0, counts, counts.max() + 1)))


def round_models(settings: Sequence[Setting], title: str, round: int | None = None) -> Figure:
    """Draw class accuracies of the global model before a round, of its local models and of the
    global model after it, a panel a run (Flashback Fig. 2, 10). round: None, or past the end: the
    last with local models."""
    shown = [(method.name, history_of(method, local=True)) for method in flat(settings)]
    columns = min(len(shown), draw.PER_ROW)
    rows = -(-len(shown) // columns)
    cohort = max(len(history.sampled[-1]) for _, history in shown) + 2
    height = 1.0 + rows * (0.6 + min(map_height(cohort), 2.6))
    text = f"Class accuracies within a round\n{said_of(settings, title)}"
    figure, grid = panels(shortened(text), height, rows, columns, 2.5 * columns + 1.0)
    maps = []
    for axes, (label, history) in zip(grid.flat, shown, strict=False):
        past = history if round is None else history.upto(max(round, history.local_rounds[0]))
        maps.append(draw.round_picture(past))
        image = draw.round_map(axes, maps[-1])
        last = len(maps[-1]) - 1
        axes.set_yticks([0, last / 2, last], ["before", "clients", "after"])
        axes.set_title(f"{label}, round {past.local_rounds[-1]}")
        class_axis(axes, [str(c) for c in range(maps[-1].shape[1])], horizontal=True)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    values = np.concatenate([each.ravel() for each in maps])
    colour_bar(figure, list(grid.flat), image, "test accuracy of the class", values)
    return figure


def round_forgetting(settings: Sequence[Setting], title: str) -> Figure:
    """Draw cumulative distributions of round forgetting, of the global and of local models
    (Flashback Fig. 4)."""
    if not any(m.local_drops().size for setting in settings for m in setting.methods):
        raise ConfigError(
            "no run has evaluated local models (forgetting_metric=round_drop"
            " forgetting_metric.local=true)"
        )
    return draw_sweep.round_forgetting(settings, said_of(settings, title))


def neurons(settings: Sequence[Setting], title: str, examples: int = 1000) -> Figure:
    """Draw the class that each neuron of the last hidden layer prefers, in the global model before
    the last round whose local models are kept, in these, and in the global model after it, a panel
    a run (FedNTD Fig. 17). The neurons are sorted by the class that they prefer in the first of
    them: the more a column keeps its colour, the more aligned."""
    shown = flat(settings)
    found = []
    for method in shown:
        run = method.runs[0]
        subject = load_subject(run, last_local_round(run), most=examples)
        found.append(preferred_classes(subject))
    classes = len(shown[0].files[0].classes)
    names = [method.name for method in shown]
    return draw_models.neurons(names, found, classes, shortened(said_of(settings, title)))


def said_of(settings: Sequence[Setting], title: str) -> str:
    """Return the title of a sweep with what was changed in all of its runs."""
    return f"{title} ({settings[0].common})" if settings[0].common else title
