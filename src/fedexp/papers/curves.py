"""Learning curves of the committed runs of a sweep, one picture a setting, from the files of
`fedexp report --keep`.

A picture has all methods that were run in the setting, with the mean over seeds and a band of one
standard deviation, and as circles what is known of the papers' released code.
"""

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedexp.analysis.naming import names
from fedexp.analysis.sweep import Sweep
from fedexp.analysis.sweep_figures import slug
from fedexp.core.errors import ConfigError
from fedexp.papers.compare import RELEASED
from fedexp.papers.svg import Curve, Panel, chart
from fedexp.rundir import evidence, files
from fedexp.rundir.revisions import outdated

# Overrides by which runs are not put into different pictures.
NOT_OF_A_SETTING = ("hardware", "rounds=", "targets=")
FOLDER = Path("docs", "reproduction", "curves")
LABELS = {"test_accuracy": "test accuracy", "forgetting": "forgetting F"}
TASK_LABELS = {
    "average_accuracy": "average accuracy on the learned tasks",
    "new_task_accuracy": "new-task accuracy",
}
# experiment, algorithm, round, test_accuracy, source
RELEASED_CURVES = RELEASED.with_name("released_curves.csv")


@dataclass(frozen=True)
class KeptRun:
    """A run as its committed file has it."""

    overrides: Sequence[str]
    content: Mapping[str, Any]

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.content["summary"]

    @cached_property
    def views(self) -> int:
        return len(self.content["config"].get("test_views") or [""])

    def column(self, name: str) -> dict[int, float]:
        """Return round -> value of a column of rounds.csv, where it has one."""
        table = self.content["tables"].get(files.ROUNDS, {})
        pairs = zip(table.get("round", "").split(","), table.get(name, "").split(","), strict=False)
        return {int(round): float(cell) for round, cell in pairs if cell and cell != "nan"}


def kept_runs(sweep: Path) -> Iterator[KeptRun]:
    """Yield the runs of a sweep's directory, with those of other sweeps that its files name, in the
    order of names. On which hardware they were made is no part of a setting, as in tables."""
    for path in sorted((sweep / evidence.FOLDER).glob(f"*{evidence.SUFFIX}")):
        content = evidence.read(path)
        overrides = tuple(
            text for text in content.get("overrides", ()) if not text.startswith(NOT_OF_A_SETTING)
        )
        if "elsewhere" in content:
            _, _, other, run = str(content["elsewhere"]).split("/")
            path = sweep.parent / other / evidence.FOLDER / f"{run}{evidence.SUFFIX}"
            content = evidence.read(path) if path.exists() else {}
        if "summary" in content:
            yield KeptRun(overrides, content)


def pictures(root: Path, sweep: Sweep) -> dict[Path, str]:
    """Return path -> SVG of a picture for each setting in which runs of a sweep are committed.

    Raises ConfigError for a damaged file."""
    runs = list(kept_runs(root / "multirun" / sweep.name))
    try:
        return {
            FOLDER / f"{sweep.name}_{slug(name)}.svg": picture(sweep, name, methods)
            for name, methods in settings(runs).items()
        }
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"multirun/{sweep.name}/{evidence.FOLDER}: not the files of runs ({error!r})"
        ) from error


def settings(runs: Sequence[KeptRun]) -> dict[str, dict[str, list[KeptRun]]]:
    """Group runs by setting and method; of a seed that was run again with more test views, that one
    alone."""
    found: dict[str, dict[str, dict[Any, KeptRun]]] = {}
    runs = sorted(runs, key=lambda run: run.views)
    for run, (setting, method) in zip(runs, names(runs), strict=True):
        label = f"{method} (older code)" if outdated(run.content["config"]) else method
        found.setdefault(setting, {}).setdefault(label, {})[run.summary.get("seed")] = run
    return {
        setting: {method: [*methods[method].values()] for method in sorted(methods)}
        for setting, methods in sorted(found.items())
    }


def picture(sweep: Sweep, setting: str, methods: Mapping[str, Sequence[KeptRun]]) -> str:
    """Return the SVG of a setting."""
    runs = [run for group in methods.values() for run in group]
    labels = TASK_LABELS if any(run.column("average_accuracy") for run in runs) else LABELS
    views = [
        "",
        *(
            ["_augmented"]
            if any(run.column(f"{name}_augmented") for run in runs for name in labels)
            else []
        ),
    ]
    released = released_curves(setting)
    panels = []
    for view in views:
        for name, label in labels.items():
            curves = [curve(i, group, name + view) for i, group in enumerate(methods.values())]
            points = released if name + view == "test_accuracy" else {}
            curves += [
                Curve(number(methods, method), pairs, marks=True)
                for method, pairs in points.items()
            ]
            panels.append(Panel(f"{label}, {view.removeprefix('_') or 'plain'} test", curves))
    legend = [
        (i, f"{method}{f', {len(group)} seeds' if len(group) > 1 else ''}", False)
        for i, (method, group) in enumerate(methods.items())
    ]
    legend += [(number(methods, method), f"{method}, released code", True) for method in released]
    return chart(f"{sweep.name}: {setting}", panels, legend, len(labels))


def curve(index: int, runs: Sequence[KeptRun], column: str) -> Curve:
    """Return the mean of a column over those runs that have it, in the rounds that all of these
    have."""
    found = [values for run in runs if (values := run.column(column))]
    rounds = sorted(set.intersection(*map(set, found))) if found else []
    points = [(r, statistics.fmean(values[r] for values in found)) for r in rounds]
    spread = (
        [statistics.stdev([values[r] for values in found]) for r in rounds]
        if len(found) > 1
        else []
    )
    return Curve(index, points, spread)


def number(methods: Mapping[str, Any], method: str) -> int:
    """Return the number of a method's line; the next free one for a method that was not run
    here."""
    return [*methods, method].index(method)


def released_curves(setting: str) -> dict[str, list[tuple[int, float]]]:
    """Return algorithm -> (round, test accuracy) of the released code in a setting that begins with
    an experiment."""
    found: dict[str, list[tuple[int, float]]] = {}
    with RELEASED_CURVES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if setting == row["experiment"]:
                found.setdefault(row["algorithm"], []).append(
                    (int(row["round"]), float(row["test_accuracy"]))
                )
    return found
