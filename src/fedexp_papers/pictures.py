"""The kinds of the papers' figures: select the tables to draw.

A function takes the settings of a sweep (`sweep_figures.Setting`), a title and the options of the
kind. It raises ConfigError if the runs do not contain the data for the figure.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure

from fedexp.analysis import draw_sweep
from fedexp.analysis.draw_sweep import look
from fedexp.analysis.measures import main_measures
from fedexp.analysis.sweep_figures import Method, Setting
from fedexp.core.errors import ConfigError
from fedexp.figures.draw import PER_ROW, round_picture
from fedexp.figures.draw_details import local_series
from fedexp.figures.style import map_height, stroke
from fedexp.metrics import forgetting
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.metrics.record import Record
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.analyses.layers import TOTAL
from fedexp_papers.draw import class_styles, draw_lines, draw_maps
from fedexp_papers.posthoc.draw import draw_embedding, draw_neurons, draw_noise
from fedexp_papers.posthoc.features import embed_models
from fedexp_papers.posthoc.kinds import comparable_subjects
from fedexp_papers.posthoc.neurons import preferred_classes
from fedexp_papers.posthoc.noise import measure_noise
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
DEGREE = "forgetting degree\n(gains clipped at -1)"
AXES = {"round": "round", "epoch": "local epoch"}  # axes of means, and their labels
MODELS = {"global model before": ":", "local models": "-", "global model after": "--"}


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


def draw_methods(
    title: str, methods: Sequence[Method], make: Callable[[Method], pd.DataFrame], **options: Any
) -> Figure:
    """Draw a line for each method (see `draw_lines`). make: returns the table of a method."""
    series = {method.label: make(method) for method in methods}
    styles = {method.label: look(method.number) for method in methods}
    return draw_lines(title, series, styles, **options)


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
    """Draw the accuracy of each class and the mean over classes (FedKA Fig. 1)."""
    methods = list_methods(settings)
    records = {f"test accuracy, {m.name}": require_record(m) for m in methods}
    styles = class_styles(methods[0].files[0].classes)
    series = {}
    for c in range(len(styles)):
        values = [pd.DataFrame({k: r.matrix[:, c]}, r.rounds) for k, r in records.items()]
        series[str(c)] = pd.concat(values)
    means = [pd.DataFrame({k: np.nanmean(r.matrix, 1)}, r.rounds) for k, r in records.items()]
    series["mean of the classes"] = pd.concat(means)
    faint = {"linewidth": stroke(0.5), "marker": ""}
    looks = {str(c): style | faint for c, style in enumerate(styles)}
    looks["mean of the classes"] = {"color": "black", "linewidth": stroke(1.6)}
    text = f"Class-wise test accuracy of the global model\n{title}"
    return draw_lines(text, series, looks, ylim=(0, 1.03))


def consistency(settings: Sequence[Setting], title: str) -> Figure:
    """Draw the cosine of the class accuracies in consecutive rounds (FedNTD Fig. 2b)."""

    def table(method: Method) -> pd.DataFrame:
        require_record(method)
        records = [file.record for file in method.files if file.record]
        size = min(len(record.rounds) for record in records)
        values = [forgetting.consistency(record.matrix[:size]) for record in records]
        return stacked("cosine similarity", np.array(records[0].rounds[1:size]), np.stack(values))

    text = f"Cosine similarity of class accuracies in consecutive rounds\n{title}"
    return draw_methods(text, list_methods(settings), table)


def curves(settings: Sequence[Setting], title: str) -> Figure:
    """Draw test accuracy by round (Flashback Fig. 1a)."""

    def table(method: Method) -> pd.DataFrame:
        return stacked("test accuracy", *method.curve("test_accuracy"))

    return draw_methods(title, list_methods(settings), table)


def stacked(name: str, rounds: np.ndarray, values: np.ndarray) -> pd.DataFrame:
    """Return the column of the values [runs, R] of all runs."""
    return pd.DataFrame({name: values.ravel()}, np.tile(rounds, len(values)))


def levels(settings: Sequence[Setting], title: str) -> Figure:
    """Draw forgetting by setting, with one colour per method (FedNTD Fig. 2c).

    In FedNTD's figure, a setting is a level of heterogeneity, and the colours are data sets instead
    of methods.
    """
    series: dict[str, list[pd.DataFrame]] = {}
    styles = {}
    for place, setting in enumerate(settings):
        for method in setting.methods:
            values = summaries(method.runs, {"forgetting": "forgetting"}, place)
            series.setdefault(method.name, []).append(values)
            styles[method.name] = look(method.number)
    tables = {name: pd.concat(found) for name, found in series.items()}
    names = [setting.name for setting in settings]
    text = f"Forgetting by heterogeneity\n{title}"
    ticks: dict[str, Any] = {"xticks": range(len(names)), "xticklabels": names}
    return draw_lines(text, tables, styles, x="", **ticks)


def summaries(runs: Sequence[RunDirectory], columns: dict[str, str], place: float) -> pd.DataFrame:
    """Return values of the summaries of the runs that did not diverge, at one position.

    columns: key of the summary -> name of the column.
    """
    rows = [
        {name: run.summary.get(key) for key, name in columns.items()}
        for run in runs
        if not run.diverged
    ]
    return pd.DataFrame(rows, [place] * len(rows), list(columns.values()), dtype=float)


def client_classes(settings: Sequence[Setting], title: str, client: int = 3) -> Figure:
    """Draw the forgetting degree of each class in one client's local model (FedKA Eq. 1, Fig. 2b).

    The client is from the first run. Degrees are clipped at -1. The colour shows whether the client
    has many, few or no examples of the class.
    """
    method = settings[0].methods[0]
    rounds, degree, _ = select_local_series(method, client)
    types = classify_classes(require_counts(method, client))
    series, styles = {}, {}
    for values, of_class, name in zip(
        degree.T, class_styles(method.files[0].classes), types, strict=True
    ):
        label = f"{of_class['label']} ({name})"
        series[label] = pd.DataFrame({DEGREE: values}, rounds)
        width = stroke(1.3 if name == "dominant" else 0.6)
        styles[label] = of_class | {"color": COLOURS[name], "linewidth": width, "label": label}
    text = f"Forgetting degree of each class, client {client}\n{title}: {method.label}"
    return draw_lines(text, series, styles)


def client_class(settings: Sequence[Setting], title: str, client: int = 0) -> Figure:
    """Draw a client's forgetting degree and local accuracy on a class, by method (FedKA Fig. 6).

    The class is the client's largest non-dominant class.
    """
    methods = list_methods(settings)
    counts = require_counts(methods[0], client)
    chosen = choose_non_dominant(counts)
    name = methods[0].files[0].classes[chosen]

    def table(method: Method) -> pd.DataFrame:
        rounds, degree, local = select_local_series(method, client)
        accuracy = "test accuracy of the\nlocal model on the class"
        return pd.DataFrame({DEGREE: degree[:, chosen], accuracy: local[:, chosen]}, rounds)

    text = f"Class {name} of client {client} ({counts[chosen]} of {counts.sum()} examples)\n{title}"
    return draw_methods(text, methods, table)


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
    types = np.select([counts == 0, is_dominant], ["missing", "dominant"], "non-dominant")
    return [str(name) for name in types]


def choose_non_dominant(counts: np.ndarray) -> int:
    """Return the non-dominant class with the most examples.

    If the client has no non-dominant class, return the rarest class that it has.
    """
    held = pd.Series(counts)[counts > 0]
    few = held[np.array(classify_classes(counts))[counts > 0] == "non-dominant"]
    return int(str(few.idxmax() if len(few) else held.idxmin()))


def mean_of(table: pd.DataFrame) -> pd.DataFrame:
    return table.groupby(level=0).mean()


def round_models(settings: Sequence[Setting], title: str, round: int | None = None) -> Figure:
    """Draw class accuracies before, within and after a round, by run (Flashback Fig. 2, 10).

    Rows are the global model before the round, the local models, and the global model after the
    round. round: the round to draw. By default, and for a round after the end of the run, the last
    round with local models is drawn.
    """
    maps = {}
    for method in list_methods(settings):
        record = require_record(method, local=True)
        past = record if round is None else record.upto(max(round, record.local_rounds[0]))
        maps[f"{method.name}, round {past.local_rounds[-1]}"] = round_picture(past)
    height = 0.6 + min(max(map_height(len(values)) for values in maps.values()), 2.6)
    text, label = f"Class accuracies within a round\n{title}", "test accuracy of the class"
    columns = min(len(maps), PER_ROW)
    figure, grid = draw_maps(text, maps, label, height, columns, xlabel="class (index)")
    for axes, values in zip(grid, maps.values(), strict=True):
        last = len(values) - 1
        axes.set_yticks([0, last / 2, last], ["before", "clients", "after"])
    return figure


def round_forgetting(settings: Sequence[Setting], title: str) -> Figure:
    """Draw cumulative distributions of round forgetting (Flashback Fig. 4).

    The first panel shows the global model's values over all rounds. If local models were evaluated,
    the second one shows their values over all rounds and clients. Curves further to the left mean
    less forgetting.
    """

    def table(method: Method) -> pd.DataFrame:
        parts = {
            "global model:\nshare of rounds": global_drops(method),
            "local models:\nshare of rounds and clients": local_drops(method),
        }
        found = []
        for name, values in parts.items():
            known = np.sort(values[np.isfinite(values)])
            shares = pd.Series(np.arange(1, len(known) + 1) / max(len(known), 1), known)
            found.append(shares.groupby(level=0).max().to_frame(name))
        return pd.concat([each for each in found if len(each)] or found)

    text = f"Round forgetting\n{title}"
    return draw_methods(text, list_methods(settings), table, x="round forgetting", ylim=(0, 1.02))


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


def analysed(
    settings: Sequence[Setting],
    title: str,
    table: str,
    columns: Mapping[str, str],
    x: str = "round",
    last: Sequence[str] = (),
) -> Figure:
    """Draw columns of an analysis table against another one (FedNTD Fig. 6, 8, 11, 12).

    Values are those of the whole model, averaged over clients and seeds. If `x` is neither the
    round nor the local epoch, there is a point for each client and round, and the legend has
    Pearson's correlation. columns: column -> its name. last: `round` to draw only the last measured
    round, `epoch` to draw only each client's last local epoch. Raises ConfigError if no run has the
    table.
    """
    series, styles = {}, {}
    for method in list_methods(settings):
        found = [
            each for run in method.runs if (each := run.read_table(f"{table}.csv")) is not None
        ]
        if not any(map(len, found)):
            continue
        rows, label, style = pd.concat(found), method.label, look(method.number)
        if "layer" in rows:
            rows = rows[rows["layer"] == TOTAL]
        if "round" in last:
            rows = rows[rows["round"] == rows["round"].max()]
        if "epoch" in last:
            rows = rows[
                rows["epoch"] == rows.groupby(["round", "client"])["epoch"].transform("max")
            ]
        if x not in AXES:
            label += f": correlation {rows[x].corr(rows[next(iter(columns))]):.2f}"
            style |= {"linestyle": "", "alpha": 0.4}
        series[label] = rows.set_index(x)[list(columns)].rename(columns=columns)
        styles[label] = style
    if not series:
        raise ConfigError(f"no run has the table {table}.csv")
    name = AXES.get(x, x.replace("_", " "))
    return draw_lines(title, series, styles, name, ddof=0)


def in_out_local(settings: Sequence[Setting], title: str) -> Figure:
    """Draw in-local and out-local accuracy against the round (FedNTD Fig. 4).

    The global model from before and after each round is evaluated on the joint distribution of the
    round's clients. Local models are shown by their mean and standard deviation.
    """
    series, styles = {}, {}
    for method in list_methods(settings):
        record = method.files[0].record
        if record is not None and record.local_rounds:
            for (model, dashes), table in zip(
                MODELS.items(), before_local_after(record), strict=True
            ):
                label = f"{method.label}: {model}"
                series[label] = table.rename(columns=lambda side: f"{side}-local accuracy")
                styles[label] = look(method.number) | {"linestyle": dashes, "marker": ""}
    if not series:
        raise ConfigError("no run has accuracies of local models")
    text = f"Accuracy before and after local training\n{title}"
    return draw_lines(text, series, styles, ddof=0, ylim=(0, 1.03))


def before_local_after(record: Record) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the series of FedNTD Fig. 4: tables with the columns `in` and `out`, by round.

    The first and the last table have the accuracies of the global model before and after the round
    on the joint distribution of its clients. The second one has a row for each local model.
    """
    before, local, after = [], [], []
    for index, number in enumerate(record.local_rounds):
        counts, own = record.sampled_counts(index), record.local_class_accuracy[index]
        before.append(forgetting.in_out_joint(record.distributed(number), counts))
        tested = record.class_accuracy[record.rounds.index(number)]
        after.append(forgetting.in_out_joint(tested, counts))
        accuracies = np.stack(forgetting.in_out_local(own, counts), 1)
        local.append(pd.DataFrame(accuracies, [number] * len(own), ["in", "out"]))
    first, last = (
        pd.DataFrame(rows, record.local_rounds, ["in", "out"]) for rows in (before, after)
    )
    return first, pd.concat(local), last


