"""Make run directories from accuracies that other programs measured (`fedexp import`)."""

import csv
import io
import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedexp.core import storage, yaml_files
from fedexp.core.console import plural
from fedexp.core.errors import ConfigError, require
from fedexp.data.partitioned import Partition, partition_hash
from fedexp.metrics.accuracy import class_mean
from fedexp.metrics.forgetting_metric import BackwardTransfer, Consistency, Metrics, RoundDrop
from fedexp.metrics.history import History
from fedexp.metrics.tasks import TaskHistory
from fedexp.rundir import files
from fedexp.rundir.csv_files import RunFiles
from fedexp.training.rows import Row, json_value

TASKS, CLASSES = "tasks", "classes"  # values of --columns
# columns of eval_results.csv, written by Avalanche's CSVLogger (ContinualAI/avalanche,
# avalanche/logging/csv_logger.py): trained experience, tested experience, accuracy
AVALANCHE = ("training_exp", "eval_exp", "eval_accuracy")
Tables = dict[str, list[Row]]


def import_accuracies(options: Namespace) -> dict[str, Any]:
    """Make a run directory from the flags of `fedexp import`, and return the run's summary.

    Raises ConfigError for an invalid flag or file. In that case, nothing is written.
    """
    require(options.every >= 1, "--every", options.every, "at least 1")
    if os.path.lexists(options.directory):
        raise ConfigError(f"{options.directory}: already exists; choose another directory")
    try:
        content = storage.regular(options.file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{options.file}: cannot be read ({error.strerror})") from error
    matrix, names = read_matrix(content, options)
    of_columns = of_tasks if options.columns == TASKS else of_classes
    tables, results = of_columns(matrix, options.every)
    tested = [row["test_accuracy"] for row in tables[files.ROUNDS][1:]]
    results |= {"accuracy": tested[-1], "best_accuracy": float(np.nanmax(tested))}
    choices = {name: getattr(options, name) for name in ("algorithm", "dataset", "partition")}
    run = {"seed": options.seed, "rounds": options.every * (len(matrix) - 1)}
    source = {"file": options.file.name, "sha256": sha256(content).hexdigest()}
    summary = {"status": "completed"} | choices | run | results | {"imported": source}
    target = options.directory.absolute()
    with storage.storing(target):
        storage.make_folder(target.parent)
        with TemporaryDirectory(dir=target.parent, prefix=".import-") as temporary:
            directory = Path(temporary, "run")
            write_tables(directory, tables, names)
            storage.write_atomically(directory / files.OVERRIDES, b"[]\n")
            config = yaml_files.dump(run | {"choices": choices})
            storage.write_atomically(directory / files.CONFIG, config.encode())
            storage.write_json(directory / files.SUMMARY, summary)
            os.replace(directory, target)
    return summary


def write_tables(directory: Path, tables: Tables, names: Sequence[str]) -> None:
    """Write the csv files and, for the names of classes, a partition with one empty client."""
    written = RunFiles(directory, tables)
    for name, rows in tables.items():
        written.append(name, rows)
    written.close()
    if files.CLASSES in tables:
        nobody, counts = (np.zeros(0, np.int64),), np.zeros((1, len(names)), np.int64)
        partition = Partition(nobody, counts, partition_hash(nobody), {"scheme": "imported"})
        partition.save(directory / files.PARTITION, names)


def of_tasks(matrix: np.ndarray, every: int) -> tuple[Tables, dict[str, Any]]:
    """Return the tables and the summary measures computed from the accuracies on tasks.

    The test accuracy of a row is the mean over the tasks, or nan if a task was not tested.
    """
    records, rounds, cells = [], [], []
    for task, row in enumerate(matrix):
        number = task * every
        records.append((number, row))
        values = TaskHistory.of(records, every).values()
        rounds.append({"round": number, "test_accuracy": float(row.mean()), "task": task} | values)
        for tested, accuracy in enumerate(row.tolist(), 1):
            cell = {"round": number, "task": task, "evaluated_task": tested, "accuracy": accuracy}
            cells.append(cell)
    return {files.ROUNDS: rounds, files.TASKS: cells}, TaskHistory.of(records, every).summary()


def of_classes(matrix: np.ndarray, every: int) -> tuple[Tables, dict[str, Any]]:
    """Return the tables and the summary measures computed from the class accuracies.

    The test accuracy of a row is the mean over the classes.
    """
    parts = [BackwardTransfer(), RoundDrop(local=False)]
    if not np.isnan(matrix[0]).any():  # the consistency of round 1 needs the initial model
        parts.append(Consistency())
    metrics, history = Metrics(members=parts), History(np.zeros((1, matrix.shape[1]), np.int64))
    rounds, cells = [], []
    for number, row in zip(range(0, every * len(matrix), every), matrix, strict=True):
        history.add(number, row)
        values = metrics.round_values(history)
        rounds.append({"round": number, "test_accuracy": float(class_mean(row))} | values)
        for label, accuracy in enumerate(row.tolist()):
            cells.append({"round": number, "class": label, "accuracy": accuracy})
    results = {name: json_value(value) for name, value in metrics.summary(history).items()}
    return {files.ROUNDS: rounds, files.CLASSES: cells}, results


# --- reading


def read_matrix(content: bytes, options: Namespace) -> tuple[np.ndarray, list[str]]:
    """Return the accuracies in [0, 1], float64 [rows, columns], and the names of the columns.

    Row 0 is the initial model. The row is nan if the file does not contain this model.
    """
    path, is_square = options.file, options.columns == TASKS
    try:
        text = content.decode("utf-8-sig")
        rows = json.loads(text) if path.suffix == ".json" else list(csv.reader(io.StringIO(text)))
    except (ValueError, RecursionError, csv.Error) as error:
        raise ConfigError(f"{path}: is not a valid csv file or .json file ({error})") from error
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f"{path}: must be a list of rows, each of them a list of numbers")
    rows, names, first = [row for row in rows if row], [], options.initial
    if rows and is_header(rows[0]):
        names, rows = [str(name) for name in rows[0]], rows[1:]
    if is_square and set(AVALANCHE) <= set(names):
        rows, first = arrange_log(path, [dict(zip(names, row, strict=False)) for row in rows])
    count = len(rows) - first
    if count < 1:
        raise ConfigError(f"{path}: has no accuracies")
    width = count if is_square else len(names or rows[0])
    accuracy = np.full((len(rows), width), np.nan)
    for i, row in enumerate(rows):
        if len(row) > width or (len(row) < width and not is_square):
            allowed = plural(width, "column")
            raise ConfigError(
                f"{path}: row {i + 1} has {len(row)} values, but the table has {allowed}"
            )
        try:
            accuracy[i, : len(row)] = list(map(number, row))
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{path}: row {i + 1} has an invalid number ({error})") from error
    check_accuracies(accuracy, first, options)
    if not first:
        accuracy = np.vstack([np.full(width, np.nan), accuracy])
    return accuracy / 100 if options.percent else accuracy, names or list(map(str, range(width)))


