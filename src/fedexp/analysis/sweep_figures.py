"""The figures of a sweep: each setting has some, which compare its methods.

The figures of a setting are written to these files in `<sweep>/figures/`:

- `<setting>_curves.png`: mean and standard deviation over seeds
- `<setting>_class_accuracy.png`, `_class_accuracy_normalised.png`: heat maps of one seed
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from fedexp.analysis.naming import (
    NAMED_GROUPS,
    displayed,
    names,
    number_methods,
    shared_overrides,
)
from fedexp.figures.load import RunData, load_run_data
from fedexp.rundir.reader import RunDirectory

KINDS = ("_curves", "_class_accuracy", "_class_accuracy_normalised")  # ends of the names


@dataclass(frozen=True)
class Method:
    """The runs of one method in one setting, the lowest seed first."""

    name: str
    runs: tuple[RunDirectory, ...]
    number: int = 0  # determines the colour and line style, see `number_methods`

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
        """Return a column of rounds.csv as (rounds [R] that all runs have, values [runs, R])."""
        points = [file.points(column) for file in self.files]
        series = [pd.Series(values, index=rounds) for rounds, values in points]
        table = pd.concat(series, axis="columns", join="inner")
        return table.index.to_numpy(), table.to_numpy().T


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


def slug(name: str) -> str:
    """Convert a text to a file name."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", name)


def settings(runs: Sequence[RunDirectory]) -> list[Setting]:
    """Group runs by setting and method, named by the overrides in which they differ.

    If every method has one value of each other option, such as its tuned learning rate, the option
    belongs to the method, as in tables. Otherwise, no figure would compare the methods.
    """
    shared = shared_overrides(runs)
    of_experiment = any(text.startswith("experiment=") for text in shared)
    in_name = ("experiment=", "algorithm=") if of_experiment else NAMED_GROUPS
    common = " ".join(sorted(text for text in shared if not text.startswith(in_name)))
    named, tuned = names(runs), names(runs, of_data=True)
    own = {(setting, method) for (_, method), (setting, _) in zip(named, tuned, strict=True)}
    return group_runs(runs, tuned if len(own) == len(set(tuned)) else named, common)


def group_runs(
    runs: Sequence[RunDirectory], named: Sequence[tuple[str, str]], common: str
) -> list[Setting]:
    """Group runs by setting and method. Methods are sorted by name, and their runs by seed.

    named: the (setting, method) of each run.
    """
    numbers = number_methods(method for _, method in named)
    shown = dict(zip(numbers, displayed(list(numbers)), strict=True))
    groups: dict[str, dict[str, list[RunDirectory]]] = {}
    for (setting, method), run in zip(named, runs, strict=True):
        groups.setdefault(setting, {}).setdefault(method, []).append(run)
    found = []
    for methods, title in zip(groups.values(), displayed(list(groups)), strict=True):
        mine = [name for name in numbers if name in methods]
        each = (Method(shown[name], sort_by_seed(methods[name]), numbers[name]) for name in mine)
        found.append(Setting(title, tuple(each), common))
    return found


def sort_by_seed(runs: Iterable[RunDirectory]) -> tuple[RunDirectory, ...]:
    return tuple(sorted(runs, key=lambda run: run.summary.get("seed") or 0))
