"""Define the interface of callbacks and trackers.

The files in the run directory are the authoritative record. A tracker only displays the results. If
a tracker fails, one warning is logged and the run continues (see `Callbacks`).
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedexp.core.errors import ConfigError, describe, naming_hook
from fedexp.core.limits import Checked, require_known_names
from fedexp.core.storage import read_table
from fedexp.core.unchanged import Unchanged, modes, require_modes
from fedexp.data.views import CLASSES, PLAIN, VIEWS, file_in_view
from fedexp.rundir import files

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from fedexp.core.tree import Params
    from fedexp.metrics.record import Record
    from fedexp.rundir.reader import RunDirectory
    from fedexp.training.simulation import Simulation
    from fedexp.training.state import RoundResult

log = logging.getLogger("fedexp")
# what a tracker could not do, by the method that failed
DOES = {"start": "start", "after_round": "log a round"}
LAST = ("finish", "abort")
NOTHING = Unchanged({})
READS = "it must not change what it receives: clone() tensors and copy dicts first"
WANDB = "fedexp.trackers.wandb_tracker.WandbTracker"  # the name of the state of W&B


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that are known when the run starts."""

    directory: Path
    config: dict[str, Any]  # resolved, plain containers
    name: str
    group: str  # the same for runs that differ only in the seed
    job_type: str
    tags: tuple[str, ...]
    total_rounds: int
    first_round: int  # 0, or the round of the checkpoint that the run resumes from
    classes: tuple[str, ...]  # class names in the order of RoundRecord.class_accuracy
    best_accuracy: float | None = None  # up to first_round if the run is resumed
    resumed: bool = False  # whether the run starts from a checkpoint, possibly of round 0
    # the rounds up to first_round if the run is resumed, read from the files
    past: "Callable[[], Iterable[RoundRecord]]" = tuple
    # draws figures of the run so far: its records -> name and PNG content of each figure
    pictures: "Callable[[Mapping[str, Record]], Mapping[str, bytes]]" = lambda records: {}
    simulation: "Simulation | None" = None  # the parts of the run, which must not be changed


@dataclass(frozen=True)
class RoundRecord:
    """The results of a finished round. In round 0, the initial model is evaluated."""

    round: int
    values: Mapping[str, float | None]  # row of rounds.csv without `round`; None: undefined
    # name of a test set -> class accuracies up to this round; later rounds append to them, so read
    # them immediately
    records: "Mapping[str, Record]" = field(default_factory=dict)
    # values that callbacks add for the trackers, which are called later
    analysed: dict[str, float] = field(default_factory=dict)
    # `params` and `buffers` of the global model, which must not be changed; {} for a past round
    model: "Mapping[str, Params]" = field(default_factory=dict)
    # everything that the round computed, until the next round; None for a past round and round 0
    result: "RoundResult | None" = None

    @property
    def tested(self) -> "dict[str, np.ndarray]":
        """Return the class accuracies [C] on each test set that was used in this round.

        A class without examples has the accuracy nan.
        """
        return {
            view: record.class_accuracy[-1]
            for view, record in self.records.items()
            if record.rounds[-1:] == (self.round,)
        }

    @property
    def class_accuracy(self) -> "np.ndarray | None":
        """Return the class accuracies [C] on the test set, or None if it was not evaluated."""
        return self.tested.get(PLAIN)


def past_rounds(
    run: "RunDirectory", records: "Mapping[str, Record]", last: float = math.inf
) -> Iterator[RoundRecord]:
    """Yield the rounds in a run's files, up to the round `last`.

    records: name of a test set -> the results of the run.
    """
    rounds = [] if run.rounds is None else run.rounds.to_dict("records")
    for values in rounds:
        number = int(values.pop("round"))
        if number > last:
            return
        past = {name: record.upto(number) for name, record in records.items()}
        yield RoundRecord(number, values, past)  # type: ignore[arg-type]


class Callback:
    """Observes a run. It may end the run early, but must not change models or data.

    This base class does nothing. An error in a callback ends the run.
    """

    _replaced: ClassVar = {"log_round": "after_round"}

    # whether the callback may end the run; fedexp copies it from the callback's options
    ends_runs: bool = True

    def start(self, info: RunInfo) -> None:
        """Called when the run starts or continues from a checkpoint."""

    @property
    def key(self) -> str:
        """Return the name of the callback's state in checkpoints (see `name_states`)."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def wants_epochs(self, round: int) -> bool:
        """Return whether `after_round` reads the local models after each local epoch of a round.

        These are `record.result.exchanges[...].trained.epochs`, and are copied only on request.
        """
        return False

    def recall(self, record: RoundRecord) -> None:
        """Called for a past round of a resumed run before a tracker shows it again.

        The callback may add to `record.analysed` what it added in this round.
        """

    def after_round(self, record: RoundRecord) -> "str | Mapping[str, Any] | None":
        """Called after the rows of a round have been written, also for round 0.

        Return a reason to end the run after this round, or None to continue. If this round is not
        tested (`eval_interval`), the run ends after the next one, which then is. The class of the
        callback's options must declare `ends_runs`. A mapping is stored as it is (`State.stopped`).
        """

    def after_task(self, record: RoundRecord) -> None:
        """Called after the last round of each task, if the scenario has tasks."""

    def summary(self) -> dict[str, Any]:
        """Return what the callback adds to summary.json when the run has ended.

        Names must be new. JSON must be able to hold the values; tensors and arrays become lists.
        """
        return {}

    def draw(self, summary: dict[str, Any]) -> Sequence[Path]:
        """Write figures when the run has ended, before summary.json, and return their paths.

        An error is only logged. summary: as in `finish`.
        """
        return ()

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: Mapping[str, "pd.DataFrame"]
    ) -> None:
        """Called when the run has ended.

        summary: the content of summary.json. figures: the paths of the figures. tables: a
        dict that maps names to final tables in long format.
        """

    def abort(self) -> None:
        """Called instead of `finish` after an error or an interrupt."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values and tensors, saved in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called before `start` if the run is resumed."""


