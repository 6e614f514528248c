"""Terminal output of a run: a live display, or plain lines when the output is not a terminal; and
the result."""

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedexp.core.console import ROUNDS_LOG
from fedexp.core.storage import display_path
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(ROUNDS_LOG)
MOST_LINES = 50  # of plain output for a run
RECENT = 20  # rounds whose mean duration predicts the time left
TASK_ROWS = {  # of a run in continual learning
    "average accuracy": "average_accuracy",
    "new-task accuracy": "new_task_accuracy",
    "task forgetting": "task_forgetting",
}
COLOURS = {
    "running": "cyan",
    "completed": "green",
    "diverged": "red",
    "failed": "red",
    "interrupted": "yellow",
}
COLOURS["stopped"] = "yellow"


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let the run continue without output when its reader leaves, as in `fedexp ... | head`."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress(Tracker):
    """The progress of one run. As a context manager it gives the terminal back whatever happens.

    among_others: other runs write to the same terminal, so there are lines only, which say whose
    they are.
    """

    def __init__(self, console: Console | None = None, among_others: bool = False) -> None:
        self.console = console or Console(highlight=False)
        self.among_others = among_others
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.abort()
        self._stop()

    def start(self, info: RunInfo) -> None:
        self._name, self._total, self._round = info.name, info.total_rounds, info.first_round
        self._every = math.ceil(info.total_rounds / MOST_LINES) or 1
        self._status, self._started, self._first_line = "running", time.monotonic(), True
        self._values: dict[str, float] = {}  # the latest of each; not every round is evaluated
        self._best = info.best_accuracy
        self._durations: deque[float] = deque(maxlen=RECENT)
        if self.console.is_terminal and not self.among_others:
            self._live = Live(
                get_renderable=self._render, console=self.console, refresh_per_second=2
            )
            self._live.start()

    def log_round(self, record: RoundRecord) -> None:
        self._round = record.round
        self._values |= {k: v for k, v in record.values.items() if v is not None}
        accuracy, seconds = (
            record.values.get(self._chooses(record.values)),
            record.values.get("seconds"),
        )
        # the initial model is not a result, as in summary.json
        if accuracy is not None and record.round >= 1:
            self._best = max(accuracy, self._best or 0.0)
        if seconds is not None and record.round > 0:  # round 0 only evaluates
            self._durations.append(seconds)
        line = self._line()
        log.info("%s", line)
        if self._live is None and (
            self._first_line or record.round % self._every == 0 or record.round == self._total
        ):
            self._print_line(line)

    @staticmethod
    def _chooses(values: Mapping[str, Any]) -> str:
        """Return the column whose best value is shown."""
        return "validation_accuracy" if "validation_accuracy" in values else "test_accuracy"

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: Mapping[str, "pd.DataFrame"]
    ) -> None:
        self._status = str(summary.get("status", "completed"))
        self._stop()

    def abort(self) -> None:
        if self._live is not None:
            self._status = "interrupted"
        self._stop()

    @property
    def seconds_left(self) -> float | None:
        """Return the rounds to go times the mean duration of the recent ones; None before the
        first."""
        return None if self._pace is None else (self._total - self._round) * self._pace

    @property
    def _pace(self) -> float | None:
        """Return the mean seconds per round of the recent rounds."""
        return sum(self._durations) / len(self._durations) if self._durations else None

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self) -> str:
        """Return the last round in one line."""
        count = f"round {self._round:>{len(str(self._total))}}/{self._total}"
        pace = [f"{duration(self._pace)}/round"] if self._pace is not None else []
        left = [f"left {duration(self.seconds_left)}"] if self.seconds_left is not None else []
        return "  ".join([count, *self._metrics(), *pace, *left])

    def _print_line(self, line: str) -> None:
        self._first_line = False
        name = [self._name] if self.among_others else []
        # The console would wrap it, whatever the width of a log.
        with reader_may_leave():
            write_line("  ".join([*name, line]), self.console)

    def _metrics(self) -> list[str]:
        """Return the latest numbers, each with its name; undefined ones are left out."""
        known = self._values
        trained = known.get("train_loss")  # not of the initial model
        average = known.get("average_accuracy")
        if trained is None and "test_loss" not in known:
            loss = ("validation loss {:.3g}", known.get("validation_loss"))
        else:
            loss = (
                ("test loss {:.3g}", known.get("test_loss"))
                if trained is None
                else ("train loss {:.3g}", trained)
            )
        shown = [
            ("accuracy {:.4f}", known.get("test_accuracy")),
            ("validation {:.4f}", known.get("validation_accuracy")),
            # In continual learning the average of the learned ones takes the place of the best: a
            # terminal is 80 wide.
            ("best {:.4f}", self._best) if average is None else ("average {:.4f}", average),
            ("forgetting {:.3f}", known.get("forgetting", known.get("validation_forgetting"))),
            loss,
        ]
        return [text.format(value) for text, value in shown if value is not None]

    def _render(self) -> RenderableType:
        elapsed, left = time.monotonic() - self._started, self.seconds_left
        state = Text(self._status, style=COLOURS.get(self._status, ""))
        if self._status == "running":
            state = Text(f"left {duration(left)}" if left is not None else duration(elapsed))
        if self._pace is not None:
            state = Text.assemble(f"{duration(self._pace)}/round  ", state)
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(self._total, 1), completed=self._round)
        row.add_row(f"round {self._round}/{self._total}", bar, state)
        title = Text(self._name, style="bold", overflow="ellipsis", no_wrap=True)
        return Group(title, row, Text("  ".join(self._metrics())))


