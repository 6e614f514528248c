"""Trackers of optional packages that write files: whatever fails in them is one warning, and the
run goes on."""

import importlib.util
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedexp.core.errors import ConfigError
from fedexp.core.packages import how_to_install
from fedexp.core.views import PLAIN
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker
from fedexp.trackers.wandb_names import analysis_metric, class_metric, metric_name

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedexp")


def require_package(package: str, tracker: str) -> None:
    """Raise ConfigError unless the package of a tracker is installed."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a specification: somebody has put it there
        found = True
    if not found:
        raise ConfigError(
            f"tracker={tracker}: needs the package {package}: {how_to_install(tracker)}"
        )


def metrics_of(record: RoundRecord, classes: Sequence[str]) -> dict[str, float]:
    """Return the finite numbers of a round by the names that they have in W&B."""
    values = {
        metric_name(column): value for column, value in record.values.items() if value is not None
    }
    values |= {analysis_metric(name): value for name, value in record.analysed.items()}
    if record.class_accuracy is not None:
        views = {PLAIN: record.class_accuracy} | {
            v: each.class_accuracy[-1] for v, each in record.others.items()
        }
        for view, row in views.items():
            values |= {
                class_metric(name, view): value
                for name, value in zip(classes, row.tolist(), strict=True)
            }
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


class Guarded(Tracker):
    """Base: `begin`, `add_round`, `add_results` and `end` may raise; after the first failure none
    is called again."""

    service: ClassVar[str]

    def __init__(self) -> None:
        self._open = False

    @abstractmethod
    def begin(self, info: RunInfo) -> None:
        """Open what the run is written to."""

    @abstractmethod
    def add_round(self, record: RoundRecord) -> None:
        """Write a round."""

    @abstractmethod
    def add_results(
        self,
        summary: Mapping[str, Any],
        figures: Sequence[Path],
        tables: "Mapping[str, pd.DataFrame]",
    ) -> None:
        """Write the results."""

    @abstractmethod
    def end(self, completed: bool) -> None:
        """Close it."""

    def start(self, info: RunInfo) -> None:
        self.info, self._last_round, self._open = info, info.first_round, True
        self._guard("start", lambda: self.begin(info))

    def log_round(self, record: RoundRecord) -> None:
        self._last_round = record.round
        self._guard("log a round", lambda: self.add_round(record))

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: "Mapping[str, pd.DataFrame]"
    ) -> None:
        self._guard("log the results", lambda: self.add_results(summary, figures, tables))
        self._close(completed=True)

    def abort(self) -> None:
        self._close(completed=False)

    def _close(self, completed: bool) -> None:
        self._guard("finish", lambda: self.end(completed))
        self._open = False

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            action()
        except Exception as error:
            self._open = False
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            log.warning(
                "%s could not %s; the run goes on without it (%s)", self.service, what, reason
            )
