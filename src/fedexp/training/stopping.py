"""Stop a run before its last round.

A run stops early if its accuracy does not improve (`stop.patience`), if its time is over
(`stop.minutes`), or if a callback asks for it. The state and summary.json store the reason as
`stopped`. A stopped run counts as finished, but a command with different limits continues it.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from fedexp.config.settings import Stop
from fedexp.data.views import PLAIN, VALIDATION
from fedexp.trackers.base import Callback, RoundRecord

PATIENCE, MINUTES, CALLBACK = "patience", "minutes", "callback"


def patience_view(stop: Stop) -> str:
    """Return the test set on which the accuracy must improve for the run to continue."""
    return PLAIN if stop.metric == "test_accuracy" else VALIDATION


def rounds_without_improvement(accuracy: Sequence[tuple[int, float]]) -> int:
    """Return how many evaluated rounds have passed since the first round with the best accuracy.

    Round 0, the initial model, does not count.

    accuracy: (round, accuracy) of each evaluated round.
    """
    values = [value for number, value in accuracy if number >= 1]
    return len(values) - 1 - values.index(max(values)) if values else 0


class EarlyStop(Callback):
    """Ends a run whose accuracy no longer improves, or whose time is over.

    The time limit `stop.minutes` is counted from the creation of this object.
    """

    def __init__(self, stop: Stop):
        self.stop, self._before = stop, time.perf_counter()
        self.end = self._before + 60 * (stop.minutes or math.inf)
        self._recent: deque[float] = deque(maxlen=3)  # seconds of the last rounds

    def after_round(self, record: RoundRecord) -> dict[str, Any] | None:
        now = time.perf_counter()
        self._recent.append(now - self._before)
        self._before = now
        if record.round == 0:
            return None
        if self.stop.patience is not None:
            curve = record.records[patience_view(self.stop)].curve
            if rounds_without_improvement(curve) >= self.stop.patience:
                return {"by": PATIENCE, "patience": self.stop.patience}
        if now + max(self._recent) >= self.end:
            return {"by": MINUTES, "minutes": self.stop.minutes}
        return None


def is_finished(summary: Mapping[str, Any], stop: Stop, resumed: bool) -> bool:
    """Return whether a command has nothing left to do for a run.

    summary: the summary of the run.
    stop: the `stop` options of the command.
    resumed: whether the command resumes the run by name, not as a job of a sweep.
    """
    if summary.get("status") != "stopped":
        return True
    why = summary.get("stopped") or {}
    if why.get("by") == PATIENCE:
        return stop.patience is not None and stop.patience <= why.get(PATIENCE, 0)
    return not resumed and stop.minutes == why.get(MINUTES)


def stop_reason(summary: Mapping[str, Any]) -> str:
    """Return a phrase that says in which round and why a run stopped."""
    why = summary.get("stopped") or {}
    cause = {
        PATIENCE: f"stop.patience={why.get(PATIENCE)}",
        MINUTES: f"stop.minutes={why.get(MINUTES)}",
        CALLBACK: f"a callback ({why.get('reason')})",
    }.get(str(why.get("by")), "its options")
    return f"stopped after round {summary.get('rounds')} by {cause}"
