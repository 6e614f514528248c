"""The kinds of the papers' figures: select the tables to draw.

A function takes the settings of a sweep (`sweep_figures.Setting`), a title and the options of the
kind. It raises ConfigError if the runs do not contain the data for the figure.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure

from fedexp.analysis import draw_sweep
from fedexp.analysis.draw_sweep import look
from fedexp.analysis.measures import main_measures
from fedexp.analysis.naming import displayed
from fedexp.analysis.sweep_figures import Method, Setting
from fedexp.core.errors import ConfigError
from fedexp.figures.draw import PER_ROW, round_picture
from fedexp.figures.draw_details import local_series
from fedexp.figures.style import fitting, map_height, stroke
from fedexp.metrics import forgetting
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.metrics.record import Record
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.analyses.layers import TOTAL
from fedexp_papers.draw import class_styles, draw_lines, draw_maps

# class type -> line style, and line width as a share of the style's
TYPES = {"dominant": ("-", 1.3), "non-dominant": ("--", 0.8), "missing": (":", 0.8)}
DOMINANCE = 0.5  # a share of at least DOMINANCE/C is dominant (docs/papers/fedka.md)
DEGREE = "forgetting degree\n(gains clipped at -1)"
TEST_ACCURACY = {"test_accuracy": "test accuracy"}
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
    tables = {name: pd.DataFrame(r.matrix, list(r.rounds)) for name, r in records.items()}
    faint = {"linewidth": stroke(0.5), "marker": ""}
    lines = []
    for label, style in enumerate(class_styles(methods[0].files[0].classes)):
        values = pd.DataFrame({name: table[label] for name, table in tables.items()})
        lines.append((values, style | faint))
    means = pd.DataFrame({name: table.mean(axis="columns") for name, table in tables.items()})
    bold = {"label": "mean of the classes", "color": "black", "linewidth": stroke(1.6)}
    text = f"Class-wise test accuracy of the global model\n{title}"
    return draw_lines(text, [*lines, (means, bold)], ylim=(0, 1.03))


def consistency(settings: Sequence[Setting], title: str) -> Figure:
    """Draw the cosine of the class accuracies in consecutive rounds (FedNTD Fig. 2b)."""
    lines = []
    for method in list_methods(settings):
        require_record(method)
        records = [file.record for file in method.files if file.record]
        values = (pd.Series(forgetting.consistency(r.matrix), list(r.rounds[1:])) for r in records)
        lines.append((stacked("cosine similarity", values), style_of(method)))
    text = f"Cosine similarity of class accuracies in consecutive rounds\n{title}"
    return draw_lines(text, lines)


def curves(
    settings: Sequence[Setting], title: str, columns: Mapping[str, str] = TEST_ACCURACY
) -> Figure:
    """Draw columns of rounds.csv by round (Flashback Fig. 1a; CFeD Fig. 3 and 4).

    columns: column -> its name. Raises ConfigError if no run has values of a column.
    """
    lines = []
    for column, name in columns.items():
        tables = []
        for method in list_methods(settings):
            rounds, values = method.curve(column)
            series = (pd.Series(row, rounds) for row in values)
            tables.append((stacked(name, series), style_of(method)))
        if all(table.empty for table, _ in tables):
            raise ConfigError(f"no run has values of {column} in rounds.csv")
        lines += tables
    return draw_lines(title, lines)


def style_of(method: Method) -> dict[str, Any]:
    return look(method.number) | {"linewidth": stroke(0.8), "label": method.label}


def stacked(name: str, runs: Iterable[pd.Series]) -> pd.DataFrame:
    """Return a column with the values of all runs at the positions that all runs have."""
    table = pd.concat(list(runs), axis="columns", join="inner")
    return pd.DataFrame({name: table.to_numpy().ravel()}, table.index.repeat(table.shape[1]))


def levels(settings: Sequence[Setting], title: str) -> Figure:
    """Draw forgetting by setting, with one colour per method (FedNTD Fig. 2c).

    In FedNTD's figure, a setting is a level of heterogeneity, and the colours are data sets instead
    of methods.
    """
    found: dict[tuple[str, int], list[pd.DataFrame]] = {}
    for place, setting in enumerate(settings):
        for method in setting.methods:
            values = summaries(method.runs, {"forgetting": "forgetting F"}, place)
            found.setdefault((method.name, method.number), []).append(values)
    lines = [(pd.concat(t), look(number) | {"label": n}) for (n, number), t in found.items()]
    names = [setting.name for setting in settings]
    ticks: dict[str, Any] = {"xticks": range(len(names)), "xticklabels": names}
    return draw_lines(f"Forgetting by heterogeneity\n{title}", lines, x="", **ticks)


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

    The client is from the first run. Degrees are clipped at -1. The line style shows whether the
    client has many, few or no examples of the class, and the colours distinguish classes of the
    same type.
    """
    method = settings[0].methods[0]
    rounds, degree, _ = select_local_series(method, client)
    lines = []
    types = classify_classes(require_counts(method, client))
    styles = class_styles(method.files[0].classes)
    for label, (values, style, name) in enumerate(zip(degree.T, styles, types, strict=True)):
        dashes, share = TYPES[name]
        own = {
            "label": f"{style['label']} ({name})",
            "color": f"C{types[:label].count(name)}",
            "linestyle": dashes,
            "linewidth": stroke(share),
            "marker": "",
        }
        lines.append((pd.DataFrame({DEGREE: values}, rounds), own))
    text = f"Forgetting degree of each class, client {client}\n{title}: {method.label}"
    return draw_lines(text, lines)


