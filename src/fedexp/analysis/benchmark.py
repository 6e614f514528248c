"""Make the report of a benchmark, a sweep whose file has the key `ranks`.

The key lists the measures by which methods are ranked. The report shows accuracy, forgetting and
cost of every method in each setting. Methods that were run in the same settings are compared by
their mean ranks over settings and seeds (fedexp.analysis.ranks). The seeds of a setting share its
data, so they are not independent samples. The tests show which differences are repeatable on these
data, but not whether they hold on other data.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedexp.analysis.layout import Section
from fedexp.analysis.ranks import ALPHA, Comparison, compare_methods
from fedexp.analysis.sweep import Sweep, find_cell
from fedexp.rundir.reader import RunDirectory


@dataclass(frozen=True)
class Ranking:
    """The comparison of methods by one measure, over the settings in which all of them were run."""

    measure: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    comparison: Comparison

    @property
    def title(self) -> str:
        """Return a line with the measure, the settings, the seeds and the result of the tests."""
        found = self.comparison
        over = f"{', '.join(self.settings)}; seeds {', '.join(map(str, self.seeds))}"
        return (
            f"Mean ranks by {self.measure} over {over}: {len(found.methods)} methods,"
            f" N={found.blocks}, Friedman p={found.p:.2g}, critical difference"
            f" {found.critical_difference:.2f} (Nemenyi, {ALPHA:g})"
        )


def select_runs(sweep: Sweep, runs: Sequence[RunDirectory]) -> pd.DataFrame:
    """Return a table of a benchmark's runs in the order of the sweep's file.

    The columns are method, setting, seed and run.
    """
    rows = []
    for run in runs:
        if cell := find_cell(sweep, run.overrides):
            rows.append(cell[1] | {"seed": int(run.summary["seed"]), "run": run})
    keys = ["method", "setting"]
    table = pd.DataFrame(rows, columns=[*keys, "seed", "run"])
    table = table.drop_duplicates([*keys, "seed"], keep="last")
    fields = [block.fields(each) for block in sweep.blocks for each in block.combinations()]
    for key in keys:
        names = dict.fromkeys(each[key] for each in fields)
        table[key] = pd.Categorical(table[key], list(names))
    return table.sort_values([*keys, "seed"])


def read_value(run: RunDirectory, names: Sequence[str]) -> float:
    """Return a run's value for the first of the names for which the run has a value.

    Return nan if the run diverged or has no value for any of the names.
    """
    values = [run.summary[name] for name in names if run.summary.get(name) is not None]
    return float(values[0]) if values and not run.diverged else np.nan


def rankings(sweep: Sweep, runs: pd.DataFrame) -> list[Ranking]:
    """Rank the methods by each measure.

    There is one ranking for each set of settings in which some method was run. The ranking includes
    all methods that were run in these settings. A ranking needs at least two methods and two
    blocks. A block is a setting with one seed.
    """
    places = [
        tuple(group.unique()) for _, group in runs.groupby("method", observed=True)["setting"]
    ]
    made = [
        rank_methods(measure, names, settings, runs)
        for settings in sorted(dict.fromkeys(places), key=len, reverse=True)
        for measure, names in sweep.ranks.items()
    ]
    return [ranking for ranking in made if ranking]


def rank_methods(
    measure: str, names: Sequence[str], settings: tuple[str, ...], runs: pd.DataFrame
) -> Ranking | None:
    """Rank the methods that have a run for every seed in all of these settings.

    The seeds are all seeds of the methods that were run in these settings. Return None if there are
    fewer than two methods or two blocks.
    """
    inside = runs[runs["setting"].isin(settings)]
    everywhere = inside.groupby("method", observed=True)["setting"].nunique() == len(settings)
    inside = inside[inside["method"].map(everywhere)]
    seeds = tuple(sorted(inside["seed"].unique()))
    table = inside.pivot(index=["setting", "seed"], columns="method", values="run")
    blocks = pd.MultiIndex.from_product([settings, seeds])
    table = table.reindex(blocks).dropna(axis="columns")
    if table.shape[0] < 2 or table.shape[1] < 2:
        return None
    # Larger values are better. A run without a value ranks last.
    sign = -1 if names[-1].endswith("forgetting") else 1
    values = sign * table.map(lambda run: read_value(run, names)).to_numpy(dtype=float)
    methods = [str(name) for name in table]
    compared = compare_methods(methods, np.nan_to_num(values, nan=-np.inf))
    return Ranking(measure, settings, seeds, compared)


def benchmark_sections(sweep: Sweep, finished: Sequence[RunDirectory]) -> list[Section]:
    """Return the tables of a benchmark: results, cost and ranks."""
    runs = select_runs(sweep, finished)
    if runs.empty:
        return []
    results = tabulate(runs, lambda group: format_results(group, sweep.ranks.values()))
    costs = tabulate(runs, format_cost)
    return [
        Section("Accuracy in per cent (F) ± standard deviation over seeds", results),
        Section("Cost of a run: MB sent to and from all clients; seconds for all rounds", costs),
        *(Section(each.title, tabulate_ranks(each)) for each in rankings(sweep, runs)),
    ]


def tabulate(runs: pd.DataFrame, text_of: Callable[[list[RunDirectory]], str]) -> pd.DataFrame:
    """Return a table of methods x settings.

    text_of: a function that returns a cell's text, given the cell's runs (one per seed).
    """
    groups = runs.groupby(["method", "setting"], observed=True)["run"]
    table = groups.agg(lambda group: text_of(list(group))).unstack().fillna("-")
    return table.rename_axis(index=None, columns=None)


def format_results(runs: Sequence[RunDirectory], measures: Iterable[Sequence[str]]) -> str:
    """Return the text of a cell: the first measure, followed by the other measures in parentheses.

    Accuracies are in per cent.
    """
    sound = [run for run in runs if not run.diverged]
    texts: list[str] = []
    for names in measures:
        is_percent = names[-1].endswith("accuracy")
        found = [read_value(run, names) for run in sound]
        values = [(100 if is_percent else 1) * value for value in found if not np.isnan(value)]
        text = format_spread(values, 1 if is_percent else 2)
        texts.append(f"({text})" if texts else text)
    failed = len(runs) - len(sound)
    return " ".join(texts) + (f", {failed} of {len(runs)} diverged" if failed else "")


def format_cost(runs: Sequence[RunDirectory]) -> str:
    """Return the traffic in MB and the seconds of a run, averaged over seeds."""
    sent = np.mean([sum(run.values("bytes_up") + run.values("bytes_down")) for run in runs])
    seconds = np.mean([sum(run.values("seconds")) for run in runs])
    return f"{sent / 1e6:.1f} MB, {seconds:.1f} s"


def format_spread(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation (n - 1 in the denominator).

    Return only the mean of a single value, and "-" without values.
    """
    if not values:
        return "-"
    text = f"{np.mean(values):.{digits}f}"
    return f"{text} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else text


def tabulate_ranks(ranking: Ranking) -> pd.DataFrame:
    """Return one row per method, with the best method first.

    The columns are the mean rank and the letters of the groups that the method belongs to. Methods
    in the same group do not differ significantly.
    """
    found = ranking.comparison
    letters = ["" for _ in found.methods]
    for number, (first, last) in enumerate(found.cliques):
        for place in range(first, last + 1):
            letters[place] += letter(number)
    rows = [[f"{rank:.2f}", text or "-"] for rank, text in zip(found.ranks, letters, strict=True)]
    return pd.DataFrame(rows, index=list(found.methods), columns=["mean rank", "groups"])


def letter(number: int) -> str:
    """Return the name of a group: a to z, then a1, b1, and so on."""
    return chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")
