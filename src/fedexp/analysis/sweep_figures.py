"""Pictures of a sweep, from the run directories in it: methods beside each other, setting by
setting.

`<sweep>/figures/`, for each setting: `<setting>_curves.png` (mean and standard deviation over
seeds), `<setting>_class_accuracy.png` and `_class_accuracy_normalised.png` (one seed of every
method), `<setting>_round_forgetting.png` (cumulative distributions, Flashback Fig. 4) and, where a
parameter takes several values, `<setting>_<parameter>.png` (FedNTD Fig. 15 and 16). What the group
`analysis` and the metric in_out_local have measured is in `<setting>_local_epochs.png`,
`_local_training.png`, `_weight_divergence.png` and `_in_out_local.png`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedexp.analysis.measures import is_pruned
from fedexp.analysis.naming import (
    SAID,
    displayed,
    grouped,
    names,
    ordered,
    said,
    shared_overrides,
)
from fedexp.core.pictures import Pictures
from fedexp.core.views import VALIDATION, named
from fedexp.figures import save_all
from fedexp.figures.load import RunData, load_run
from fedexp.metrics.forgetting import round_drop
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Method:
    """The runs of one method in one setting, the lowest seed first."""

    name: str
    runs: tuple[RunDirectory, ...]
    number: int = 0  # its colour and line style, the same in all figures of the sweep

    @cached_property
    def files(self) -> list[RunData]:
        return [load_run(run.directory) for run in self.runs]

    @property
    def label(self) -> str:
        """Return the method's name, with the state of its runs where that matters."""
        diverged = sum(run.diverged for run in self.runs)
        pruned = " (pruned)" if any(map(is_pruned, self.runs)) else ""
        return (
            f"{self.name} ({diverged} of {len(self.runs)} diverged)"
            if diverged
            else self.name + pruned
        )

    def curve(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (rounds [R] that all runs have, values [runs, R]) of a column of rounds.csv; of
        its values on the validation set where a run was evaluated on it alone."""
        names = [column if file.has(column) else named(column, VALIDATION) for file in self.files]
        found = [file.points(name) for file, name in zip(self.files, names, strict=True)]
        points = [dict(zip(*map(np.ndarray.tolist, each), strict=True)) for each in found]
        rounds = sorted(set.intersection(*map(set, points)))
        return np.array(rounds), np.array([[each[r] for r in rounds] for each in points])

    def global_drops(self) -> np.ndarray:
        """Return F_t of Flashback of all rounds of all runs, [n]."""
        return np.concatenate(
            [round_drop(file.history.matrix) for file in self.files if file.history]
            or [np.empty(0)]
        )

    def local_drops(self) -> np.ndarray:
        """Return F_{k,t} of Flashback of all clients, rounds and runs, [n]; empty where local
        models were not evaluated."""
        metric, found = RoundDrop(local=True), [np.empty(0)]
        for file in self.files:
            if history := file.history:
                rounds = range(len(history.local_rounds))
                found += [metric.local_values(history, i)["local_round_forgetting"] for i in rounds]
        return np.concatenate(found)


@dataclass(frozen=True)
class Setting:
    """The methods that were run in one setting."""

    name: str
    methods: tuple[Method, ...]
    common: str  # what all runs of the sweep have in common

    @property
    def title(self) -> str:
        return f"{self.name}, {self.common}" if self.common else self.name

    @property
    def runs(self) -> list[RunDirectory]:
        return [run for method in self.methods for run in method.runs]


@dataclass(frozen=True)
class Line:
    """A method whose parameter takes several values."""

    name: str
    number: int  # as of a method
    points: dict[float, tuple[RunDirectory, ...]]


@dataclass(frozen=True)
class ParameterSweep:
    key: str
    setting: str
    lines: tuple[Line, ...]
    baselines: tuple[Method, ...]  # that do not have the parameter


def make_sweep_figures(directory: Path, runs: Sequence[RunDirectory], look: Pictures) -> list[Path]:
    """Draw all figures that the finished runs of a sweep have data for; return the paths."""
    drawn = (
        (slug(name), partial(lambda figure: figure, figure)) for name, figure in pictures(runs)
    )
    return save_all(directory / "figures", drawn, look)


def look_of_sweep(runs: Sequence[RunDirectory]) -> Pictures:
    """Return what the configuration of the runs says of pictures: that of the first which has
    one."""
    return Pictures.of(
        next((run.config["figures"] for run in runs if "figures" in run.config), None)
    )


def pictures(runs: Sequence[RunDirectory]) -> "Iterator[tuple[str, Figure]]":
    """Yield (name, figure), one at a time."""
    from fedexp.analysis import draw_measured, draw_sweep

    for setting in settings(runs):
        yield f"{setting.name}_curves", draw_sweep.curves(setting)
        if any(method.files[0].history for method in setting.methods):
            for end, normalised in (("", False), ("_normalised", True)):
                figure = draw_sweep.class_accuracy(setting, normalised)
                yield f"{setting.name}_class_accuracy{end}", figure
        if any(method.global_drops().size for method in setting.methods):
            figure = draw_sweep.round_forgetting([setting], setting.title)
            yield f"{setting.name}_round_forgetting", figure
        for name, draw in draw_measured.pictures(setting):
            yield f"{setting.name}_{name}", draw(setting)
    for sweep in parameter_sweeps(runs):
        yield f"{sweep.setting}_{sweep.key}", draw_sweep.parameter(sweep)


def slug(name: str) -> str:
    """Return a text as a file name."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", name)