def client_class(settings: Sequence[Setting], title: str, client: int = 0) -> Figure:
    """Draw a client's forgetting degree and local accuracy on a class, by method (FedKA Fig. 6).

    The class is the client's largest non-dominant class.
    """
    methods = list_methods(settings)
    counts = require_counts(methods[0], client)
    chosen = choose_non_dominant(counts)
    name = methods[0].files[0].classes[chosen]
    accuracy, lines = "test accuracy of the\nlocal model on the class", []
    for method in methods:
        rounds, degree, local = select_local_series(method, client)
        columns = {DEGREE: degree[:, chosen], accuracy: local[:, chosen]}
        lines.append((pd.DataFrame(columns, rounds), style_of(method)))
    text = f"Class {name} of client {client} ({counts[chosen]} of {counts.sum()} examples)\n{title}"
    return draw_lines(text, lines)


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

    The client is from the method's first run. Raises ConfigError if it has no examples there.
    """
    counts = method.files[0].counts
    if counts is None or not 0 <= client < len(counts) or not counts[client].any():
        raise ConfigError(f"partition.npz does not contain examples of client {client}")
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
    columns = fitting(len(maps), 1.6, PER_ROW)
    figure, grid = draw_maps(text, maps, label, height, columns, xlabel="class (index)")
    for number, (axes, values) in enumerate(zip(grid, maps.values(), strict=True)):
        last = len(values) - 1
        names = ["before", "clients", "after"] if number % columns == 0 else ["", "", ""]
        axes.set_yticks([0, last / 2, last], names)
        for boundary in (0.5, last - 0.5):
            axes.axhline(boundary, color="white", linewidth=1.5)
    return figure


def round_forgetting(settings: Sequence[Setting], title: str) -> Figure:
    """Draw cumulative distributions of round forgetting (Flashback Fig. 4).

    The first panel shows the global model's values over all rounds. If local models were evaluated,
    the second one shows their values over all rounds and clients. Curves further to the left mean
    less forgetting.
    """

    lines = []
    for method in list_methods(settings):
        parts = {
            "global model:\nshare of rounds": global_drops(method),
            "local models:\nshare of rounds and clients": local_drops(method),
        }
        shares = {
            name: pd.Series(values).value_counts(normalize=True).sort_index().cumsum()
            for name, values in parts.items()
        }
        known = {name: steps for name, steps in shares.items() if len(steps)}
        style = style_of(method) | {"marker": "", "drawstyle": "steps-post"}
        lines.append((pd.DataFrame(known), style))
    if not any(len(table) for table, _ in lines):
        raise ConfigError("round forgetting needs at least two evaluated rounds")
    text = f"Round forgetting\n{title}"
    return draw_lines(text, lines, x="round forgetting", ylim=(0, 1.02))


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
    round nor the local epoch, there is a point for each client and round, with a higher opacity in
    later rounds, and the legend has Pearson's correlation. columns: column -> its name. last:
    `round` to draw only the last measured round, `epoch` to draw only each client's last local
    epoch. Raises ConfigError if no run has the table.
    """
    lines = []
    for method in list_methods(settings):
        found = [run.read_table(f"{table}.csv") for run in method.runs]
        known = [each for each in found if each is not None and len(each)]
        if not known:
            continue
        rows, style = pd.concat(known), style_of(method)
        if "layer" in rows:
            rows = rows[rows["layer"] == TOTAL]
        if "round" in last:
            rows = rows[rows["round"] == rows["round"].max()]
        if "epoch" in last:
            ends = rows.groupby(["round", "client"])["epoch"].transform("max")
            rows = rows[rows["epoch"] == ends]
        if x not in AXES:
            rows = rows.dropna(subset=[x, *columns])
            correlation = rows[x].corr(rows[next(iter(columns))])
            known_too = "" if np.isnan(correlation) else f": correlation {correlation:.2f}"
            opacity = 0.1 + 0.7 * (rows["round"] / rows["round"].max()).to_numpy()
            style |= {"label": f"{method.label}{known_too}", "linestyle": "", "alpha": opacity}
        lines.append((rows.set_index(x)[list(columns)].rename(columns=columns), style))
    if not lines:
        raise ConfigError(f"no run has the table {table}.csv")
    return draw_lines(title, lines, AXES.get(x, x.replace("_", " ")), ddof=0)


