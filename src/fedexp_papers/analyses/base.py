"""Callbacks that measure models in selected rounds of a run (config group `analysis`).

An analysis does not change the run: it draws no random numbers and does not modify any model. Each
one writes a table and a figure, and adds means over its rows to what trackers show.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.limits import Count, Limit
from fedexp.core.storage import display_path
from fedexp.core.tree import Params
from fedexp.engine.base import ClientRuntime
from fedexp.engine.network import flush_subnormals
from fedexp.figures import read_settings, save_all
from fedexp.figures.load import run_title
from fedexp.figures.pictures import Pictures
from fedexp.rundir.csv_files import CsvFile
from fedexp.rundir.files import ANALYSES
from fedexp.rundir.reader import RunDirectory, require_run
from fedexp.trackers.base import Callback, CallbackConfig, RoundRecord, RunInfo

Row = Mapping[str, Any]
Rounds = Annotated[
    list[int],
    Limit(
        "a list of round numbers from 1, such as [1,50,100]", lambda v: len(v) > 0 and min(v) >= 1
    ),
]


@dataclass(frozen=True)
class Measured:
    """A finished round, from which analyses are computed. The S clients are those of the cohort."""

    simulation: Any  # fedexp.training.simulation.Simulation
    record: RoundRecord

    @property
    def result(self) -> Any:
        """Everything that the round computed (`fedexp.training.state.RoundResult`)."""
        return self.record.result

    @cached_property
    def exchange(self) -> Any:
        """The last exchange in which clients sent models, or else the last exchange."""
        done = self.result.exchanges
        sending = [each for each in done if "params" in each.trained.messages]
        return (sending or done)[-1]

    @property
    def runtime(self) -> ClientRuntime:
        """The runtime with the first test set of the run."""
        runtime: ClientRuntime = self.simulation.runtime
        return runtime.tested_on(runtime.views[0])

    @property
    def clients(self) -> list[int]:
        return list(self.exchange.cohort.clients)

    @property
    def counts(self) -> np.ndarray:
        """The number of training labels per client and class, int [S, C]."""
        counts: np.ndarray = self.exchange.round.federation.counts[self.clients]
        return counts

    @cached_property
    def start(self) -> Params:
        """The parameters that the clients received."""
        return self.runtime.net.own(self.exchange.sent["params"])

    @property
    def local(self) -> Params | None:
        """The trained models, leaves [S, ...], or None if clients do not send whole models."""
        models: Params | None = self.exchange.trained.messages.get("params")
        if models is None:
            return None
        return {name: leaf for name, leaf in models.items() if name in self.start}

    @property
    def models(self) -> list[dict[str, Params]]:
        """The trained models with `params` and `buffers`, or [] if clients send no whole models."""
        trained = self.exchange.trained
        if "params" not in trained.messages:
            return []
        parts = {"params": trained.messages["params"], "buffers": trained.buffers}
        return [tree.row(parts, i) for i in range(len(self.clients))]


class Analysis(CallbackConfig, prefix="analysis."):
    """Base class of the analyses.

    An analysis measures the rounds in `rounds` or, if this is None, every `every`-th round and the
    last one.
    """

    file: ClassVar[str]  # the name of the table in the run directory
    columns: ClassVar[tuple[str, ...]]
    means: ClassVar[Mapping[str, str]]  # column -> name of its mean over the rows of a round
    reads_epochs: ClassVar[bool] = False  # whether it needs the models after each local epoch
    rounds: Rounds | None
    every: Count

    def is_due(self, round: int, last: int) -> bool:
        if self.rounds is not None:
            return round in self.rounds
        return round % self.every == 0 or round == last

    def check_run(self, simulation: Any) -> None:
        latest = max(self.rounds or [0])
        if latest > simulation.rounds:
            raise ConfigError(
                f"analysis.{Path(self.file).stem}.rounds: round {latest} is after the last round"
                f" (rounds={simulation.rounds})"
            )

    def rows(self, measured: Measured) -> list[dict[str, Any]]:
        """Return the rows that a round adds to the table."""
        raise NotImplementedError

    def averaged(self, rows: Sequence[Row]) -> dict[str, list[Row]]:
        """Return the rows to average, by the suffix of the means' names.

        By default, these are all rows, or those of the whole model if there are layers.
        """
        return {"": [row for row in rows if row.get("layer", "total") == "total"]}

    def round_means(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the means over the rows of one round. nan and inf are left out."""
        found = {}
        for suffix, chosen in self.averaged(rows).items():
            for column, title in self.means.items():
                values = np.array([row[column] for row in chosen], dtype=np.float64)
                if np.isfinite(values).any():
                    found[title + suffix] = float(values[np.isfinite(values)].mean())
        return found

    def create(self) -> Callback:
        return Measuring(self)


class Measuring(Callback):
    """Measures the rounds in which an analysis is due."""

    def __init__(self, analysis: Analysis):
        self.analysis, self._length = analysis, 0

    @property
    def key(self) -> str:
        return self.analysis.file

    def start(self, info: RunInfo) -> None:
        path = info.directory / self.analysis.file
        self.info, self.run = info, RunDirectory(info.directory)
        self.table = CsvFile(path, self.analysis.columns, self._length)

    def is_due(self, round: int) -> bool:
        return self.analysis.is_due(round, self.info.total_rounds)

    def wants_epochs(self, round: int) -> bool:
        return self.analysis.reads_epochs and self.is_due(round)

    def recall(self, record: RoundRecord) -> None:
        if (table := self.run.read_table(self.analysis.file)) is not None:
            rows: Any = table[table["round"] == record.round].to_dict("records")
            record.analysed.update(self.analysis.round_means(rows))

    def after_round(self, record: RoundRecord) -> None:
        if record.result is None or not self.is_due(record.round):
            return
        if not record.result.cohort.clients:  # all clients of the cohort dropped out
            return
        with flush_subnormals():
            rows = self.analysis.rows(Measured(self.info.simulation, record))
        self.table.append(rows)
        record.analysed.update(self.analysis.round_means(rows))

    def draw(self, summary: dict[str, Any]) -> list[Path]:
        look = Pictures.of(self.info.config.get("figures"))
        return draw_tables(self.info.directory, look, summary, (self.analysis.file,))

    def state_dict(self) -> dict[str, Any]:
        self.table.sync()
        return self.table.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._length = state["length"]


def draw_tables(
    directory: Path, look: Pictures, summary: dict[str, Any] | None, names: Sequence[str]
) -> list[Path]:
    """Write the figures of a run's analysis tables, and return their paths.

    summary: the content of summary.json, if this file has not been written yet. names: the tables'
    files. A table that is missing or empty has no figure.
    """
    from fedexp_papers.analyses.draw import draw_analysis

    run = RunDirectory(directory)
    title = run_title(run.config, run.summary if summary is None else summary)
    figures = []
    for name in names if look.draw else ():
        table = run.read_table(name)
        if table is not None and len(table):
            kind = Path(name).stem
            figures.append((kind, partial(draw_analysis, kind, title, table)))
    return save_all(directory / "figures", figures, look)


def figures(options: Namespace) -> list[str]:
    """Draw the figures of runs' analyses again. Return lines with the paths of the files.

    options: the flags of `fedexp-papers figures`. Raises ConfigError for a run without analyses.
    """
    paths = []
    for each in options.directories:
        directory = require_run(each).directory
        look = replace(read_settings(directory).changed(options), draw=True)
        found = draw_tables(directory, look, None, ANALYSES)
        if not found:
            raise ConfigError(f"{directory}: the run has no table of an analysis")
        paths += found
    return [f"  {display_path(path)}" for path in paths]