def parameter(settings: Sequence[Setting], title: str, key: str) -> Figure:
    """Draw the main measures against a parameter, the mean over seeds (FedNTD Fig. 15 and 16).

    Methods that do not have the parameter are shown as dotted lines.
    """
    points: dict[float, list[RunDirectory]] = {}
    runs = [run for setting in settings for run in setting.runs]
    for run in runs:
        for text in run.overrides:
            if text.startswith(f"{key}="):
                points.setdefault(float(text.partition("=")[2]), []).append(run)
    if len(points) < 2:
        raise ConfigError(f"{title}: {key} has fewer than two values")
    columns = {measure.key: measure.label for measure in main_measures(runs)}
    algorithms = {run.summary["algorithm"] for each in points.values() for run in each}
    label = " and ".join(sorted(algorithms))
    series = {label: pd.concat([summaries(points[x], columns, x) for x in sorted(points)])}
    styles: dict[str, Any] = {label: {"color": "C0"}}
    for method in list_methods(settings):
        if method.runs[0].summary["algorithm"] not in algorithms:
            ends = [summaries(method.runs, columns, x) for x in (min(points), max(points))]
            series[method.label] = mean_of(pd.concat(ends))
            styles[method.label] = look(method.number) | {"linestyle": ":", "marker": ""}
    is_log = min(points) > 0 and max(points) >= 10 * min(points)
    scale: dict[str, Any] = {"xscale": "log"} if is_log else {}
    return draw_lines(f"{key}, {title}", series, styles, key, **scale)


