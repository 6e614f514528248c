"""Combine several trackers. If a tracker fails, the run continues without it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.trackers.base import RoundRecord, RunInfo, Tracker

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedexp")


class TrackerGroup(Tracker):
    """A tracker that calls several trackers.

    If a tracker raises an error, a warning is logged and that tracker is not called again.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers
        self._open: list[Tracker] = []

    @property
    def run_id(self) -> str | None:
        return next((each.run_id for each in self.trackers if each.run_id is not None), None)

    def start(self, info: RunInfo) -> None:
        self._open = list(self.trackers)
        self._call_each("start", lambda tracker: tracker.start(info))

    def after_round(self, record: RoundRecord) -> None:
        self._call_each("log a round", lambda tracker: tracker.after_round(record))

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: "Mapping[str, pd.DataFrame]"
    ) -> None:
        self._call_each("finish", lambda tracker: tracker.finish(summary, figures, tables))
        self._open = []

    def abort(self) -> None:
        self._call_each("finish", lambda tracker: tracker.abort())
        self._open = []

    def _call_each(self, what: str, call: Callable[[Tracker], object]) -> None:
        for tracker in tuple(self._open):
            try:
                call(tracker)
            except Exception as error:
                self._open.remove(tracker)
                log.warning(
                    "%s could not %s; the run continues without it (%s)%s",
                    tracker.name,
                    what,
                    reason(error),
                    "".join(getattr(error, "__notes__", ())),
                )


def reason(error: Exception) -> str:
    """Return the reason for a failure: an error's type and the first line of its message."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
