"""Draw figures in the layouts of the papers.

DRAWN maps each kind of figure to the function that draws it. The arguments of such a function are
the settings of a sweep (`sweep_figures.Setting`), a title and the options of the kind. The function
raises ConfigError if the runs do not contain the data for the figure.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedexp.analysis import draw_sweep
from fedexp.analysis.draw_sweep import curve, look, panels_of, shortened, style_of
from fedexp.analysis.sweep_figures import Method, Setting
from fedexp.core.errors import ConfigError
from fedexp.figures import draw as draw_run
from fedexp.figures.draw_details import local_series
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
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.metrics.record import Record
from fedexp_papers.draw_measured import mean_and_spread
from fedexp_papers.posthoc import draw as draw_models
from fedexp_papers.posthoc.features import embed_models
from fedexp_papers.posthoc.kinds import comparable_subjects
from fedexp_papers.posthoc.neurons import preferred_classes
from fedexp_papers.posthoc.noise import NoiseCurve, measure_noise
from fedexp_papers.posthoc.subject import (
    last_local_round,
    load_subject,
    model_name,
    require_local_models,
    with_defaults,
)

COLOURS = {"dominant": "C1", "non-dominant": "C0", "missing": "C3"}  # colour of each class type
DOMINANCE = 0.5  # a share of at least DOMINANCE/C is dominant (docs/papers/fedka.md)
LINE = 90  # maximum number of characters in a line of a title


def list_methods(settings: Sequence[Setting]) -> list[Method]:
    """Return the methods of all settings, with labels that name the setting and the method.

    If all settings have the same single method, the label names only the setting. Otherwise, the
    methods keep their colours, and each setting has its own line style.
    """
    if len(settings) == 1:
        return list(settings[0].methods)
    pairs = [(setting.name, method) for setting in settings for method in setting.methods]
    if len({method.name for _, method in pairs}) == 1:
        return [Method(setting, method.runs, i) for i, (setting, method) in enumerate(pairs)]
    colours = len(rcParams["axes.prop_cycle"])
    return [
        Method(f"{setting.name}, {method.name}", method.runs, method.number + i * colours)
        for i, setting in enumerate(settings)
        for method in setting.methods
    ]


def require_record(method: Method, local: bool = False) -> Record:
    """Return the class accuracies of a method's first run.

    Raises ConfigError if the run has none. local: also require class accuracies of local models.
    """
    found = method.files[0].record
    if found is None or (local and not found.local_rounds):
        needs = " of local models; set forgetting_metric=all" if local else ""
        raise ConfigError(f"{method.runs[0].directory}: the run has no class accuracies{needs}")
    return found


def class_maps(settings: Sequence[Setting], title: str, normalised: bool = False) -> Figure:
    """Draw heat maps (classes x rounds) of all runs (FedNTD Fig. 2a, 10; Flashback Fig. 1b, 5)."""
    shown = tuple(list_methods(settings))
    for method in shown:
        require_record(method)
    return draw_sweep.class_accuracy(Setting(title, shown, ""), normalised)


def class_curves(settings: Sequence[Setting], title: str) -> Figure:
    """Draw the accuracy of each class and the mean over classes against the round (FedKA Fig. 1).

    Each run has a panel.
    """
    shown = list_methods(settings)
    text = f"Class-wise test accuracy of the global model\n{title}"
    figure, ((*every,),) = panels(shortened(text), 3.7, columns=len(shown), sharey=True)
    for axes, method in zip(every, shown, strict=True):
        record = require_record(method)
        for c, values in enumerate(record.matrix.T):
            look = draw_models.class_style(c, record.matrix.shape[1])
            look |= {"linewidth": stroke(0.5), "alpha": 0.8}
            axes.plot(record.rounds, values, **look)
        mean = np.nanmean(record.matrix, axis=1)
        label = "mean of the classes"
        axes.plot(record.rounds, mean, color="black", linewidth=stroke(1.6), label=label)
        axes.set_title(method.name)
        round_axis(axes, 8)
    every[0].set_ylabel("test accuracy")
    every[0].legend(loc="lower right")
    classes = shown[0].files[0].classes
    draw_models.draw_class_legend(figure, every, np.arange(len(classes)), classes)
    return figure


def consistency(settings: Sequence[Setting], title: str) -> Figure:
    """Draw the cosine similarity between class accuracies in consecutive rounds (FedNTD Fig. 2b).

    Values are averaged over seeds.
    """
    series = []
    for method in list_methods(settings):
        require_record(method)
        records = [file.record for file in method.files if file.record]
        size = min(len(record.rounds) for record in records)
        values = np.stack([forgetting.consistency(record.matrix[:size]) for record in records])
        series.append((method, np.array(records[0].rounds[1:size]), values))
    text = f"Cosine similarity of class accuracies in consecutive rounds\n{title}"
    return curves_of(text, "cosine similarity", series)


def curves_of(
    title: str, label: str, series: Iterable[tuple[Method, np.ndarray, np.ndarray]]
) -> Figure:
    """Draw methods' curves in one panel. series: tuples (method, rounds [R], values [runs, R])."""
    figure, (axes,) = panels_of(title)
    for method, rounds, values in series:
        curve(axes, rounds, values, method.number, method.name)
    axes.set_ylabel(label)
    round_axis(axes, 8)
    legend(figure, axes)
    return figure


