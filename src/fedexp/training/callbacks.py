"""The callbacks that options on the top level ask for.

A run stops early if its accuracy does not improve (`stop.patience`), if its time is over
(`stop.minutes`), or if a callback asks for it. The state and summary.json store the reason as
`stopped`. A stopped run counts as finished, but a command with different limits continues it.
"""

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedexp.config.build import Built
from fedexp.config.settings import Settings, Stop
from fedexp.core.errors import ConfigError
from fedexp.core.storage import typed_path
from fedexp.data.views import PLAIN, VALIDATION
from fedexp.figures import make_figures
from fedexp.figures.pictures import Pictures
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.rundir import kept_models
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.base import Callback, CallbackConfig, Callbacks, RoundRecord, RunInfo, Tracker
from fedexp.training.exchange import trained_models

log = logging.getLogger("fedexp")
PATIENCE, MINUTES, CALLBACK = "patience", "minutes", "callback"
CallbackType = TypeVar("CallbackType", bound=Callback)


def patience_view(stop: Stop) -> str:
    """Return the test set on which the accuracy must improve for the run to continue."""
    return PLAIN if stop.metric == "test_accuracy" else VALIDATION


def end_of_patience(accuracy: Iterable[tuple[int, float]], patience: int) -> int | None:
    """Return the round in which `patience` evaluated rounds have passed without a higher accuracy.

    Round 0, the initial model, does not count. None if there is no such round.

    accuracy: (round, accuracy) of each evaluated round.
    """
    best, waited = -math.inf, 0
    for number, value in accuracy:
        if number == 0:
            continue
        waited = 0 if value > best else waited + 1
        best = max(best, value)
        if waited == patience:
            return number
    return None


class EarlyStop(Callback):
    """Ends a run whose accuracy no longer improves, or whose time is over.

    The time limit `stop.minutes` is counted from `start`.

    eval_interval: the rounds from one test to the next. A run only ends after a test.
    """

    def __init__(self, stop: Stop, eval_interval: int = 1):
        self.stop, self.eval_interval = stop, eval_interval
        self._recent: deque[float] = deque(maxlen=3)  # seconds of the last rounds

    def start(self, info: RunInfo) -> None:
        self._before = time.perf_counter()
        self.end = self._before + 60 * (self.stop.minutes or math.inf)

    def after_round(self, record: RoundRecord) -> dict[str, Any] | None:
        now = time.perf_counter()
        self._recent.append(now - self._before)
        self._before = now
        if record.round == 0:
            return None
        if self.stop.patience is not None:
            curve = record.records[patience_view(self.stop)].curve
            if end_of_patience(curve, self.stop.patience) is not None:
                return {"by": PATIENCE, "patience": self.stop.patience}
        # If the next round is not tested, the run can only end after another one.
        rounds = 1 if (record.round + 1) % self.eval_interval == 0 else 2
        if now + rounds * max(self._recent) >= self.end:
            return {"by": MINUTES, "minutes": self.stop.minutes}
        return None


def is_finished(
    run: RunDirectory, stop: Stop, callbacks: Iterable[str], resumed: bool = False
) -> bool:
    """Return whether a command has nothing left to do for a run that has ended.

    Only the limit that ended the run is compared with the command's. A command that resumes the run
    by name continues it after any other limit than `stop.patience`.

    stop, callbacks: the `stop` options of the command, and its options of the group `callback`.
    resumed: whether the command resumes the run by name, not as a job of a sweep.
    """
    if run.status != "stopped":
        return True
    why = run.summary.get("stopped") or {}
    if resumed and why.get("by") != PATIENCE:
        return False
    return stays_stopped(why, run, stop, callbacks)


