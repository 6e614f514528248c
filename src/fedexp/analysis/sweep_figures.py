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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedexp.analysis.compare import WHERE
from fedexp.core.pictures import Pictures
from fedexp.core.views import VALIDATION, named
from fedexp.figures import save_all
from fedexp.figures.load import RunData, load_run
from fedexp.metrics.forgetting import round_drop
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Overrides that do not tell runs apart, and those that the label of a setting says in another way.
UNSAID = (
    "seed",
    "tracker",
    *WHERE,
    "figures",
    "hydra",
    "data_dir",
    "checkpoint_interval",
    "profile",
    "forgetting_metric",
    "analysis",
    "test_views",
    "evaluate_on",
    "objective",
    "resume",
    "keep_models",
    "keep_local_models",
)
SAID = ("experiment=", "dataset=", "partition=", "algorithm=")


class Told(Protocol):
    """A run, as far as names of settings and methods follow from it."""

    @property
    def overrides(self) -> Sequence[str]: ...

    @property
    def summary(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Method:
    """The runs of one method in one setting, the lowest seed first."""

    name: str
    runs: tuple[RunDirectory, ...]

    @cached_property
    def files(self) -> list[RunData]:
        return [load_run(run.directory) for run in self.runs]

    @property
    def label(self) -> str:
        """Return the method's name, with the state of its runs where that matters."""
        diverged = sum(run.diverged for run in self.runs)
        return f"{self.name} ({diverged} of {len(self.runs)} diverged)" if diverged else self.name

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
    def with_tasks(self) -> bool:
        return any(file.tasks is not None for method in self.methods for file in method.files)


@dataclass(frozen=True)
class Line:
    """A method whose parameter takes several values; without values of it (a baseline) `points` has
    one key, nan."""

    name: str
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
            yield (
                f"{setting.name}_class_accuracy",
                draw_sweep.class_accuracy(setting, normalised=False),
            )
            yield (
                f"{setting.name}_class_accuracy_normalised",
                draw_sweep.class_accuracy(setting, normalised=True),
            )
        if any(method.global_drops().size for method in setting.methods):
            yield f"{setting.name}_round_forgetting", draw_sweep.round_forgetting(setting)
        for name, draw in draw_measured.pictures(setting):
            yield f"{setting.name}_{name}", draw(setting)
    for sweep in parameter_sweeps(runs):
        yield f"{sweep.setting}_{sweep.key}", draw_sweep.parameter(sweep)


def slug(name: str) -> str:
    """Return a text as a file name."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", name)


def settings(runs: Sequence[RunDirectory]) -> list[Setting]:
    """Group runs by setting and method, in the order in which they come."""
    found: dict[str, dict[str, list[RunDirectory]]] = {}
    shared = shared_overrides(runs)
    single = len({run.summary["algorithm"] for run in runs}) == 1
    for run in runs:
        setting, method = names(run, shared, single)
        found.setdefault(setting, {}).setdefault(method, []).append(run)
    told = (
        ("experiment=", "algorithm=") if any(o.startswith("experiment=") for o in shared) else SAID
    )
    common = " ".join(sorted(o for o in shared if not o.startswith(told)))
    return [
        Setting(name, tuple(Method(m, by_seed(members)) for m, members in methods.items()), common)
        for name, methods in found.items()
    ]


def by_seed(runs: Sequence[RunDirectory]) -> tuple[RunDirectory, ...]:
    return tuple(sorted(runs, key=lambda run: run.summary.get("seed") or 0))


def said(run: Told) -> list[str]:
    """Return the overrides that say what was run."""
    return [text.lstrip("+") for text in run.overrides if not text.startswith(UNSAID)]


def shared_overrides(runs: Sequence[Told]) -> set[str]:
    return set.intersection(*(set(said(run)) for run in runs)) if runs else set()


def names(run: Told, shared: set[str], single: bool, without: str = "") -> tuple[str, str]:
    """Return (setting, method). single: all runs have one algorithm, and what else varies is its.
    without: a key to leave out."""
    texts = [text for text in said(run) if text.partition("=")[0] != without]
    experiment = [text.partition("=")[2] for text in texts if text.startswith("experiment=")]
    place = (
        experiment[-1]
        if experiment
        else f"{run.summary.get('dataset')} {run.summary.get('partition')}"
    )
    varying = [text for text in texts if text not in shared and not text.startswith(SAID)]
    own = [text for text in varying if single or text.startswith("algorithm.")]
    # in whatever order a command gives them
    others = sorted(text for text in varying if text not in own)
    method = [str(run.summary["algorithm"]), *(text.removeprefix("algorithm.") for text in own)]
    return " ".join([place, *others]), " ".join(method)


def parameter_sweeps(runs: Sequence[RunDirectory]) -> list[ParameterSweep]:
    """Return, for every key that takes several numbers, accuracy and forgetting against it, by
    setting."""
    values: dict[str, set[float]] = {}
    for run in runs:
        for text in said(run):
            key, _, value = text.partition("=")
            if (x := as_number(value)) is not None:
                values.setdefault(key, set()).add(x)
    return [
        sweep for key, found in values.items() if len(found) > 1 for sweep in sweeps_of(key, runs)
    ]


def sweeps_of(key: str, runs: Sequence[RunDirectory]) -> Iterator[ParameterSweep]:
    """Return the sweeps of one key, in each setting where it takes several values."""
    shared = shared_overrides(runs)
    lines: dict[str, dict[str, dict[float, list[RunDirectory]]]] = {}
    others: dict[str, dict[str, list[RunDirectory]]] = {}
    for run in runs:
        setting, method = names(run, shared, single=False, without=key)
        given = {k: v for k, _, v in (text.partition("=") for text in said(run))}
        if (x := as_number(given.get(key, ""))) is not None:
            lines.setdefault(setting, {}).setdefault(method, {}).setdefault(x, []).append(run)
        else:
            others.setdefault(setting, {}).setdefault(method, []).append(run)
    for setting, methods in lines.items():
        if max(map(len, methods.values())) < 2:
            continue
        swept = {
            run.summary["algorithm"]
            for points in methods.values()
            for group in points.values()
            for run in group
        }
        yield ParameterSweep(
            key,
            setting,
            tuple(
                Line(m, {x: by_seed(group) for x, group in sorted(p.items())})
                for m, p in methods.items()
            ),
            tuple(
                Method(name, by_seed(members))
                for name, members in others.get(setting, {}).items()
                if members[0].summary["algorithm"] not in swept
            ),
        )


def as_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None
