"""Trackers that call another library: what fails there is one warning, and the run continues."""

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
    except ValueError:  # a module without a specification, such as one made by hand
        found = True
    if not found:
        raise ConfigError(
            f"tracker={tracker}: needs the package {package}: {how_to_install(tracker)}"
        )


def metrics_of(record: RoundRecord, classes: Sequence[str]) -> dict[str, float]:
    """Return the finite numbers of a round, by their names in W&B."""
    values = {metric_name(column): value for column, value in record.values.items()}
    values |= {analysis_metric(name): value for name, value in record.analysed.items()}
    views = {} if record.class_accuracy is None else {PLAIN: record.class_accuracy}
    for view, history in record.others.items():
        if history.rounds[-1:] == [record.round]:
            views[view] = history.class_accuracy[-1]
    for view, row in views.items():
        for name, value in zip(classes, row.tolist(), strict=True):
            values[class_metric(name, view)] = value
    return {k: value for k, value in values.items() if value is not None and math.isfinite(value)}


class Guarded(Tracker):
    """Base of trackers whose `begin`, `add_round`, `add_results` and `end` may raise. After the
    first failure none of them is called again."""

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
        """Close what `begin` opened."""

    def call(self, action: Callable[[], None]) -> None:
        """Call one of the above."""
        action()

    def release(self) -> None:
        """Free what is held, after `end` or a failure."""

    def hint(self) -> str:
        """Return the end of the warning after a failure."""
        return ""

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

    def _close(self, completed: bool) -> bool:
        """Return whether that worked."""
        self._guard("finish", lambda: self.end(completed))
        worked, self._open = self._open, False
        if worked:
            self.release()
        return worked

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            self.call(action)
        except Exception as error:
            log.warning(
                "%s could not %s; the run continues without it (%s)%s",
                self.service,
                what,
                reason(error),
                self.hint(),
            )
            self._open = False
            self.release()


def reason(error: Exception) -> str:
    """Return the first line of an error."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
