"""Draw a sweep's pictures from its run directories: methods side by side, one set per setting.

Pictures are written to `<sweep>/figures/`. Each setting has `<setting>_curves.png` (mean and
standard deviation over seeds), `<setting>_class_accuracy.png` and `_class_accuracy_normalised.png`
(one seed of every method), and `<setting>_round_forgetting.png` (cumulative distributions,
Flashback Fig. 4). If a parameter takes several values, `<setting>_<parameter>.png` is added (FedNTD
Fig. 15 and 16).

Measurements of the group `analysis` and of the metric in_out_local are in
`<setting>_local_epochs.png`, `_local_training.png`, `_weight_divergence.png` and
`_in_out_local.png`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from fedexp.analysis.measures import is_pruned
from fedexp.analysis.naming import SAID, displayed, grouped, names, ordered, said, shared_overrides
from fedexp.data.views import VALIDATION, named
from fedexp.figures.load import RunData, load_run
from fedexp.figures.pictures import Pictures
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
    number: int = 0  # determines colour and line style, the same in all figures of the sweep

    @cached_property
    def files(self) -> list[RunData]:
        return [load_run(run.directory) for run in self.runs]

    @property
    def label(self) -> str:
        """Return the method's name, with the number of diverged runs or a note that runs were
        pruned."""
        if diverged := sum(run.diverged for run in self.runs):
            return f"{self.name} ({diverged} of {len(self.runs)} diverged)"
        return self.name + " (pruned)" * any(map(is_pruned, self.runs))

    def curve(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (rounds [R] that all runs have, values [runs, R]) of a column of rounds.csv.

        For a run that was only evaluated on the validation set, the values on that set are used.
        """
        names = [column if file.has(column) else named(column, VALIDATION) for file in self.files]
        found = [file.points(name) for file, name in zip(self.files, names, strict=True)]
        points = [dict(zip(*map(np.ndarray.tolist, each), strict=True)) for each in found]
        rounds = sorted(set.intersection(*map(set, points)))
        return np.array(rounds), np.array([[each[r] for r in rounds] for each in points])

    def global_drops(self) -> np.ndarray:
        """Return F_t of Flashback for all rounds of all runs, [n]."""
        found = [round_drop(file.history.matrix) for file in self.files if file.history]
        return np.concatenate([np.empty(0), *found])

    def local_drops(self) -> np.ndarray:
        """Return F_{k,t} of Flashback for all clients, rounds and runs, [n].

        The array is empty if local models were not evaluated.
        """
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
    common: str  # overrides that all runs of the sweep share

    @property
    def title(self) -> str:
        return f"{self.name}, {self.common}" if self.common else self.name

    @property
    def runs(self) -> list[RunDirectory]:
        return [run for method in self.methods for run in method.runs]


@dataclass(frozen=True)
class ParameterSweep:
    """The runs of a setting in which a parameter takes several values."""

    key: str
    setting: str
    lines: tuple[tuple[Method, dict[float, tuple[RunDirectory, ...]]], ...]  # runs by value
    baselines: tuple[Method, ...]  # methods without the parameter


def look_of_sweep(runs: Sequence[RunDirectory]) -> Pictures:
    """Return the picture settings of the first run whose configuration has any."""
    found = (run.config["figures"] for run in runs if "figures" in run.config)
    return Pictures.of(next(found, None))


def sweep_pictures(
    runs: Sequence[RunDirectory],
) -> "Iterator[tuple[str, Callable[[], Figure]]]":
    """Yield (name, function that draws it) of each figure that a sweep's finished runs have data
    for."""
    from fedexp.analysis import draw_measured, draw_sweep

    for setting in settings(runs):
        drawn: dict[str, Callable[[], Figure]] = {"curves": partial(draw_sweep.curves, setting)}
        if any(method.files[0].history for method in setting.methods):
            for end, normalised in (("", False), ("_normalised", True)):
                draw = partial(draw_sweep.class_accuracy, setting, normalised)
                drawn[f"class_accuracy{end}"] = draw
        if any(method.global_drops().size for method in setting.methods):
            draw = partial(draw_sweep.round_forgetting, [setting], setting.title)
            drawn["round_forgetting"] = draw
        drawn |= {name: partial(f, setting) for name, f in draw_measured.pictures(setting)}
        yield from ((slug(f"{setting.name}_{name}"), draw) for name, draw in drawn.items())
    for sweep in parameter_sweeps(runs):
        yield slug(f"{sweep.setting}_{sweep.key}"), partial(draw_sweep.parameter, sweep)


