"""Reports of benchmarks. A benchmark is a sweep whose file has `ranks`, the measures to rank by.

The report shows accuracy, forgetting and cost of every method in each setting. Methods that were
run in the same settings are compared by their mean ranks over settings and seeds
(fedexp.analysis.ranks). The seeds of a setting share its data, so they are not independent samples:
the tests tell which differences repeat on these data, not on other data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedexp.analysis.layout import Section
from fedexp.analysis.ranks import ALPHA, Comparison, compare_methods
from fedexp.analysis.sweep import Sweep, cell_of
from fedexp.rundir.reader import RunDirectory

LESS_IS_BETTER = ("forgetting",)  # suffixes of the values' names

Runs = Mapping[tuple[str, str], Mapping[int, RunDirectory]]  # (method, setting) -> seed -> run


@dataclass(frozen=True)
class Ranking:
    """The comparison of the methods that were run in the same settings, by one measure."""

    measure: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    comparison: Comparison

    @property
    def title(self) -> str:
        """Return the measure, the settings and seeds, and the result of the tests."""
        found = self.comparison
        over = f"{', '.join(self.settings)}; seeds {', '.join(map(str, self.seeds))}"
        return (
            f"Mean ranks by {self.measure} over {over}: {len(found.methods)} methods,"
            f" N={found.blocks}, Friedman p={found.p:.2g}, critical difference"
            f" {found.critical_difference:.2f} (Nemenyi, {ALPHA:g})"
        )


def runs_of(sweep: Sweep, runs: Sequence[RunDirectory]) -> Runs:
    """Return (method, setting) -> seed -> run of a benchmark, in the order of the sweep's file.

    Pairs without a run are omitted.
    """
    names = [
        (fields["method"], fields["setting"])
        for block in sweep.blocks
        for combination in block.combinations()
        if (fields := block.fields(combination))
    ]
    found: dict[tuple[str, str], dict[int, RunDirectory]] = {name: {} for name in names}
    for run in runs:
        if cell := cell_of(sweep, run.overrides):
            found[cell[1]["method"], cell[1]["setting"]][int(run.summary["seed"])] = run
    return {name: dict(sorted(seeds.items())) for name, seeds in found.items() if seeds}


def value_of(run: RunDirectory, names: Sequence[str]) -> float:
    """Return the first of these values that a run has, with the sign changed if smaller is better.

    Return -inf if the run diverged or has none of the values.
    """
    for name in names:
        value = run.summary.get(name)
        if isinstance(value, int | float) and np.isfinite(value) and not run.diverged:
            return -float(value) if name.endswith(LESS_IS_BETTER) else float(value)
    return -np.inf


def rankings(sweep: Sweep, runs: Runs) -> list[Ranking]:
    """Rank the methods by each measure, for each set of settings that some method was run in.

    A method that was run in further settings is ranked too. A ranking needs at least two methods
    and two blocks (a setting with one seed).
    """
    places: dict[str, set[str]] = {}
    for method, setting in runs:
        places.setdefault(method, set()).add(setting)
    order = list(dict.fromkeys(setting for _, setting in runs))
    sets = dict.fromkeys(tuple(s for s in order if s in mine) for mine in places.values())
    made = [
        ranking
        for settings in sorted(sets, key=len, reverse=True)
        for measure, names in sweep.ranks.items()
        if (ranking := ranking_of(measure, names, settings, runs))
    ]
    return made


def ranking_of(
    measure: str, names: Sequence[str], settings: tuple[str, ...], runs: Runs
) -> Ranking | None:
    """Rank the methods that have a run of every seed in all these settings.

    The seeds are the union of the seeds of all methods that were run in these settings. Return None
    for fewer than two methods or two blocks.
    """
    methods = list(dict.fromkeys(method for method, _ in runs))
    methods = [
        method for method in methods if all((method, setting) in runs for setting in settings)
    ]
    every = [set(runs[method, setting]) for method in methods for setting in settings]
    seeds = tuple(sorted(set.union(*every)))
    whole = [m for m in methods if all(set(runs[m, setting]) == set(seeds) for setting in settings)]
    if len(whole) < 2 or len(settings) * len(seeds) < 2:
        return None
    blocks = [(setting, seed) for setting in settings for seed in seeds]
    values = np.array([[value_of(runs[m, s][seed], names) for m in whole] for s, seed in blocks])
    return Ranking(measure, settings, seeds, compare_methods(whole, values))


def benchmark_sections(sweep: Sweep, finished: Sequence[RunDirectory]) -> list[Section]:
    """Return the tables of a benchmark: results, cost and ranks."""
    runs = runs_of(sweep, finished)
    if not runs:
        return []
    results = Section(
        "Accuracy in per cent (F) ± standard deviation over seeds", results_table(sweep, runs)
    )
    costs = Section(
        "Cost of a run: MB sent, both ways, of all clients; seconds of its rounds", cost_table(runs)
    )
    return [
        results,
        costs,
        *(Section(each.title, rank_table(each)) for each in rankings(sweep, runs)),
    ]


def results_table(sweep: Sweep, runs: Runs) -> pd.DataFrame:
    """Return methods x settings: the first measure, and the other measures in parentheses."""

    def cell(seeds: Mapping[int, RunDirectory]) -> str:
        texts: list[str] = []
        for names in sweep.ranks.values():
            values = [shown_value(run, names) for run in seeds.values() if not run.diverged]
            percent = names[-1].endswith("accuracy")
            text = spread(
                [100 * value for value in values] if percent else values, 1 if percent else 2
            )
            texts.append(f"({text})" if texts else text)
        failed = sum(run.diverged for run in seeds.values())
        return " ".join(texts) + (f", {failed} of {len(seeds)} diverged" if failed else "")

    return by_method(runs, cell)


def shown_value(run: RunDirectory, names: Sequence[str]) -> float:
    """Return the first of these values that a run has; nan if it has none."""
    return next(
        (float(run.summary[name]) for name in names if run.summary.get(name) is not None),
        float("nan"),
    )


def cost_table(runs: Runs) -> pd.DataFrame:
    """Return methods x settings: the MB and seconds of a run, averaged over seeds."""

    def cell(seeds: Mapping[int, RunDirectory]) -> str:
        sent = (
            np.mean(
                [sum(run.values("bytes_up") + run.values("bytes_down")) for run in seeds.values()]
            )
            / 1e6
        )
        seconds = np.mean([sum(run.values("seconds")) for run in seeds.values()])
        return f"{sent:.1f} MB, {seconds:.1f} s"

    return by_method(runs, cell)


def by_method(runs: Runs, text_of: Callable[[Mapping[int, RunDirectory]], str]) -> pd.DataFrame:
    """Return methods x settings. text_of: returns the text of a cell from its runs by seed."""
    methods, settings = (list(dict.fromkeys(name[i] for name in runs)) for i in range(2))
    rows = [[text_of(runs[m, s]) if (m, s) in runs else "-" for s in settings] for m in methods]
    return pd.DataFrame(rows, index=methods, columns=settings)


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation (n - 1 in the denominator).

    Return only the mean for a single value, and - for no value.
    """
    if not values:
        return "-"
    text = f"{np.mean(values):.{digits}f}"
    return f"{text} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else text


def rank_table(ranking: Ranking) -> pd.DataFrame:
    """Return one row per method, the best first.

    Columns: the mean rank, and the letters of the groups that the method belongs to. Methods in a
    group do not differ significantly.
    """
    found = ranking.comparison
    letters = ["" for _ in found.methods]
    for number, (first, last) in enumerate(found.cliques):
        for place in range(first, last + 1):
            letters[place] += letter(number)
    rows = [[f"{rank:.2f}", text or "-"] for rank, text in zip(found.ranks, letters, strict=True)]
    return pd.DataFrame(rows, index=list(found.methods), columns=["mean rank", "groups"])


def letter(number: int) -> str:
    """Return the name of a group: a to z, then a1, b1, ..."""
    return chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")
