"""Extending a run: more rounds, or another `stop`, as in `fedexp resume=<dir> rounds=300`.

No algorithm depends on the last round. Only the learning rate of `local.schedule=cosine` does, and
it is refused. So an extended run has the same rounds as a run that had 300 rounds from the start.
`notes` lists the differences.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.algorithms.local_training import SCHEDULES_OVER_ALL_ROUNDS
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import later_partitions
from fedexp.rundir import csv_files, files, origin
from fedexp.rundir.reader import RunDirectory, finished_summary

if TYPE_CHECKING:
    from fedexp.training.state import State

FREE = ("rounds", "scenario.rounds_per_task", "stop.patience", "stop.metric")


def allows(differing: Sequence[str]) -> bool:
    """Return whether all differing options may differ in an extended run.

    differing: lines from `origin.differences`.
    """
    return {line.partition(":")[0] for line in differing} <= {*FREE}


def asked(directory: Path, container: Mapping[str, Any]) -> bool:
    """Return whether a configuration allowed by `check` changes the rounds or the stop of a run."""
    before = RunDirectory(directory).config
    return options(before) != options(container)


def options(config: Mapping[str, Any]) -> list[Any]:
    """Return the values of the options that may differ."""
    nodes = [(key.rpartition(".")[0], key.rpartition(".")[2]) for key in FREE]
    return [((config.get(node) or {}) if node else config).get(name) for node, name in nodes]


def check(directory: Path, before: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    """Raise ConfigError if the run cannot be extended to these rounds.

    before: the run's config.yaml.
    """
    run, had, rounds = RunDirectory(directory), before.get("rounds"), container.get("rounds")
    given = f"resume={directory}: rounds={rounds}"
    if options(before)[:2] != options(container)[:2]:
        if later_partitions(directory):
            raise ConfigError(f"{given}: a run of several tasks keeps its rounds of a task ({had})")
        if run.last_round is not None and isinstance(rounds, int) and rounds <= run.last_round:
            raise ConfigError(
                f"{given}: the run there is at round {run.last_round} already; more can be"
                " asked for"
            )
        if (schedule := (before.get("local") or {}).get("schedule")) in SCHEDULES_OVER_ALL_ROUNDS:
            raise ConfigError(
                f"{given}: the run there has local.schedule={schedule}, whose learning rates are"
                f" those of {had} rounds from the first round on; begin a new run with more rounds"
            )
    if run.diverged:
        raise ConfigError(f"{given}: the run there has diverged")


def contents(directory: Path, container: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a complete run that extending it rewrites, the summary last.

    Return an empty dict if the run is not complete or is not extended.
    """
    if finished_summary(directory) is None or not asked(directory, container):
        return {}
    names = (files.CONFIG, files.OVERRIDES, origin.NAME, files.SUMMARY)
    return {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def put_back(directory: Path, before: Mapping[str, bytes], lengths: Mapping[str, int]) -> None:
    """Restore the complete run.

    before: contents of the rewritten files.
    lengths: lengths of the run's tables.
    """
    with suppress(OSError, ConfigError):  # then the run keeps its new options
        csv_files.RunFiles(directory, lengths, lengths).close()
        for name, content in before.items():
            storage.write_atomically(directory / name, content)


def notes(directory: Path, container: Mapping[str, Any], state: "State") -> list[str]:
    """Return notes on how a run that is extended after this state differs from an uninterrupted
    run.
    """
    interval, before = (
        int(container.get("eval_interval", 1)),
        RunDirectory(directory).config.get("rounds"),
    )
    rounds = container["rounds"]
    if before == rounds:
        return []
    found = [f"{rounds} rounds instead of {before}"]
    if state.round == before and state.round % interval:
        found.append(
            f"round {state.round}, which was the last, stays evaluated; with"
            f" eval_interval={interval} a run of {rounds} rounds from the start would not have"
            " evaluated it, so that best values and forgetting may differ"
        )
    every = (container.get("local_evaluation") or {}).get("every") or 1
    if state.round == before and state.round % every and state.history.local_rounds:
        found.append(
            f"round {state.round} keeps its tests of local models; with"
            f" local_evaluation.every={every} a run of {rounds} rounds from the start would not"
            " have them, so that means over rounds may differ"
        )
    return found
