"""Draw a sweep's figures from its run directories. Each setting has figures that compare methods.

The figures of a setting are written to these files in `<sweep>/figures/`:

- `<setting>_curves.png`: mean and standard deviation over seeds
- `<setting>_class_accuracy.png`, `_class_accuracy_normalised.png`: one seed of each method
- `<setting>_round_forgetting.png`: cumulative distributions (Flashback Fig. 4)
- `<setting>_<parameter>.png`: written if a parameter takes several values (FedNTD Fig. 15 and 16)
- `<setting>_local_epochs.png`, `_local_training.png`, `_weight_divergence.png`,
    `_in_out_local.png`: measurements of the group `analysis` and of the metric in_out_local
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedexp.analysis.naming import (
    NAMED_GROUPS,
    displayed,
    grouped,
    named_overrides,
    names,
    ordered,
    shared_overrides,
)
from fedexp.data.views import VALIDATION, name_in_view
from fedexp.figures.load import RunData, load_run_data
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
    number: int = 0  # determines the colour and line style in all figures of the sweep

    @cached_property
    def files(self) -> list[RunData]:
        return [load_run_data(run.directory) for run in self.runs]

    @property
    def label(self) -> str:
        """Return the method's name, and the number of its diverged runs."""
        if diverged := sum(run.diverged for run in self.runs):
            return f"{self.name} ({diverged} of {len(self.runs)} diverged)"
        return self.name

    def curve(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a column of rounds.csv as (rounds [R] that all runs have, values [runs, R]).

        For a run that was only evaluated on the validation set, the values on that set are
        returned.
        """
        names = [
            column if file.has(column) else name_in_view(column, VALIDATION) for file in self.files
        ]
        points = [file.points(name) for file, name in zip(self.files, names, strict=True)]
        series = [pd.Series(values, index=rounds) for rounds, values in points]
        table = pd.concat(series, axis="columns", join="inner")
        return table.index.to_numpy(), table.to_numpy().T

    def global_drops(self) -> np.ndarray:
        """Return F_t of Flashback for all rounds and runs, float [n]."""
        found = [round_drop(file.record.matrix) for file in self.files if file.record]
        return np.concatenate([np.empty(0), *found])

    def local_drops(self) -> np.ndarray:
        """Return F_{k,t} of Flashback for all clients, rounds and runs, float [n].

        The array is empty if local models were not evaluated.
        """
        metric, found = RoundDrop(local=True), [np.empty(0)]
        for file in self.files:
            if record := file.record:
                rounds = range(len(record.local_rounds))
                found += [metric.local_values(record, i)["local_round_forgetting"] for i in rounds]
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
    """The runs of one setting in which a parameter takes several values."""

    key: str
    setting: str
    lines: tuple[Method, ...]  # methods that have the parameter, with their runs for all values
    baselines: tuple[Method, ...]  # methods that do not have the parameter

    def points(self, method: Method) -> dict[float, list[RunDirectory]]:
        """Map each value of the parameter, ascending, to the method's runs with this value."""
        found: dict[float, list[RunDirectory]] = {}
        for run in method.runs:
            found.setdefault(numeric_overrides(run)[self.key], []).append(run)
        return dict(sorted(found.items()))


def read_settings_of_sweep(runs: Sequence[RunDirectory]) -> Pictures:
    """Return the figure settings of the first run whose configuration contains any."""
    found = (run.config["figures"] for run in runs if "figures" in run.config)
    return Pictures.of(next(found, None))


def sweep_pictures(
    runs: Sequence[RunDirectory],
) -> "Iterator[tuple[str, Callable[[], Figure]]]":
    """Yield (name, drawing function) for each figure whose data the finished runs contain."""
    from fedexp.analysis import draw_measured, draw_sweep

    for setting in settings(runs):
        for name, draw in (*draw_sweep.pictures(setting), *draw_measured.pictures(setting)):
            yield slug(f"{setting.name}_{name}"), partial(draw, setting)
    for sweep in parameter_sweeps(runs):
        yield slug(f"{sweep.setting}_{sweep.key}"), partial(draw_sweep.parameter, sweep)


def slug(name: str) -> str:
    """Convert a text to a file name."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", name)


def settings(runs: Sequence[RunDirectory]) -> list[Setting]:
    """Group runs by setting and method. Methods are sorted by name."""
    shared, groups, every = shared_overrides(runs), grouped(runs), method_names(runs)
    of_experiment = any(text.startswith("experiment=") for text in shared)
    in_name = ("experiment=", "algorithm=") if of_experiment else NAMED_GROUPS
    common = " ".join(sorted(text for text in shared if not text.startswith(in_name)))
    return [
        Setting(shown, make_methods(groups[setting], every), common)
        for setting, shown in zip(groups, displayed(list(groups)), strict=True)
    ]


def method_names(runs: Sequence[RunDirectory], further: Iterable[str] = ()) -> list[str]:
    """Return the names of all methods. A name's index determines its colour and line style.

    further: additional names to put after all methods.
    """
    return list(dict.fromkeys([*ordered({name for _, name in names(runs)}), *ordered(further)]))


def make_methods(
    groups: Mapping[str, Iterable[RunDirectory]], every: Sequence[str]
) -> tuple[Method, ...]:
    """Return the methods in the order of `every`.

    groups: name -> runs. every: the names of all methods.
    """
    shown = enumerate(zip(every, displayed(every), strict=True))
    return tuple(
        Method(label, sort_by_seed(groups[name]), number)
        for number, (name, label) in shown
        if name in groups
    )


def sort_by_seed(runs: Iterable[RunDirectory]) -> tuple[RunDirectory, ...]:
    return tuple(sorted(runs, key=lambda run: run.summary.get("seed") or 0))


def parameter_sweeps(runs: Sequence[RunDirectory]) -> list[ParameterSweep]:
    """Return a parameter sweep for each key and setting in which the key has several numbers."""
    keys = dict.fromkeys(key for run in runs for key in numeric_overrides(run))
    return [sweep for key in keys for sweep in find_parameter_sweeps(key, runs)]


def find_parameter_sweeps(key: str, runs: Sequence[RunDirectory]) -> Iterator[ParameterSweep]:
    """Yield a parameter sweep for each setting in which a key has several values."""
    algorithms = {run.summary["algorithm"] for run in runs if key in numeric_overrides(run)}
    groups = grouped(runs, without=key)
    every = method_names(runs, {name for methods in groups.values() for name in methods})
    for setting, methods in groups.items():
        with_key, without_key = {}, {}
        for name, members in methods.items():
            if having := [run for run in members if key in numeric_overrides(run)]:
                with_key[name] = having
            elif members[0].summary["algorithm"] not in algorithms:
                without_key[name] = members
        lines, baselines = make_methods(with_key, every), make_methods(without_key, every)
        sweep = ParameterSweep(key, displayed([setting])[0], lines, baselines)
        if any(len(sweep.points(method)) > 1 for method in lines):
            yield sweep


def numeric_overrides(run: RunDirectory) -> dict[str, float]:
    """Return key -> value for the overrides whose values are finite numbers."""
    found = {}
    for text in named_overrides(run):
        key, _, value = text.partition("=")
        try:
            found[key] = float(value)
        except ValueError:
            continue
    return {key: x for key, x in found.items() if np.isfinite(x)}