def curves(settings: Sequence[Setting], title: str) -> Figure:
    """Draw test accuracy by round (Flashback Fig. 1a).

    Curves show the mean over seeds, in a band of +- one standard deviation.
    """
    series = [(method, *method.curve("test_accuracy")) for method in list_methods(settings)]
    return curves_of(f"Test accuracy\n{title}", "test accuracy", series)


def levels(settings: Sequence[Setting], title: str) -> Figure:
    """Draw forgetting as bars, one group per setting and one colour per method (FedNTD Fig. 2c).

    Bars show the mean and the standard deviation over seeds. In FedNTD's figure, a setting is a
    level of heterogeneity, and the colours are data sets instead of methods.
    """
    figure, (axes,) = panels_of(f"Forgetting by heterogeneity\n{title}")
    methods = [method for setting in settings for method in setting.methods]
    names = {method.name: look(method.number)["color"] for method in methods}
    wide = 0.8 / len(names)
    for number, (name, colour) in enumerate(names.items()):
        points = {}
        for i, setting in enumerate(settings):
            runs = [run for method in setting.methods if method.name == name for run in method.runs]
            place = i + (number - (len(names) - 1) / 2) * wide
            points[place] = mean_and_spread(runs, "forgetting")
        mean, spread = np.array(list(points.values())).T
        axes.bar(list(points), mean, 0.94 * wide, yerr=spread, color=colour, label=name)
    axes.set_xticks(range(len(settings)), [setting.name for setting in settings])
    axes.set_ylabel("forgetting")
    axes.grid(False, axis="x")
    if len(names) > 1:
        legend(figure, axes)
    return figure


def client_classes(settings: Sequence[Setting], title: str, client: int = 3) -> Figure:
    """Draw the forgetting degree of each class in one client's local model (FedKA Eq. 1, Fig. 2b).

    The client is from the first run. Degrees are clipped at -1. The colour shows whether the client
    has many, few or no examples of the class.
    """
    method = settings[0].methods[0]
    rounds, degree, _ = select_local_series(method, client)
    kinds = classify_classes(require_counts(method, client))
    subject = f"Forgetting degree of each class, client {client}"
    figure, (axes,) = panels_of(f"{subject}\n{title}: {method.label}")
    for c, kind in enumerate(kinds):
        look = draw_models.class_style(c, len(kinds)) | {"color": COLOURS[kind]}
        look["linewidth"] = stroke(1.3 if kind == "dominant" else 0.6)
        label = f"{method.files[0].classes[c]} ({kind})" if len(kinds) <= 20 else None
        axes.plot(rounds, degree[:, c], **look, label=label)
    axes.axhline(0, color="0.45", linewidth=0.8)
    axes.set_ylabel("forgetting degree (gains clipped at -1)")
    round_axis(axes, 8)
    legend(figure, axes)
    return figure


def client_class(settings: Sequence[Setting], title: str, client: int = 0) -> Figure:
    """Draw a client's forgetting degree and local accuracy on a class, by method (FedKA Fig. 6).

    The class is the client's largest non-dominant class.
    """
    shown = list_methods(settings)
    counts = require_counts(shown[0], client)
    chosen = choose_non_dominant(counts)
    name = shown[0].files[0].classes[chosen]
    subject = f"Class {name} of client {client} ({counts[chosen]} of {counts.sum()} examples)"
    figure, grid = panels_of(f"{subject}\n{title}", 2)
    for method in shown:
        rounds, *series = select_local_series(method, client)
        for axes, values in zip(grid, series, strict=True):
            mine = values[None, :, chosen]
            curve(axes, rounds, mine, method.number, method.name)
    grid[0].set_ylabel("forgetting degree\n(gains clipped at -1)")
    grid[1].set_ylabel("test accuracy of the\nlocal model on the class")
    round_axis(grid[1])
    legend(figure, grid[0])
    return figure