class Tracker(Callback):
    """A callback that only shows the results. If it fails, the run continues without it."""

    name: ClassVar[str] = "the tracker"  # used in messages


def name_states(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return the callbacks by distinct names of their states: a class may be used several times."""
    found: dict[str, Callback] = {}
    for each in callbacks:
        same = sum(other.key == each.key for other in found.values())
        found[f"{each.key} {same + 1}" if same else each.key] = each
    return found


class Callbacks:
    """Calls the callbacks of a run in their order, and `abort` in the reverse order.

    If a tracker raises an error, a warning is logged and that tracker is not called again. This
    applies to `abort` of any callback, since the error that ended the run must be reported. No
    callback is called after its `finish` or `abort`, and `abort` only after `start`.

    Raises ConfigError if a class of the callbacks has a misspelt hook.
    """

    def __init__(self, members: Iterable[Callback]):
        self.members = list(members)
        for each in self.members:
            require_known_names(type(each))
        self._started: list[Callback] = []
        self.names = {id(each): name for name, each in name_states(self.members).items()}
        # states of trackers that failed or that the run no longer has, for when it has them again
        self._kept: dict[str, dict[str, Any]] = {}

    def states(self) -> dict[str, Any]:
        """Return the states of the callbacks, and which of them are trackers', for a checkpoint."""
        found = {self.names[id(each)]: each.state_dict() for each in self.members}
        shown = [self.names[id(each)] for each in self.members if isinstance(each, Tracker)]
        return {"callbacks": self._kept | found, "trackers": [*self._kept, *shown]}

    def load_states(self, saved: Mapping[str, Any]) -> None:
        """Restore the states from a checkpoint.

        Raises ConfigError if it has the state of a callback that the run does not have.
        """
        states, trackers = dict(saved["callbacks"]), {*saved.get("trackers", ())}
        if saved.get("wandb_id"):  # where earlier versions stored it
            states[WANDB] = {"id": saved["wandb_id"]} | states.get(WANDB, {})
            trackers.add(WANDB)
        members = {self.names[id(each)]: each for each in self.members}
        for name, state in states.items():
            if name in members:
                members[name].load_state_dict(state)
            elif name in trackers:
                self._kept[name] = state
            elif state:
                raise ConfigError(
                    f"callback: the checkpoint has a state of {name}, which this command does not"
                    f" have (it has {', '.join(members) or 'no callbacks'}); select it, or start a"
                    " new run"
                )

    def call(
        self, method: str, *arguments: Any, read: Unchanged = NOTHING
    ) -> list[tuple[Callback, Any]]:
        """Call a method of each callback, and return each with its result.

        read: what they may not change. Raises ConfigError if one of them does, even a tracker, or
        if it changes the modes of torch for the code after it.
        """
        found = []
        # a second Ctrl+C, while W&B ends, must not leave the progress display, the last one, open
        for each in self.members[:: -1 if method == "abort" else 1]:
            if method in LAST:
                self.members.remove(each)
            if method == "start":
                self._started.append(each)
            elif method == "abort" and each not in self._started:
                continue
            before = modes()
            try:
                found.append((each, getattr(each, method)(*arguments)))
            except Exception as error:
                if not isinstance(each, Tracker) and method != "abort":
                    with naming_hook("callback", method, type(each)):
                        raise
                self.members = [other for other in self.members if other is not each]
                with suppress(Exception):
                    self._kept[self.names[id(each)]] = each.state_dict()
                log.warning(
                    "%s could not %s; the run continues without it (%s)%s",
                    each.name if isinstance(each, Tracker) else each.key,
                    DOES.get(method, "finish"),
                    describe(error),
                    "".join(getattr(error, "__notes__", ())),
                )
            group = "tracker" if isinstance(each, Tracker) else "callback"
            what = f"{group}: {method} of {type(each).__name__}"
            read.check(what, READS)
            if method != "abort":  # the run has ended
                require_modes(before, what)
        return found


class CallbackConfig(Checked, ABC, prefix="callback."):
    """Base class for the options of the group `callback`."""

    # Whether the callback may end a run before its last round. Its options then belong to the
    # identity of the run.
    ends_runs: ClassVar[bool] = False

    def check(self) -> None:
        """Raise ConfigError if a package that the callback needs is not installed.

        This method is called before any file is written.
        """

    def check_run(self, simulation: "Simulation") -> None:
        """Raise ConfigError if the callback cannot observe this run, before it starts."""

    @abstractmethod
    def create(self) -> Callback:
        """Create a callback for one run."""


class TrackerConfig(CallbackConfig, prefix="tracker."):
    """Base class for the options of the group `tracker`."""

    @abstractmethod
    def create(self) -> Tracker:
        """Create a tracker for one run."""


def final_tables(directory: Path) -> "dict[str, pd.DataFrame]":
    """Return a dict that maps names to a finished run's tables in long format."""
    names = [file_in_view(CLASSES, view) for view in VIEWS]
    paths = [directory / name for name in (*names, files.TASKS)]
    return {path.stem: read_table(path) for path in paths if path.exists()}