def number(cell: Any) -> float:
    """Return the number in a cell, or nan for an empty cell or null."""
    return math.nan if cell in (None, "") else float(cell)


def is_header(row: Sequence[Any]) -> bool:
    """Return whether a row has column names, or column numbers that start at 0 or 1."""
    try:
        values = list(map(number, row))
    except ValueError:
        return True
    except (TypeError, OverflowError):
        return False
    return len(values) > 2 and values[0] in (0, 1) and bool((np.diff(values) == 1).all())


def arrange_log(path: Path, log: Sequence[Mapping[str, str]]) -> tuple[list[list[Any]], bool]:
    """Return (rows, whether the first row is the initial model) of Avalanche's eval_results.csv.

    The log has a line for each test. The trained experience is `None` before training.
    """
    found: dict[tuple[int, int], str] = {}
    for line in log:
        trained, tested, accuracy = (line.get(name, "") for name in AVALANCHE)
        try:
            key = -1 if trained == "None" else int(trained), int(tested)
        except ValueError as error:
            raise ConfigError(
                f"{path}: has an experience (task) that is not an integer ({error})"
            ) from error
        if key in found:
            raise ConfigError(
                f"{path}: experience {tested} is tested twice after experience {trained}; only one"
                " test stream is allowed"
            )
        found[key] = accuracy
    stages, width = sorted({t for t, _ in found}), max((s for _, s in found), default=-1) + 1
    return [[found.get((t, s)) for s in range(width)] for t in stages], -1 in stages


def check_accuracies(accuracy: np.ndarray, first: bool, options: Namespace) -> None:
    """Raise ConfigError for accuracies that are out of range or missing.

    After task t, the accuracies on tasks 1 to t are needed. first: whether the first row is the
    initial model.
    """
    path, limit = options.file, 100 if options.percent else 1
    odd = accuracy[(accuracy < 0) | (accuracy > limit)]
    if odd.size:
        hint = "" if options.percent else "; use --percent if the values are percentages"
        raise ConfigError(f"{path}: accuracy {odd[0]:g} must be between 0 and {limit}{hint}")
    if options.percent and not (accuracy > 1).any():
        raise ConfigError(f"--percent: {path} has no value above 1; omit this flag for fractions")
    missing = np.isnan(accuracy)
    if options.columns == TASKS:
        missing = np.tril(missing, -int(first))
    if missing.any():
        row, column = np.argwhere(missing)[0] + 1
        raise ConfigError(f"{path}: row {row} has no accuracy in column {column}")