def select_local_series(method: Method, client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `local_series` of a client in the method's first run.

    Raises ConfigError if the client never took part.
    """
    found = local_series(require_record(method, local=True), client)
    if not found[0].size:
        raise ConfigError(f"{method.runs[0].directory}: client {client} never took part")
    return found


def require_counts(method: Method, client: int) -> np.ndarray:
    """Return the number of training examples that a client has of each class, int [C].

    The client is from the method's first run. Raises ConfigError if that run has no such client.
    """
    counts = method.files[0].counts
    if counts is None or not 0 <= client < len(counts):
        raise ConfigError(f"partition.npz does not contain client {client}")
    return np.asarray(counts[client])


def classify_classes(counts: np.ndarray) -> list[str]:
    """Return `dominant`, `non-dominant` or `missing` for each class, from a client's examples [C].

    A class is dominant if its share is at least DOMINANCE/C (FedKA section 3, whose threshold is
    not published).
    """
    is_dominant = counts / counts.sum() >= DOMINANCE / len(counts)
    kinds = np.select([counts == 0, is_dominant], ["missing", "dominant"], "non-dominant")
    return [str(kind) for kind in kinds]


def choose_non_dominant(counts: np.ndarray) -> int:
    """Return the non-dominant class with the most examples.

    If the client has no non-dominant class, return the rarest class that it has.
    """
    present = np.flatnonzero(counts)
    candidates = [c for c in present if classify_classes(counts)[c] == "non-dominant"]
    if candidates:
        return int(max(candidates, key=counts.__getitem__))
    return int(min(present, key=counts.__getitem__))


def round_models(settings: Sequence[Setting], title: str, round: int | None = None) -> Figure:
    """Draw class accuracies before, within and after a round, by run (Flashback Fig. 2, 10).

    Rows are the global model before the round, the local models, and the global model after the
    round. round: the round to draw. By default, and for a round after the end of the run, the last
    round with local models is drawn.
    """
    shown = [(method.name, require_record(method, local=True)) for method in list_methods(settings)]
    columns = min(len(shown), draw_run.PER_ROW)
    rows = -(-len(shown) // columns)
    cohort = max(len(record.sampled[-1]) for _, record in shown) + 2
    height = 1.0 + rows * (0.6 + min(map_height(cohort), 2.6))
    text = f"Class accuracies within a round\n{title}"
    figure, grid = panels(shortened(text), height, rows, columns, 2.5 * columns + 1.0)
    maps = []
    for axes, (label, record) in zip(grid.flat, shown, strict=False):
        past = record if round is None else record.upto(max(round, record.local_rounds[0]))
        maps.append(draw_run.round_picture(past))
        image = draw_run.round_map(axes, maps[-1])
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
    """Draw distributions of round forgetting, with one column per setting (Flashback Fig. 4).

    The distributions are cumulative. The upper row shows the global model's values over all rounds.
    If local models were evaluated, the lower row shows their values over all rounds and clients.
    Curves further to the left mean less forgetting.
    """
    kinds = {global_drops: "global model:\nshare of rounds"}
    if any(local_drops(method).size for setting in settings for method in setting.methods):
        kinds[local_drops] = "local models:\nshare of rounds and clients"
    size, wide = 0.6 + 2.6 * len(kinds), 2.2 * len(settings) + 2 if len(settings) > 1 else 0
    text = f"Round forgetting\n{shortened(title)}"
    figure, grid = panels(text, size, len(kinds), len(settings), wide, sharey=True)
    for row, (kind, label) in zip(grid, kinds.items(), strict=True):
        row[0].set_ylabel(label)
        for axes, setting in zip(row, settings, strict=True):
            for method in setting.methods:
                drops = kind(method)
                if (known := drops[np.isfinite(drops)]).size:
                    axes.ecdf(known, **style_of(method, 0.9))
            axes.set_xlim(left=0)
            axes.set_ylim(0, 1.02)
            axes.xaxis.set_major_locator(MaxNLocator(4 if len(settings) > 1 else 8))
    for axes, setting in zip(grid[0], settings, strict=True):
        axes.set_title(setting.name if len(settings) > 1 else "")
    for axes in grid[-1]:
        axes.set_xlabel("round forgetting")
    legend(figure, max(grid.flat, key=lambda axes: len(axes.lines)))
    return figure


def global_drops(method: Method) -> np.ndarray:
    """Return F_t of Flashback for all rounds and runs, float [n]."""
    found = [forgetting.round_drop(file.record.matrix) for file in method.files if file.record]
    return np.concatenate([np.empty(0), *found])


def local_drops(method: Method) -> np.ndarray:
    """Return F_{k,t} of Flashback for all clients, rounds and runs, float [n].

    The array is empty if local models were not evaluated.
    """
    metric, found = RoundDrop(local=True), [np.empty(0)]
    for file in method.files:
        if record := file.record:
            rounds = range(len(record.local_rounds))
            found += [metric.local_values(record, i)["local_round_forgetting"] for i in rounds]
    return np.concatenate(found)


def neurons(settings: Sequence[Setting], title: str) -> Figure:
    """Draw the class that each neuron of the last hidden layer prefers (FedNTD Fig. 17).

    Each run has a panel. The models are the global models before and after the last round with
    saved local models, and the local models of this round. The neurons are sorted by the class that
    they prefer in the global model before the round. The more a column keeps its colour, the better
    the models are aligned.
    """
    shown = {method.name: method.runs[0] for method in list_methods(settings)}
    subjects = [
        load_subject(run, with_defaults(run, "neurons", {}), last_local_round(run))
        for run in shown.values()
    ]
    classes = len(subjects[0].runtime.data.classes)
    found = [preferred_classes(subject) for subject in subjects]
    return draw_models.neurons(list(shown), found, classes, shortened(title))


def noise(settings: Sequence[Setting], title: str, **options: Any) -> Figure:
    """Draw loss and accuracy of one model per run under Gaussian noise on its parameters.

    See FedNTD Fig. 14. options: flags of `fedexp-papers analyse <run> noise`.
    """
    curves: list[tuple[str, NoiseCurve]] = []
    models: set[str] = set()
    for method in list_methods(settings):
        run = method.runs[0]
        given = with_defaults(run, "noise", options)
        subject = load_subject(run, given, given.round, given.client)
        curve = measure_noise(subject, given.strengths, given.draws, given.scale, given.seed)
        curves.append((method.name, curve))
        models.add(model_name(subject.model))
    shown = "a local model of each" if "client" in options else "the global models"
    if len(models) == 1:
        (shown,) = models
    text = f"{title}; {shown}, {subject.examples}"
    return draw_models.noise(curves, textwrap.fill(text, LINE))


def joint_tsne(settings: Sequence[Setting], title: str, **options: Any) -> Figure:
    """Draw one t-SNE of the models of all methods, with one row per setting (FedNTD Fig. 21).

    The models are those of the last round with saved local models. Settings with a single method
    are left out. options: flags of `fedexp-papers analyse <run> tsne`.
    """
    rows, subjects = [], []
    for setting in settings:
        if len(setting.methods) > 1:
            runs = {method.name: method.runs[0] for method in setting.methods}
            number, *_ = map(require_local_models, runs.values())
            given = with_defaults(setting.methods[0].runs[0], "tsne", options)
            found = comparable_subjects(runs, given, number)
            rows.append((setting.name, embed_models(found, number, given)))
            subjects += list(found.values())[:1]
    if not rows:
        raise ConfigError("no setting has runs of at least two methods")
    labels, classes = subjects[0].labels, subjects[0].runtime.data.classes
    if not all(np.array_equal(each.labels, labels) for each in subjects):
        raise ConfigError("the settings have different test examples, so they cannot be compared")
    text = textwrap.fill(f"{title}; {len(labels):,} test examples", LINE)
    return draw_models.embedding(rows, labels, classes, text)


DRAWN: dict[str, Callable[..., Figure]] = {
    draw.__name__: draw
    for draw in (
        *(class_maps, class_curves, consistency, curves, levels, client_classes),
        *(client_class, round_models, round_forgetting, neurons, noise, joint_tsne),
    )
}
