"""Terminal output of a run: first its progress, then its result.

The progress is a live display, or plain lines if the output is not a terminal.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fedexp.core.console import ROUNDS_LOG
from fedexp.core.storage import display_path
from fedexp.metrics.forgetting_metric import main_columns
from fedexp.rundir import files
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(ROUNDS_LOG)
MOST_LINES = 50  # maximum number of plain lines per run
RECENT = 20  # number of recent rounds from which the remaining time is estimated
COLOURS = {
    "running": "cyan",
    "completed": "green",
    "diverged": "red",
    "failed": "red",
    "interrupted": "yellow",
    "stopped": "yellow",
}


class Progress(Tracker):
    """Show the progress of one run, and then its result.

    shares_terminal: whether other runs write to the same terminal. If so, the output is plain lines
    that start with the run's name. job: the name of the run in a sweep, whose result is a single
    line, or an empty text.
    """

    name: ClassVar[str] = "the console"

    def __init__(
        self,
        console: Console | None = None,
        shares_terminal: bool = False,
        job: str = "",
    ) -> None:
        self.console = console or Console(highlight=False)
        self.shares_terminal = shares_terminal
        self.job = job
        self._live: Live | None = None

    def start(self, info: RunInfo) -> None:
        self._name, self._directory = self.job or info.name, info.directory
        self._total, self._round = info.total_rounds, info.first_round
        self._every = math.ceil(info.total_rounds / MOST_LINES) or 1
        self._status, self._started, self._first_line = "running", time.monotonic(), True
        self._values: dict[str, float] = {}  # latest known value of each metric
        self._best = info.best_accuracy
        self._durations: deque[float] = deque(maxlen=RECENT)
        if self.console.is_terminal and not self.shares_terminal:
            self._live = Live(
                get_renderable=self._render, console=self.console, refresh_per_second=2
            )
            self._live.start()

    def after_round(self, record: RoundRecord) -> None:
        values = record.values
        self._round = record.round
        self._values |= {k: v for k, v in values.items() if v is not None}
        chooses = "validation_accuracy" if "validation_accuracy" in values else "test_accuracy"
        accuracy, seconds = values.get(chooses), values.get("seconds")
        # Round 0 only evaluates the initial model; summary.json does not count it as a result.
        if accuracy is not None and record.round >= 1:
            self._best = max(accuracy, self._best or 0.0)
        if seconds is not None and record.round >= 1:
            self._durations.append(seconds)
        line = self._line(values)
        log.info("%s", line)
        is_due = record.round % self._every == 0 or record.round == self._total
        if self._live is None and (self._first_line or is_due):
            self._first_line = False
            write_line(f"{self._name}  {line}" if self.shares_terminal else line, self.console)

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: Mapping[str, "pd.DataFrame"]
    ) -> None:
        self._status = str(summary.get("status", "completed"))
        self._stop()
        if self.shares_terminal or self.job:
            result_line(self._name, summary, self._directory, self.console)
        else:
            result_table(summary, self._directory, figures, self.console)

    def abort(self) -> None:
        if self._live is not None:
            self._status = "interrupted"
        self._stop()

    @property
    def _pace(self) -> float | None:
        """Return the mean duration of recent rounds in seconds, or None before round 1 ends."""
        return fmean(self._durations) if self._durations else None

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated remaining seconds, or None before the first round ends."""
        return None if self._pace is None else (self._total - self._round) * self._pace

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, values: Mapping[str, float | None]) -> str:
        """Return the line that is printed after a round. values: the values of the round."""
        number = f"round {self._round:>{len(str(self._total))}}/{self._total}"
        parts = [number, *self._metrics(values)]
        if self._pace is not None and self.seconds_left is not None:
            parts.append(f"{duration(self._pace)}/round")
            parts += [f"left {duration(self.seconds_left)}"] * (self._round < self._total)
        return "  ".join(parts)

    def _metrics(self, values: Mapping[str, float | None]) -> list[str]:
        """Return the given metrics, each with its name. A metric without a value is shown as "-".

        Metrics that no round has had yet are omitted.
        """
        known = self._values
        losses = ("train_loss", "test_loss", "validation_loss")
        # Before round 1, the training loss is undefined.
        loss = next((name for name in losses if name in known), "train_loss")
        forgetting = "forgetting" if "forgetting" in known else "validation_forgetting"
        # A terminal has 80 columns: in continual learning, show the average accuracy of the
        # learned tasks instead of the best accuracy.
        average = "average_accuracy" if "average_accuracy" in known else "best"
        shown = {
            "test_accuracy": "accuracy {:.4f}",
            "validation_accuracy": "validation {:.4f}",
            average: f"{average.removesuffix('_accuracy')} {{:.4f}}",
            forgetting: "forgetting {:.3f}",
            loss: f"{loss.replace('_', ' ')} {{:.3g}}",
        }
        given = {**values, "best": self._best}
        return [
            text.format(given[name])
            if given.get(name) is not None
            else f"{text.rsplit(' ', 1)[0]} -"
            for name, text in shown.items()
            if name in known or given.get(name) is not None
        ]

    def _render(self) -> RenderableType:
        elapsed, left = time.monotonic() - self._started, self.seconds_left
        state = Text(self._status, style=COLOURS.get(self._status, ""))
        if self._status == "running":
            state = Text(f"left {duration(left)}" if left is not None else duration(elapsed))
        if self._pace is not None:
            state = Text.assemble(f"{duration(self._pace)}/round  ", state)
        columns = (Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True))
        row = Table.grid(*columns, padding=(0, 1), expand=True)
        bar = ProgressBar(total=max(self._total, 1), completed=self._round)
        row.add_row(f"round {self._round}/{self._total}", bar, state)
        title = Text(self._name, style="bold", overflow="ellipsis", no_wrap=True)
        return Group(title, row, Text("  ".join(self._metrics(self._values))))


