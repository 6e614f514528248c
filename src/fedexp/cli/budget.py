"""`fedexp --multirun ... budget=<minutes>`: jobs start in the order of the list until the time is
over.

The moment at which it is over travels with the overrides of every job, so that each launcher knows
it. After that moment no job starts, and a running one saves its state and ends before the round
that it could not save in time (fedexp.training.deadline).
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from fedexp.training.deadline import VARIABLE


def limited(launches: Sequence[Sequence[str]], deadline: float) -> list[list[str]]:
    """Return the overrides of each multirun with those that hand the deadline to its jobs."""
    return [[*each, f"+hydra.job.env_set.{VARIABLE}='{deadline:.3f}'"] for each in launches]


def show_limit(seconds: Sequence[float | None], minutes: float) -> None:
    """Print how far a budget goes. seconds: of the jobs that are left, None where unknown."""
    from fedexp.trackers.progress import duration

    known = [each for each in seconds if each is not None]
    whole = sum(total <= 60 * minutes for total in accumulate(known))
    unknown = len(seconds) - len(known)
    more = f", {unknown} not measured" if unknown else ""
    print(
        f"budget {duration(60 * minutes)}, one job at a time in this order: {whole} of"
        f" {len(seconds)} that are left would be complete{more}"
    )


def show_state(launches: Sequence[Sequence[str]], extra: Sequence[Path]) -> None:
    """Print the last line of the command: how many jobs are done, and whether there are more."""
    from fedexp.cli.preview import OVER, plan, states

    reached = [state for _, state, _ in states(plan(launches, extra))]
    found = Counter("done" if state in OVER else state.split()[0] for state in reached)
    total, begun = found.total(), found["interrupted"] + found["running"]
    parts = [f"{found['done']} of {total} done"]
    parts += [f"{begun} begun"] if begun else []
    parts += [f"{found['failed']} failed"] if found["failed"] else []
    print(", ".join(parts) + ("; the same command goes on" if found["done"] < total else ""))
