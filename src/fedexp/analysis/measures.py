"""Define the measures that tables, figures and pages show first, and the format of their values."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedexp.data.views import PLAIN, VALIDATION, name_in_view
from fedexp.rundir.objective import TARGETS, declared_direction
from fedexp.rundir.reader import RunDirectory

LABELS = {
    "accuracy": "test accuracy",
    "forgetting": "forgetting F",
    "average_accuracy": "average accuracy of the tasks",
    "task_forgetting": "task forgetting",
}
# accuracy and forgetting, first for continual learning and then for all other runs
OF_TASKS, OF_CLASSES = ("average_accuracy", "task_forgetting"), ("accuracy", "forgetting")


@dataclass(frozen=True)
class Measure:
    """An accuracy or forgetting measure of the global model."""

    base: str  # the measure's key in summary.json, for the test set
    view: str = PLAIN

    @property
    def key(self) -> str:
        """Return the measure's key in summary.json."""
        return name_in_view(self.base, self.view)

    @property
    def column(self) -> str:
        """Return the measure's column in rounds.csv."""
        return name_in_view("test_accuracy" if self.base == "accuracy" else self.base, self.view)

    @property
    def label(self) -> str:
        text = LABELS[self.base]
        return text if self.view == PLAIN else f"{VALIDATION} {text.removeprefix('test ')}"


def main_measures(runs: Iterable[RunDirectory]) -> list[Measure]:
    """Return the accuracy and forgetting measures that suit the runs.

    For runs on a stream of tasks, these are average accuracy and task forgetting. Values on the
    validation set are used only for runs that were not evaluated on the test set. If only some of
    the runs are on a stream of tasks, the measures of both kinds are returned.
    """
    found: dict[Measure, None] = {}
    for run in runs:
        known = {*run.summary, *(() if run.rounds is None else run.rounds)}
        kinds = [(bases, view) for view in (PLAIN, VALIDATION) for bases in (OF_TASKS, OF_CLASSES)]
        for bases, view in kinds:
            measures = [Measure(base, view) for base in bases]
            if {measures[0].key, measures[0].column} & known:
                found |= dict.fromkeys(measures)
                break
    return list(found) or [Measure(base) for base in OF_CLASSES]


def is_accuracy_key(key: str) -> bool:
    """Return whether a key of summary.json is an accuracy in any view of the test set.

    The worst accuracy and the standard deviation over clients are also accuracies in this sense.
    """
    return re.sub("(_worst|_std)?(_augmented)?$", "", key).endswith("accuracy")


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
    seeds = {int(each["seed"]) for each in known if each.get("seed") is not None}
    parts = [part for each in known for part in parts_of(each)]
    commits = {str(part["commit"])[:7] for part in parts if part.get("commit")}
    machines = {describe_machine(part["hardware"]) for part in parts if part.get("hardware")}
    return {
        "seeds": " ".join(map(str, sorted(seeds))),
        "commits": " ".join(sorted(commits)),
        "hardware": "; ".join(sorted(machines)),
    }


def parts_of(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a run with their `commit` and `hardware`; usually, only one."""
    spans = (summary.get("determinism") or {}).get("spans")  # in summaries of fedexp 0.1
    if spans:
        return [each | {"hardware": each if each.get("name") else None} for each in spans]
    return summary.get("parts") or [summary]


def describe_machine(hardware: Mapping[str, Any]) -> str:
    """Return a text about a run's hardware, such as `AMD EPYC (cpu, fp32)`."""
    return f"{hardware.get('name')} ({hardware.get('device')}, {hardware.get('precision')})"