def in_out_local(settings: Sequence[Setting], title: str) -> Figure:
    """Draw in-local and out-local accuracy against the round (FedNTD Fig. 4).

    The global model from before and after each round is evaluated on the joint distribution of the
    round's clients. Local models are shown by their mean and standard deviation.
    """
    lines = []
    for method in list_methods(settings):
        record = method.files[0].record
        if record is not None and record.local_rounds:
            tables = before_local_after(record)
            for (model, dashes), table in zip(MODELS.items(), tables, strict=True):
                own = {"label": f"{method.label}: {model}", "linestyle": dashes, "marker": ""}
                shown = table.rename(columns=lambda side: f"{side}-local accuracy")
                lines.append((shown, style_of(method) | own))
    if not lines:
        raise ConfigError("no run has accuracies of local models")
    text = f"Accuracy before and after local training\n{title}"
    return draw_lines(text, lines, ddof=0, ylim=(0, 1.03))


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
        pd.DataFrame(rows, list(record.local_rounds), ["in", "out"]) for rows in (before, after)
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
    table = pd.concat([summaries(points[x], columns, x) for x in sorted(points)])
    label = " and ".join(displayed(sorted(algorithms)))
    lines = [(table, {"label": label, "color": "black"})]
    for method in list_methods(settings):
        if method.runs[0].summary["algorithm"] not in algorithms:
            ends = [summaries(method.runs, columns, x) for x in (min(points), max(points))]
            dotted = style_of(method) | {"linestyle": ":", "marker": ""}
            lines.append((pd.concat(ends).groupby(level=0).mean(), dotted))
    is_log = min(points) > 0 and max(points) >= 10 * min(points)
    scale: dict[str, Any] = {"xscale": "log"} if is_log else {}
    name = key.rpartition(".")[2]
    figure = draw_lines(f"Accuracy and forgetting by {name}\n{title}", lines, name, **scale)
    for axes in figure.axes:
        axes.set_xticks(sorted(points), [f"{x:g}" for x in sorted(points)])
        axes.minorticks_off()
    return figure