def stays_stopped(
    why: Mapping[str, Any], run: RunDirectory, stop: Stop, callbacks: Iterable[str]
) -> bool:
    """Return whether a command has the limit that stopped a run.

    why: why the run stopped, see `State.stopped`. stop, callbacks: as for `is_finished`.
    """
    if why.get("by") == PATIENCE:
        return stop.patience is not None and stop.patience <= why.get(PATIENCE, 0)
    if why.get("by") == MINUTES:
        return stop.minutes == why.get(MINUTES)
    return {*callbacks} == {*(run.config.get("callback") or {})}


def stop_reason(summary: Mapping[str, Any]) -> str:
    """Return a phrase that says in which round and why a run stopped."""
    why = summary.get("stopped") or {}
    cause = {
        PATIENCE: f"stop.patience={why.get(PATIENCE)}",
        MINUTES: f"stop.minutes={why.get(MINUTES)}",
        CALLBACK: f"a callback ({why.get('reason')})",
    }.get(str(why.get("by")), "its options")
    return f"stopped after round {summary.get('rounds')} by {cause}"


class KeepModels(Callback):
    """Saves the global model and the local models in the folder `models` of the run."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def start(self, info: RunInfo) -> None:
        self.directory = info.directory

    def after_round(self, record: RoundRecord) -> None:
        number = record.round
        if self.settings.keeps_model(number):
            kept_models.save(self.directory, number, record.model)
        if record.result is None or not self.settings.keeps_local_models(number):
            return
        models = trained_models(record.result.exchanges)
        if not models:
            log.warning(
                "keep_local_models: no local models are saved for round %d, because its clients did"
                " not send whole models",
                number,
            )
        for client, model in zip(record.result.cohort.clients, models, strict=False):
            kept_models.save(self.directory, number, model, client)


class RunFigures(Callback):
    """Draws the figures of a run at its end."""

    def __init__(self, look: Pictures, metrics: Sequence[ForgettingMetric]):
        self.look, self.metrics = look, metrics

    def start(self, info: RunInfo) -> None:
        self.directory = info.directory

    def draw(self, summary: dict[str, Any]) -> list[Path]:
        return make_figures(self.directory, summary, self.look, self.metrics)


def draw_all(directory: Path, callbacks: Callbacks, summary: dict[str, Any]) -> list[Path]:
    """Draw the figures of all callbacks. An error is only logged, so it does not end the run."""
    again = f"run `fedexp figures {typed_path(directory)}` to try again"
    pictures: list[Path] = []
    for each in callbacks.members:
        try:
            pictures += each.draw(copy.deepcopy(summary))  # written afterwards
        except OSError as error:
            log.warning("the figures could not be written (%s); %s", error.strerror, again)
        except Exception:
            log.exception("the figures could not be drawn; %s", again)
    return pictures


def create_all(options: Iterable[CallbackConfig], kind: type[CallbackType]) -> list[CallbackType]:
    """Return what the options of a group create. Raises ConfigError if it is not of the `kind`."""
    found = []
    for each in options:
        made = each.create()
        if not isinstance(made, kind):
            raise ConfigError(
                f"{type(each).__name__}: create returns {made!r}, but must return a"
                f" {kind.__module__}.{kind.__name__}"
            )
        made.ends_runs = each.ends_runs
        found.append(made)
    return found


def own_callbacks(built: Built) -> list[Callback]:
    """Return the user's callbacks, and then the trackers."""
    return [*create_all(built.callback, Callback), *create_all(built.tracker, Tracker)]


def callbacks_of(built: Built) -> list[Callback]:
    """Return the analyses, and the callbacks that options on the top level ask for."""
    settings = built.settings
    found = create_all(built.analysis, Callback)
    found += filter(None, (each.callback() for each in built.forgetting_metric))
    if built.stop.patience is not None or built.stop.minutes is not None:
        found.append(EarlyStop(built.stop, settings.eval_interval))
    if settings.keep_models is not None or settings.keep_local_models is not None:
        found.append(KeepModels(settings))
    if built.figures.draw:
        found.append(RunFigures(built.figures, built.forgetting_metric))
    return found
