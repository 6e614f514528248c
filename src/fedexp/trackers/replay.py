"""A finished run read back from its files, as a tracker was told about it while it ran."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedexp.core.errors import ConfigError
from fedexp.core.views import VIEWS, file_of, others
from fedexp.data.partition import load_npz
from fedexp.figures import make_figures
from fedexp.metrics.history import later_partitions, load_history
from fedexp.rundir import files
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker


def final_tables(directory: Path) -> dict[str, pd.DataFrame]:
    """The tables in long format of a finished run, by name."""
    paths = (directory / name for name in (*(file_of(files.CLASSES, view) for view in VIEWS), files.TASKS))
    return {path.stem: pd.read_csv(path) for path in paths if path.exists()}


class FinishedRun:
    """A run directory whose run is over. Raises ConfigError naming what is missing, damaged or cut short."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.summary = self._read(files.SUMMARY, json.loads)
        if self.summary.get("status") not in ("completed", "diverged"):
            raise ConfigError(f"{directory}: the run there has not come to its end (see {files.ERROR})")
        self.config = self._read(files.CONFIG, yaml.safe_load)
        if not isinstance(self.config.get("choices"), dict):
            raise ConfigError(f"{directory / files.CONFIG}: not written by a run (it lacks `choices`)")
        self.history = load_history(directory)
        self.others = {view: load_history(directory, view) for view in others(self.config.get("test_views") or ())}
        self.rows = list(self._rows())
        last = self.rows[-1]["round"] if self.rows else None
        if last != self.summary["rounds"]:
            raise ConfigError(
                f"{directory / files.ROUNDS}: ends with round {last}, the run with {self.summary['rounds']}; cut short?"
            )

    def _read(self, name: str, parse: Any) -> dict[str, Any]:
        path = self.directory / name
        try:
            content = parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{self.directory}: no finished run there (it lacks {name})") from None
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: cannot be read ({error})") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: cannot be read (not a mapping)")
        return content

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of rounds.csv; None where a cell is empty or has no finite number."""
        path = self.directory / files.ROUNDS
        try:
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    yield {"round": int(row.pop("round"))} | {name: number(text) for name, text in row.items()}
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a table of rounds ({error!r})") from None

    @property
    def total_rounds(self) -> int:
        """Return the number of rounds that were asked for, of all tasks."""
        per_task = (self.config.get("scenario") or {}).get("rounds_per_task") or self.config["rounds"]
        return per_task * (1 + len(later_partitions(self.directory)))

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(map(str, load_npz(self.directory / files.PARTITION)["classes"]))

    def info(self, wandb_id: str | None) -> RunInfo:
        """Return what a tracker is told first."""
        return RunInfo.of(
            self.directory,
            self.config,
            self.summary.get("sweep"),
            total_rounds=self.total_rounds,
            first_round=0,
            classes=self.classes,
            wandb_id=wandb_id,
        )

    def records(self) -> Iterator[RoundRecord]:
        """Yield what a tracker is told of each round."""
        accuracy = dict(zip(self.history.rounds, self.history.class_accuracy, strict=True))
        for row in self.rows:
            values, here = {k: v for k, v in row.items() if k != "round"}, row["round"]
            further = {view: history.upto(here) for view, history in self.others.items()}
            yield RoundRecord(here, values, accuracy.get(here), self.history.upto(here), further)

    def figures(self) -> list[Path]:
        """Return the pictures that are there, drawn anew where there are none although the run was to have them."""
        drawn = sorted((self.directory / "figures").glob("*.png"))
        return drawn or (make_figures(self.directory) if self.config.get("figures", True) else [])

    def replay(self, tracker: Tracker, wandb_id: str | None = None) -> None:
        """Tells a tracker all of it again."""
        tracker.start(self.info(wandb_id))
        for record in self.records():
            tracker.log_round(record)
        tracker.finish(self.summary, self.figures(), final_tables(self.directory))


def number(text: str) -> int | float | None:
    """A cell as it was written."""
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        value = float(text)
        return value if np.isfinite(value) else None
