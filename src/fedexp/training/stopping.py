"""Reasons that end a run before its last round: patience, minutes, or a search that prunes the run.

The reason is stored in the state and in summary.json (`stopped`: `by`, and the option's value).
Such a run counts as finished. A command with other limits continues it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedexp.config.settings import Stop
from fedexp.data.views import PLAIN, VALIDATION

if TYPE_CHECKING:
    from fedexp.training.simulation import Simulation
    from fedexp.training.state import State

PATIENCE, MINUTES, SEARCH = "patience", "minutes", "search"
TRIAL = "FEDEXP_TRIAL"  # key of hydra.job.env_set: the search's trial number
# (round, summary so far) -> whether the search ends the run
Watch = Callable[[int, Mapping[str, Any]], bool]


def patience_view(stop: Stop) -> str:
    """Return the view whose accuracy the patience refers to."""
    return PLAIN if stop.metric == "test_accuracy" else VALIDATION


def rounds_without_improvement(accuracy: Sequence[tuple[int, float]]) -> int:
    """Return the number of evaluated rounds since the first one with the highest accuracy.

    Round 0 does not count.

    accuracy: (round, accuracy) of the evaluated rounds.
    """
    values = [value for number, value in accuracy if number >= 1]
    return len(values) - 1 - values.index(max(values)) if values else 0


class Stopping:
    """Decides after each round whether the run ends. The time limit starts with the object."""

    def __init__(
        self,
        simulation: "Simulation",
        watch: Watch | None,
        summary: Callable[["State"], Mapping[str, Any]],
    ):
        """Set the conditions.

        summary: function from a state to the contents of summary.json.
        """
        self.stop, self.watch, self.summary = simulation.stop, watch, summary
        self.end = time.perf_counter() + 60 * (simulation.stop.minutes or math.inf)

    def reason(self, state: "State", seconds: float) -> dict[str, Any]:
        """Return why the run ends after this state (`State.stopped`), or {} if it continues.

        seconds: expected duration of the next round.
        """
        if self.is_out_of_patience(state):
            return {"by": PATIENCE, "patience": self.stop.patience}
        evaluated = state.accuracy[-1][0] == state.round
        if self.watch is not None and evaluated and self.watch(state.round, self.summary(state)):
            return {"by": SEARCH}
        if time.perf_counter() + seconds >= self.end:
            return {"by": MINUTES, "minutes": self.stop.minutes}
        return {}

    def is_out_of_patience(self, state: "State") -> bool:
        if self.stop.patience is None:
            return False
        accuracy = state.tested[patience_view(self.stop)].accuracy
        return rounds_without_improvement(accuracy) >= self.stop.patience


def is_finished(summary: Mapping[str, Any], stop: Stop, resumed: bool) -> bool:
    """Return whether a run with this summary is finished for a command with the given `stop`
    options.

    resumed: whether the command resumes the run by name, not as a job of a sweep.
    """
    if summary.get("status") != "stopped":
        return True
    why = summary.get("stopped") or {}
    if why.get("by") == PATIENCE:
        return stop.patience is not None and stop.patience <= why.get(PATIENCE, 0)
    return not resumed and (why.get("by") == SEARCH or stop.minutes == why.get(MINUTES))


def stop_reason(summary: Mapping[str, Any]) -> str:
    """Return a sentence that says why a run stopped."""
    why = summary.get("stopped") or {}
    cause = {
        PATIENCE: f"stop.patience={why.get(PATIENCE)}",
        MINUTES: f"stop.minutes={why.get(MINUTES)}",
        SEARCH: "the search, because other trials are better",
    }.get(str(why.get("by")), "its options")
    return f"stopped after round {summary.get('rounds')} by {cause}"
