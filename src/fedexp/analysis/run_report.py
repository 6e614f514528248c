"""Write the tables of one run (`fedexp report RUN`) as csv and LaTeX, and print them."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedexp.analysis.frame import tidy
from fedexp.analysis.layout import Section, all_markdown, csv, latex
from fedexp.analysis.means_table import Layout, shown_metrics
from fedexp.analysis.measures import format_value, title_of
from fedexp.analysis.naming import displayed
from fedexp.config.values import make_group
from fedexp.core.errors import ConfigError, say
from fedexp.core.storage import display_path, remove_leftovers, typed_path, write_atomically
from fedexp.data.views import AUGMENTED, data_name, name_in_view, suffix
from fedexp.figures import make_figures, read_settings
from fedexp.figures.load import RunData, TaskFile, load_run_data
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.metrics.own_test import own_results
from fedexp.metrics.personal import ClientResults, client_results, spread
from fedexp.metrics.record import Record
from fedexp.rundir.reader import RunDirectory

# the file's name, its values, and the table that is shown
Table = tuple[str, pd.DataFrame, Section]


def report_run(directory: Path, options: Namespace) -> None:
    """Write the tables and figures of a run, and print them.

    options: the flags of `fedexp report`. Raises ConfigError if the run has no table and no values
    are requested, or if it does not have these values.
    """
    run = load_run_data(directory)
    written: list[Path] = []
    if options.metrics:
        print(all_markdown([values_table(RunDirectory(directory), options.metrics)]))
    for name, table, shown in [*task_tables(run), *client_tables(run)]:
        written += [directory / f"{name}.csv", directory / f"{name}.tex"]
        write_atomically(written[-2], csv(table.reset_index()).encode())
        write_atomically(written[-1], latex(shown).encode())
        print(all_markdown([shown]))
    if not (written or options.metrics):
        raise ConfigError(
            f"{directory}: this run has no table; tables need two learned tasks, or the results of"
            " clients (evaluate=personal or evaluate=own); --metrics shows values, and `fedexp"
            f" figures {typed_path(directory)}` draws its figures"
        )
    if written and not options.no_figures:
        written += draw_run(directory, options)
    remove_leftovers(written)
    print("".join(f"  {display_path(path)}\n" for path in written), end="")


def values_table(run: RunDirectory, metrics: Sequence[str]) -> Section:
    """Return a row with the requested values of a run. metrics: see `shown_metrics`."""
    every = tidy([run])
    shown = shown_metrics(every, Layout(tuple(metrics)))
    cells = {title_of(name): format_value(every[name][0], name) for name in shown}
    return Section("", pd.DataFrame(cells, displayed(list(every["method"]))))


def draw_run(directory: Path, options: Namespace) -> list[Path]:
    """Draw the figures of a run and of its metrics, and return their paths.

    options: the flags of the figures. A metric of the user is left out with a message, unless its
    class is trusted.
    """
    node = RunDirectory(directory).config.get("forgetting_metric", {})
    try:
        metrics = make_group(node, "forgetting_metric", list[ForgettingMetric])
    except ConfigError as error:
        metrics = []
        say(f"{directory}: without the figures of its metrics: {error}")
    return make_figures(directory, None, read_settings(directory).changed(options), metrics)


def task_tables(run: RunData) -> Iterator[Table]:
    """Yield the table of accuracies after each task on each test set."""
    for view, file in run.tasks_of.items():
        if len(file.matrix):
            values = task_table(file)
            images = f", {view}" if view == AUGMENTED else ""
            title = f"{data_name(view).capitalize()} accuracy after each task (%){images}"
            yield f"task_matrix{suffix(view)}", values, Section(title, formatted(values), "after")


def client_tables(run: RunData) -> Iterator[Table]:
    """Yield the table of clients on each test set, if the run has tested their models."""
    for view, record in run.records.items():
        found: ClientResults = {}
        if run.has(name_in_view("personal_accuracy", view)):
            found |= client_results(record)
            if not run.has(name_in_view("personal_global_accuracy", view)):  # no global model
                found.pop("personal_global", None)
        if run.has(name_in_view("own_accuracy", view)):
            found |= own_results(record)
        if found:
            values = client_table(record, found)
            title = f"Results of the clients (%){suffix(view).replace('_', ', ')}"
            shown = with_spreads(values)
            yield f"client_results{suffix(view)}", values, Section(title, shown, "client")


def client_table(record: Record, found: ClientResults) -> pd.DataFrame:
    """Return a row for each client: its data, its rounds, and its results in the last round.

    The columns are examples, classes (how many it has), rounds (in which it took part), and
    accuracy and forgetting of the models in `found`.
    """
    counts = record.counts_until(record.rounds[-1])
    table = pd.DataFrame({"examples": counts.sum(1), "classes": (counts > 0).sum(1)})
    taken = [client for cohort in record.cohorts.values() for client in cohort]
    table["rounds"] = np.bincount(np.array(taken, dtype=np.int64), minlength=len(counts))
    for model, both in found.items():
        for key, values in zip(("accuracy", "forgetting"), both, strict=True):
            table[f"{model.removeprefix('personal_')}_{key}"] = values
    return table.rename_axis("client")


def with_spreads(values: pd.DataFrame) -> pd.DataFrame:
    """Return the table of clients as text, with mean, deviation and worst tenth below."""
    data, results = values.iloc[:, :3], values.iloc[:, 3:]
    spreads = {
        name: spread(results[name].to_numpy(), str(name).endswith("accuracy")) for name in results
    }
    below = pd.DataFrame(spreads, ["mean", "deviation", "worst tenth"])
    joined = data.astype(str).join(formatted(results))
    return (
        pd.concat([joined, formatted(below)])
        .fillna("")
        .rename(columns=lambda name: name.replace("_", " "))
    )


def task_table(file: TaskFile) -> pd.DataFrame:
    """Return the accuracy on each task after each task t, and their mean `average`.

    The mean is over the tasks 1 to t, or over all tasks if clients learn them in different orders.
    """
    matrix = file.matrix
    names = [f"task {s}" for s in range(1, matrix.shape[1] + 1)]
    index = pd.Index(np.arange(1, len(matrix) + 1), name="after_task")
    return pd.DataFrame(matrix, index, names).assign(average=np.nanmean(matrix, 1))


def formatted(values: pd.DataFrame) -> pd.DataFrame:
    """Return a table of fractions as text in per cent; undefined values are empty."""
    return values.map(lambda value: "" if np.isnan(value) else f"{100 * value:.2f}")
