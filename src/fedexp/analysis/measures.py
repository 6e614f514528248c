"""Define the measures that tables, figures and pages show first, and the format of their values."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fedexp.analysis.naming import natural_key
from fedexp.data.views import PLAIN, VALIDATION
from fedexp.metrics.forgetting_metric import FORGETTING
from fedexp.metrics.own_test import OWN_ACCURACY
from fedexp.metrics.quantity import ACCURACY, Column
from fedexp.metrics.tasks import AVERAGE_ACCURACY, TASK_FORGETTING
from fedexp.rundir.objective import TARGETS, declared_direction
from fedexp.rundir.reader import RunDirectory

# accuracy and forgetting, first for continual learning and then for all other runs
OF_TASKS, OF_CLASSES = (AVERAGE_ACCURACY, TASK_FORGETTING), (ACCURACY, FORGETTING)
# the last one only if the clients' own test examples were used
MAIN = (OF_TASKS, (*OF_CLASSES, OWN_ACCURACY))


def main_measures(runs: Iterable[RunDirectory]) -> list[Column]:
    """Return the accuracy and forgetting measures that suit the runs.

    For runs on a stream of tasks, these are average accuracy and task forgetting. For runs that
    tested models on each client's own test examples, the accuracy on these follows. Values on the
    validation set are used only for runs that were not evaluated on the test set. If only some of
    the runs are on a stream of tasks, the measures of both kinds are returned.
    """
    found: dict[Column, None] = {}
    for run in runs:
        known = {*run.summary, *(() if run.rounds is None else run.rounds)}
        kinds = [(kind, view) for view in (PLAIN, VALIDATION) for kind in MAIN]
        for kind, view in kinds:
            first, second, *further = [Column(each, view) for each in kind]
            if {first.key, first.name} & known:
                measured = [each for each in further if each.key in known]
                found |= dict.fromkeys([first, second, *measured])
                break
    return list(found) or [Column(each) for each in OF_CLASSES]


def is_accuracy_key(key: str) -> bool:
    """Return whether a key of summary.json is an accuracy in any view of the test set.

    The weighted mean, the worst accuracy and the standard deviation over clients are also
    accuracies in this sense.
    """
    return re.sub("(_weighted|_worst|_std)?(_augmented)?$", "", key).endswith("accuracy")


def less_is_better(key: str, runs: Iterable[RunDirectory] = ()) -> bool | None:
    """Return whether a smaller value is better, or None if neither fedexp nor the runs know it."""
    own = (run.summary.get("directions", {}).get(key) for run in runs)
    direction = next(filter(None, own), None) or declared_direction(key)
    return None if direction is None else direction == "min"


def format_value(value: float, key: str) -> str:
    """Format a value as papers do. Accuracies are in per cent, and rounds have one digit."""
    if key.startswith(TARGETS):
        return f"{value:.1f}".removesuffix(".0")
    return f"{100 * value:.2f}" if is_accuracy_key(key) else f"{value:.3f}"


def title_of(key: str) -> str:
    """Return the column header for a measure."""
    words = key.replace("_", " ").capitalize()
    return f"{words} (%)" if is_accuracy_key(key) else words


def describe_origin(summaries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the seeds, commits and hardware of runs, if their summaries contain them.

    If a run was resumed with another commit or on other hardware, both are included.
    """
    known = list(summaries)
    seeds = {describe_seed(each) for each in known if each.get("seed") is not None}
    parts = [part for each in known for part in parts_of(each)]
    commits = {str(part["commit"])[:7] for part in parts if part.get("commit")}
    machines = {describe_machine(part["hardware"]) for part in parts if part.get("hardware")}
    return {
        "seeds": " ".join(sorted(seeds, key=natural_key)),
        "commits": " ".join(sorted(commits)),
        "hardware": "; ".join(sorted(machines)),
    }


def describe_seed(summary: Mapping[str, Any]) -> str:
    """Return the seed of a run, or `partition=0,sampling=0,training=1` if its seeds differ."""
    seeds = summary.get("seeds") or {}
    if {*seeds.values()} <= {summary["seed"]}:
        return str(summary["seed"])
    return ",".join(f"{purpose}={seed}" for purpose, seed in sorted(seeds.items()))


def parts_of(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a run with their `commit` and `hardware`; usually, only one."""
    return summary.get("parts") or [summary]


def describe_machine(hardware: Mapping[str, Any]) -> str:
    """Return a text about a run's hardware, such as `AMD EPYC (cpu, fp32)`."""
    return f"{hardware.get('name')} ({hardware.get('device')}, {hardware.get('precision')})"