def neurons(settings: Sequence[Setting], title: str) -> Figure:
    """Draw the class that each neuron of the last hidden layer prefers (FedNTD Fig. 17).

    The models of a run are the global models before and after the last round with saved local
    models, and the local models of this round.
    """
    shown = {method.name: method.runs[0] for method in list_methods(settings)}
    subjects = [
        load_subject(run, with_defaults(run, "neurons", {}), last_local_round(run))
        for run in shown.values()
    ]
    classes = len(subjects[0].runtime.data.classes)
    found = [preferred_classes(subject) for subject in subjects]
    return draw_neurons(list(shown), found, classes, title)


def noise(settings: Sequence[Setting], title: str, **options: Any) -> Figure:
    """Draw loss and accuracy of one model per run under Gaussian noise on its parameters.

    See FedNTD Fig. 14. options: flags of `fedexp-papers analyse <run> noise`.
    """
    found, names = [], set()
    for method in list_methods(settings):
        run = method.runs[0]
        given = with_defaults(run, "noise", options)
        subject = load_subject(run, given, given.round, given.client)
        curve = measure_noise(subject, given.strengths, given.draws, given.scale, given.seed)
        found.append((method.name, curve))
        names.add(model_name(subject.model))
    shown = "a local model of each" if "client" in options else "the global models"
    if len(names) == 1:
        (shown,) = names
    text = f"{title}; {shown}, {subject.examples}"
    return draw_noise(found, textwrap.fill(text, LINE))


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
    return draw_embedding(rows, labels, classes, text)


PICTURES: dict[str, Callable[..., Figure]] = {
    each.__name__: each
    for each in (
        *(class_maps, class_curves, consistency, curves, levels, client_classes, client_class),
        *(round_models, round_forgetting, analysed, in_out_local, parameter, neurons, noise),
        joint_tsne,
    )
}
FOR_EACH_SETTING = ("in_out_local", "parameter", "round_forgetting")