def settings(runs: Sequence[RunDirectory]) -> list[Setting]:
    """Group runs by setting and method, methods by name."""
    shared, groups = shared_overrides(runs), grouped(runs)
    told = (
        ("experiment=", "algorithm=") if any(o.startswith("experiment=") for o in shared) else SAID
    )
    common = " ".join(sorted(o for o in shared if not o.startswith(told)))
    looks = looks_of(runs)
    return [
        Setting(
            shown,
            tuple(
                Method(looks[method].name, by_seed(methods[method]), looks[method].number)
                for method in looks
                if method in methods
            ),
            common,
        )
        for shown, methods in zip(displayed(list(groups)), groups.values(), strict=True)
    ]


class Look(NamedTuple):
    """The name and the number of a method in figures."""

    name: str
    number: int


def looks_of(runs: Sequence[RunDirectory], further: Iterable[str] = ()) -> dict[str, Look]:
    """Return how each method of a sweep looks, in the order of the names. further: other names of
    lines, which come after all methods."""
    methods = ordered({method for _, method in names(runs)})
    every = [*methods, *(name for name in further if name not in methods)]
    return {
        name: Look(shown, i)
        for i, (name, shown) in enumerate(zip(every, displayed(every), strict=True))
    }


def by_seed(runs: Sequence[RunDirectory]) -> tuple[RunDirectory, ...]:
    return tuple(sorted(runs, key=lambda run: run.summary.get("seed") or 0))


def parameter_sweeps(runs: Sequence[RunDirectory]) -> list[ParameterSweep]:
    """Return, for every key that takes several numbers, accuracy and forgetting against it, by
    setting."""
    values: dict[str, set[float]] = {}
    for run in runs:
        for key, x in numbers_of(run).items():
            values.setdefault(key, set()).add(x)
    return [
        sweep for key, found in values.items() if len(found) > 1 for sweep in sweeps_of(key, runs)
    ]


def sweeps_of(key: str, runs: Sequence[RunDirectory]) -> Iterator[ParameterSweep]:
    """Return the sweeps of one key, in each setting where it takes several values."""
    lines: dict[str, dict[str, dict[float, list[RunDirectory]]]] = {}
    others: dict[str, dict[str, list[RunDirectory]]] = {}
    swept = {run.summary["algorithm"] for run in runs if key in numbers_of(run)}
    for run, (setting, method) in zip(runs, names(runs, key), strict=True):
        if (x := numbers_of(run).get(key)) is not None:
            at = lines.setdefault(setting, {}).setdefault(method, {})
            at.setdefault(x, []).append(run)
        elif run.summary["algorithm"] not in swept:
            others.setdefault(setting, {}).setdefault(method, []).append(run)
    looks = looks_of(runs, ordered({name for methods in lines.values() for name in methods}))
    for setting, methods in lines.items():
        if max(map(len, methods.values())) > 1:
            yield ParameterSweep(
                key,
                displayed([setting])[0],
                tuple(
                    Line(*looks[name], {x: by_seed(group) for x, group in sorted(points.items())})
                    for name, points in methods.items()
                ),
                tuple(
                    Method(looks[name].name, by_seed(members), looks[name].number)
                    for name, members in others.get(setting, {}).items()
                ),
            )


def numbers_of(run: RunDirectory) -> dict[str, float]:
    """Return key -> value of the overrides that are finite numbers."""
    given = (text.partition("=") for text in said(run))
    return {key: x for key, _, value in given if (x := as_number(value)) is not None}


def as_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None
