"""Check a callback, a tracker or an analysis."""

import copy
import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedexp.config.composition import composed, without_hydra
from fedexp.core import storage
from fedexp.rundir import files
from fedexp.testing.federation import FEDERATION, assert_equal, record, require, simulate
from fedexp.trackers.base import (
    Callback,
    CallbackConfig,
    Callbacks,
    TrackerConfig,
    final_tables,
)
from fedexp.training.callbacks import create_all
from fedexp.training.state import State
from fedexp.training.summary import summary_of, values_of_callbacks

ROUNDS, STOP = 4, 2


@dataclass
class Observed:
    """What a run with a callback leaves."""

    state: State
    kept: Mapping[str, Any]  # the callback's state
    summary: dict[str, Any]  # what the callback adds to summary.json
    files: dict[str, bytes]  # all files but figures, by name


def check_callback(
    options: CallbackConfig, same_files: bool = True, overrides: Sequence[str] = ()
) -> None:
    """Check a callback, tracker or analysis in a run of four rounds.

    The checks are:

    - All its methods run, also those of a tracker, whose errors a run only logs.
    - A run with it and one without it have bit-identical models, states and results, up to its last
      round if the callback ends it. Such a callback declares `ends_runs`.
    - After a run that was interrupted after round 2 and resumed, the callback's state, what it adds
      to summary.json and the files that it has written are those of an uninterrupted run. The state
      of a tracker may have an id of the run, so only what it adds to summary.json is compared. No
      files are compared if `same_files` is false, such as files with times.
    """
    with composed([*FEDERATION, *overrides]) as composition:
        config, choices = without_hydra(composition), dict(composition.hydra.runtime.choices)
    watched = Watched(config, choices, options)
    with TemporaryDirectory() as folder:
        whole, parts, plain = (Path(folder, each) for each in ("whole", "parts", "plain"))
        alone = watched.run(whole, ROUNDS)
        last = alone.state.round
        without = record(simulate(config, last), plain)
        what = f"{watched.name}: the run with it differs from the run without it"
        assert_equal(results(alone.state), results(without), what=what)
        if last <= STOP:
            return
        watched.run(parts, STOP, ends=False)
        resumed = watched.run(parts, ROUNDS, resume=True)
        common = contents(plain).keys()
    tracks = isinstance(options, TrackerConfig)
    compared = common if same_files and not tracks else None
    compare_resumed(watched.name, resumed, alone, compared, tracks)


def results(state: State) -> list[Any]:
    """Return what a callback may not change."""
    accuracies = [list(each.accuracy) for each in state.records.values()]
    return [state.server, dict(state.clients), accuracies]


@dataclass
class Watched:
    """Runs of the small federation with a callback."""

    config: DictConfig
    choices: dict[str, str]
    options: CallbackConfig

    @property
    def name(self) -> str:
        return type(self.options).__name__

    def run(
        self, directory: Path, rounds: int, ends: bool = True, resume: bool = False
    ) -> Observed:
        """Start or resume a run, as `fedexp.training.run` does, and return what it leaves.

        rounds: the last round of this process. ends: whether the run ends then; otherwise, it is
        interrupted.
        """
        own = copy.deepcopy(self.options)
        own.check()
        observers = Callbacks(create_all([own], Callback))
        simulation = simulate(self.config, rounds, callback=[own])
        values: Any = OmegaConf.to_container(self.config, resolve=True)
        values |= {"rounds": ROUNDS, "choices": self.choices}
        directory.mkdir(exist_ok=True)
        storage.write_atomically(directory / files.CONFIG, storage.dump_yaml(values).encode())
        with no_failure(self.name):
            state = record(simulation, directory, resume, observers, values)
            kept = observers.states()["callbacks"]
            if not ends:
                observers.call("abort")
                return Observed(state, kept, {}, {})
            results = summary_of(simulation, state)
            added = values_of_callbacks(observers, results)
            summary = {"status": state.status, **results, **added}
            pictures = [path for each in observers.members for path in each.draw(dict(summary))]
            observers.call("finish", summary, pictures, final_tables(directory))
        for path in pictures:
            path.unlink()
        return Observed(state, kept, added, contents(directory))


@contextmanager
def no_failure(name: str) -> Iterator[None]:
    """Raise AssertionError if fedexp logs that a tracker could not do something."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedexp")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    failed = [message for message in found if " could not " in message]
    require(not failed, f"{name}: {failed[:1]}")


def contents(directory: Path) -> dict[str, bytes]:
    """Return the content of all files in a directory, by their relative names."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def compare_resumed(
    name: str, resumed: Observed, whole: Observed, common: Container[str] | None, tracks: bool
) -> None:
    """Raise AssertionError if a resumed callback differs from an uninterrupted one.

    common: the files of a run without callbacks; None: no files are compared. tracks:
    whether it is a tracker.
    """
    advice = "return what it needs from state_dict, and restore it in load_state_dict"
    after = "after a run that was resumed,"
    returned = [("summary", resumed.summary, whole.summary)]
    if not tracks:
        returned.insert(0, ("state_dict", dict(resumed.kept), dict(whole.kept)))
    for what, one, other in returned:
        same = equal(one, other)
        require(same, f"{name}: {after} {what} returns {one}, not {other}; {advice}")
    if common is None:
        return
    names = [each for each in resumed.files.keys() | whole.files.keys() if each not in common]
    changed = [each for each in names if resumed.files.get(each) != whole.files.get(each)]
    require(
        not changed,
        f"{name}: {after} {', '.join(sorted(changed))} is missing, new or different; {advice}, or"
        " pass same_files=False if it contains times",
    )


def equal(one: Any, other: Any) -> bool:
    try:
        assert_equal(one, other)
    except (AssertionError, TypeError):  # texts are not compared by torch
        return bool(one == other)
    return True