def write_line(text: str, console: Console) -> None:
    """Write a line in one call, so that processes sharing a terminal do not mix their lines."""
    console.file.write(f"{text}\n")
    console.file.flush()


def result_line(name: str, summary: Mapping[str, Any], directory: Path, console: Console) -> None:
    """Print a run's result in one line, for the runs of a sweep."""
    rows = _result_rows(summary)
    prefix = "" if "accuracy" in summary else "validation "
    shown = [f"{prefix}accuracy", f"{prefix}forgetting", "time"]
    values = [f"{key} {rows[key]}" for key in shown if key in rows]
    line = "  ".join([f"{name}: {rows['status']}", *values, str(display_path(directory))])
    write_line(line, console)


def result_table(
    summary: Mapping[str, Any],
    directory: Path,
    figures: Sequence[Path],
    console: Console | None = None,
) -> None:
    """Print a run's result and the paths of its files.

    summary: the content of summary.json. Missing values are shown as a dash.
    """
    console = console or Console(highlight=False)
    rows = _result_rows(summary)
    if console.is_terminal:
        columns = (Column(style="cyan", no_wrap=True), Column(overflow="fold"))
        table = Table(*columns, box=box.ROUNDED, show_header=False)
        for name, value in rows.items():
            table.add_row(name, Text(value, style=COLOURS.get(value, "")))
        console.print(table)
    else:
        width = max(map(len, rows))
        for name, value in rows.items():
            print(f"{name:<{width}}  {value}", file=console.file)
    names = (files.SUMMARY, *files.TABLES, files.PARTITION, files.CONFIG)
    paths = [directory / name for name in names if (directory / name).exists()]
    for path in (*paths, *figures):  # the console would wrap a long path, so print it directly
        print(f"  {display_path(path)}", file=console.file)
    console.file.flush()


def _result_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return a dict that maps the labels in the table of results to formatted values."""

    def shown(key: str, form: str = "") -> str:
        value = summary.get(key)
        return "-" if value is None else format(value, form)

    rows = {key: shown(key) for key in ("algorithm", "dataset", "status", "rounds", "seed")}
    for column in main_columns():
        if column.key in summary:
            name = column.key.replace("new_task", "new-task").replace("_augmented", ", augmented")
            form = "d" if column.quantity.whole else ".4f"
            rows[name.replace("_", " ")] = shown(column.key, form)
    targets = summary.get("rounds_to_target") or {}
    reached = [f"{target}: {'never' if n is None else n}" for target, n in targets.items()]
    rows["rounds to target"] = ", ".join(reached) or "-"
    seconds = summary.get("seconds")
    rows["time"] = "-" if seconds is None else duration(seconds)
    rows["samples/s"] = shown("train_samples_per_second", ",.0f")
    hardware = summary.get("hardware") or {}
    rows["hardware"] = ", ".join(f"{key} {value}" for key, value in hardware.items()) or "-"
    return rows


def duration(seconds: float) -> str:
    """Format a duration as `0.42 s` or `12.3 s`, or as h:mm:ss from one minute on."""
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.3g} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