def slug(name: str) -> str:
    """Return a text as a file name."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", name)


def settings(runs: Sequence[RunDirectory]) -> list[Setting]:
    """Group runs by setting and method. Methods are sorted by name."""
    shared, groups, looks = shared_overrides(runs), grouped(runs), looks_of(runs)
    of_experiment = any(text.startswith("experiment=") for text in shared)
    told = ("experiment=", "algorithm=") if of_experiment else SAID
    common = " ".join(sorted(text for text in shared if not text.startswith(told)))
    found = []
    for shown, methods in zip(displayed(list(groups)), groups.values(), strict=True):
        every = tuple(look(methods[name]) for name, look in looks.items() if name in methods)
        found.append(Setting(shown, every, common))
    return found


def looks_of(
    runs: Sequence[RunDirectory], further: Iterable[str] = ()
) -> dict[str, Callable[[Iterable[RunDirectory]], Method]]:
    """Return name -> function that builds a `Method` from its runs, in the order of the names.

    further: additional names, which come after all methods.
    """
    every = list(dict.fromkeys([*ordered({name for _, name in names(runs)}), *ordered(further)]))
    shown = displayed(every)

    def look(number: int, runs: Iterable[RunDirectory]) -> Method:
        return Method(shown[number], by_seed(runs), number)

    return {name: partial(look, number) for number, name in enumerate(every)}


def by_seed(runs: Iterable[RunDirectory]) -> tuple[RunDirectory, ...]:
    return tuple(sorted(runs, key=lambda run: run.summary.get("seed") or 0))


def parameter_sweeps(runs: Sequence[RunDirectory]) -> list[ParameterSweep]:
    """Return a parameter sweep for each setting and each key that takes several numbers there."""
    keys = dict.fromkeys(key for run in runs for key in numbers_of(run))
    return [sweep for key in keys for sweep in sweeps_of(key, runs)]


def sweeps_of(key: str, runs: Sequence[RunDirectory]) -> Iterator[ParameterSweep]:
    """Yield a key's parameter sweeps: one for each setting in which the key takes several
    values."""
    having = [run for run in runs if key in numbers_of(run)]
    algorithms = {run.summary["algorithm"] for run in having}
    others = [run for run in runs if run.summary["algorithm"] not in algorithms]
    groups = grouped(runs, without=key)
    looks = looks_of(runs, {name for methods in groups.values() for name in methods})
    for setting, methods in groups.items():
        lines, baselines = [], []
        for name, members in methods.items():
            points: dict[float, list[RunDirectory]] = {}
            for run in members:
                if run in having:
                    points.setdefault(numbers_of(run)[key], []).append(run)
            if points:
                method = looks[name](run for run in members if run in having)
                lines.append((method, {x: tuple(group) for x, group in sorted(points.items())}))
            elif members[0] in others:
                baselines.append(looks[name](members))
        if max((len(points) for _, points in lines), default=0) > 1:
            shown = displayed([setting])[0]
            yield ParameterSweep(key, shown, tuple(lines), tuple(baselines))


def numbers_of(run: RunDirectory) -> dict[str, float]:
    """Return key -> value of the overrides whose values are finite numbers."""
    found = {}
    for text in said(run):
        key, _, value = text.partition("=")
        try:
            found[key] = float(value)
        except ValueError:
            continue
    return {key: x for key, x in found.items() if np.isfinite(x)}