def write_line(text: str, console: Console) -> None:
    """Write a line in one piece, so that processes that share a terminal do not mix within a
    line."""
    console.file.write(f"{text}\n")
    console.file.flush()


@reader_may_leave()
def result_line(
    name: str, summary: Mapping[str, Any], directory: Path, console: Console | None = None
) -> None:
    """Return the result of a run in one line, for runs among others."""
    rows = dict(_result_rows(summary))
    shown = (
        ("accuracy", "forgetting")
        if "accuracy" in summary
        else ("validation accuracy", "validation forgetting")
    )
    values = [f"{key} {rows[key]}" for key in (*shown, "time") if key in rows]
    line = "  ".join([name, rows["status"], *values, str(display_path(directory))])
    write_line(line, console or Console(highlight=False))


@reader_may_leave()
def result_table(
    summary: Mapping[str, Any], files: Sequence[Path], console: Console | None = None
) -> None:
    """Print the result of a run (the content of summary.json; unknown values as a dash) and where
    its files are."""
    console = console or Console(highlight=False)
    rows = _result_rows(summary)
    if console.is_terminal:
        table = Table(
            box=box.ROUNDED,
            show_header=False,
            title="Result",
            title_justify="left",
            title_style="bold",
        )
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(
                name, Text(value, style=COLOURS.get(value, "") if name == "status" else "")
            )
        console.print(table)
    else:
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            print(f"{name:<{width}}  {value}", file=console.file)
    for path in files:  # not through the console, which would break a long path
        print(f"  {display_path(path)}", file=console.file)
    console.file.flush()


def _result_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    def number(key: str, form: str) -> str:
        value = summary.get(key)
        return "-" if value is None else format(value, form)

    seconds = summary.get("seconds")
    tasks = [(name, key) for name, key in TASK_ROWS.items() if key in summary]
    second = [(f"{name}, augmented", f"{name}_augmented") for name in ("accuracy", "forgetting")]
    held_out = (
        "validation_accuracy",
        "validation_best_accuracy",
        "best_round",
        "validation_forgetting",
    )
    own = ("personal_accuracy", "personal_accuracy_worst", "personal_forgetting")
    second += [(name.replace("_", " "), name) for name in (*held_out, *own)]
    tested = "validation_accuracy" not in summary or "accuracy" in summary
    tests = ("accuracy", "best_accuracy", "forgetting", "round_forgetting") if tested else ()
    targets = summary.get("rounds_to_target") or {}
    return [
        ("algorithm", str(summary.get("algorithm", "-"))),
        ("dataset", str(summary.get("dataset", "-"))),
        ("status", str(summary.get("status", "-"))),
        ("rounds", number("rounds", "d")),
        ("seed", number("seed", "d")),
        *((name.replace("_", " "), number(name, ".4f")) for name in tests),
        *(
            (name, number(key, "d" if key == "best_round" else ".4f"))
            for name, key in second
            if key in summary
        ),
        *((name, number(key, ".4f")) for name, key in tasks),
        (
            "rounds to target",
            ", ".join(f"{k}: {'never' if v is None else v}" for k, v in targets.items()) or "-",
        ),
        ("time", "-" if seconds is None else duration(seconds)),
        ("samples/s", number("train_samples_per_second", ",.0f")),
        ("hardware", _hardware(summary.get("hardware"))),
    ]


def _hardware(value: object) -> str:
    if not isinstance(value, Mapping):
        return "-" if value is None else str(value)
    timed = value.get("by_timing") or ()
    shown = {k: v for k, v in value.items() if v is not None and not isinstance(v, Mapping | list)}
    return ", ".join(f"{k} {v}" + " (by timing)" * (k in timed) for k, v in shown.items()) or "-"


def duration(seconds: float) -> str:
    """Format a duration: 0.42 s, 12.3 s, then h:mm:ss."""
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.3g} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
