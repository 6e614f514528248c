"""Compare the runs of any sweep with the committed runs of a paper's sweep.

A committed run is a baseline of a run if its configuration has the same values, apart from the
method, the seeds and what does not change a result. So a new method is compared without running
published methods again. The committed runs had another machine and precision, which each row names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.frame import seeds_of, select_runs, tidy
from fedexp.analysis.measures import describe_origin
from fedexp.analysis.naming import displayed
from fedexp.config.composition import composed, without_hydra
from fedexp.config.options import conf_directories, list_options
from fedexp.config.values import resolve
from fedexp.core import storage
from fedexp.core.errors import ConfigError, nearest
from fedexp.data.views import PLAIN
from fedexp.rundir.identity import result_values
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import own_jobs
from fedexp_papers.cells import LAST, LAST_TEN, OF_RULE, select_curve
from fedexp_papers.evidence import TABLE, all_jobs
from fedexp_papers.rules import Rule
from fedexp_papers.sweeps import HARMLESS, PaperBlock, PaperSweep, find_cell, load_paper_sweep

# Values that a baseline may have otherwise. The method's own are the point of the comparison.
NOT_COMPARED = (*HARMLESS, "algorithm.", "analysis.", "local_evaluation.")
GROUPS = ("dataset", "partition", "cohorts", "scenario", "model")
COMMITTED = Path("multirun")  # in a checkout of the repository
NAMED = 6  # number of differing values that a message names
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Baseline:
    """A committed run, the name of its method, and its values (`values_of`)."""

    run: RunDirectory
    method: str
    values: Values


def compare_with(directory: Path, name: str) -> tuple[list[Path], list[str]]:
    """Write with_<name>.csv and with_<name>.md to the directory of a sweep.

    They have the sweep's own runs and, for each of its settings, the committed runs that fit.
    Return the paths, and lines on settings without such runs and on committed runs that are not
    used. name: a paper's sweep. Raises ConfigError if one of the two has no finished run.
    """
    known = sorted(path.parent.name for path in COMMITTED.glob(f"*/{TABLE}"))
    if name not in known:
        raise ConfigError(
            f"--with {name}: {COMMITTED / name} has no committed runs ({TABLE}); sweeps that have"
            f" some: {', '.join(known) or 'none, so call this in a checkout of the repository'}"
            f"{nearest(name, known)}"
        )
    sweep = load_paper_sweep(name)
    mine = tidy(select_runs(own_jobs(directory)))
    if mine.empty:
        raise ConfigError(f"no finished run in {directory}")
    with all_jobs(COMMITTED / name) as jobs:
        baselines, left_out = list_baselines(sweep, jobs)
        table, lines = add_baselines(mine, baselines, name)
        found = average(table, sweep.rule)
    lines += left_out
    head = [f"# {directory.absolute().name} with committed runs of {name}", legend(sweep.rule)]
    text = "\n\n".join([*head, *map(layout.markdown_text, lines), ""])
    text += layout.all_markdown(make_sections(found))
    contents = {f"with_{name}.csv": layout.csv(found), f"with_{name}.md": text}
    return storage.write_texts(directory, contents), lines


def list_baselines(
    sweep: PaperSweep, jobs: Mapping[RunDirectory, Mapping[str, Any]]
) -> tuple[list[Baseline], list[str]]:
    """Return the committed runs that can be baselines, and why the others cannot.

    A run of a method that was corrected later is none, for example.
    """
    found: list[Baseline] = []
    left_out: dict[str, set[str]] = {}
    for run, line in jobs.items():
        block, fields = find_cell(sweep, run.overrides) or (None, {})
        method = fields.get("method", str(run.summary.get("algorithm")))
        reasons = list(line.get("not_judged") or [])
        reasons += ["its configuration was not stored"] * ("rounds" not in run.config)
        reasons += [run.status] * (run.diverged or not run.finished)
        if reasons:
            left_out.setdefault("; ".join(reasons), set()).add(method)
            continue
        options = {text for text in run.overrides if text.startswith("algorithm.")}
        if block:
            options -= {*block.fixed, *named_by_method(block)}
        found.append(Baseline(run, " ".join([method, *sorted(options)]), values_of(run)))
    lines = [f"Not used: {', '.join(sorted(who))} ({why})" for why, who in left_out.items()]
    return found, lines


def named_by_method(block: PaperBlock) -> set[str]:
    """Return the overrides that the names of a block's methods stand for, as in `FedKA (R)`."""
    found: set[str] = set()
    for key, values in block.axes.items():
        methods = {fields["method"] for fields in values.values() if "method" in fields}
        if len(methods) == len(values):
            found |= {f"{key}={value}" for value in values}
    return found


def values_of(run: RunDirectory) -> dict[str, Any]:
    """Return the values that a baseline has in common with a run, and the sizes of the data."""
    every = result_values(run.config) | {
        f"data.{name}": number for name, number in (run.summary.get("data") or {}).items()
    }
    return {key: value for key, value in every.items() if not key.startswith(NOT_COMPARED)}


def default_values(run: RunDirectory) -> dict[str, Any]:
    """Return the defaults of a run's options.

    An earlier configuration lacks options that were added later, whose defaults do not change it.
    """
    choices, known = run.config.get("choices") or {}, conf_directories()
    given = [
        f"{group}={choices[group]}"
        for group in GROUPS
        if choices.get(group) in list_options(group, known)
    ]
    with composed(given) as config:
        return result_values(resolve(without_hydra(config)))


def find_differences(mine: Values, theirs: Values, defaults: Values) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value of a run, value of a committed run) for the values that differ.

    A size of the data differs only if both runs have stored it.
    """
    found = {}
    for key in sorted(mine.keys() | theirs.keys()):
        pair = tuple(values.get(key, defaults.get(key)) for values in (mine, theirs))
        if pair[0] != pair[1] and not (key.startswith("data.") and None in pair):
            found[key] = pair
    return found


def add_baselines(
    mine: pd.DataFrame, baselines: Sequence[Baseline], name: str
) -> tuple[pd.DataFrame, list[str]]:
    """Return a user's runs, each setting followed by the committed runs that fit, and lines.

    mine: the result of `tidy`. A setting is a set of values (`values_of`). The lines say in which
    values the nearest committed runs differ, for each setting without any that fit.
    """
    parts, lines = [], []
    for setting, rows in split_settings(mine).items():
        run = rows["run"].iloc[0]
        values, defaults = values_of(run), default_values(run)
        differences = [find_differences(values, each.values, defaults) for each in baselines]
        fitting = [each for each, no in zip(baselines, differences, strict=True) if not no]
        own = rows[["method", "diverged", "run"]].assign(source="")
        theirs = [(each.method, False, each.run, name) for each in select_seeds(fitting)]
        both = pd.concat([own, pd.DataFrame(theirs, columns=list(own))], ignore_index=True)
        parts.append(both.assign(setting=setting))
        if not fitting:
            lines.append(f"No run of {name} fits {setting}: {describe_nearest(differences)}")
    return pd.concat(parts, ignore_index=True).astype({"diverged": bool}), lines


def split_settings(mine: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Split runs by their values, and name each part.

    If runs of one name differ in values, the name has these values, too.
    """
    values = mine["run"].map(values_of)
    keys = values.map(lambda each: repr(sorted(each.items())))
    found = {}
    for setting, rows in mine.groupby("setting", sort=False):
        parts = list(rows.groupby(keys, sort=False))
        kinds = [values[part.index[0]] for _, part in parts]
        other = [
            key
            for key in sorted(set().union(*kinds))
            if len({repr(kind.get(key)) for kind in kinds}) > 1
        ]
        for (_, part), kind in zip(parts, kinds, strict=True):
            found[" ".join([str(setting), *(f"{key}={kind.get(key)}" for key in other)])] = part
    return found


def select_seeds(fitting: Iterable[Baseline]) -> list[Baseline]:
    """Return one run per method and seed, and of each method only those with the most views."""
    found: dict[str, dict[str, Baseline]] = {}
    for each in sorted(fitting, key=lambda each: -len(each.run.views)):
        seeds = found.setdefault(each.method, {})
        if not seeds or len(next(iter(seeds.values())).run.views) == len(each.run.views):
            seeds.setdefault(seeds_of(each.run), each)
    return [each for seeds in found.values() for each in seeds.values()]


def describe_nearest(differences: Sequence[Mapping[str, tuple[Any, Any]]]) -> str:
    """Name the values in which the nearest committed runs differ from a run."""
    if not differences:
        return "none can be used"
    nearest = min(differences, key=len)
    texts = [f"{key}={theirs}, not {mine}" for key, (mine, theirs) in nearest.items()]
    more = f"; and {len(texts) - NAMED} more" * (len(texts) > NAMED)
    return f"the nearest have {'; '.join(texts[:NAMED])}{more}"


def average(table: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Return a row for each method of each setting, with means and deviations over the seeds.

    accuracy, forgetting: after the last round. *_last10: mean of the last ten rounds. *_rule: by
    the paper's rule, from runs with its view. Diverged runs are counted, and not averaged.
    """
    rows = []
    for (setting, source, method), group in table.groupby(
        ["setting", "source", "method"], sort=False
    ):
        sound = [numbers_of(run, rule) for run in group.loc[~group["diverged"], "run"]]
        numbers = pd.DataFrame(sound, dtype=float)
        row = {"setting": setting, "method": method, "source": source, "n": len(group)}
        row |= {"diverged": int(group["diverged"].sum())}
        for name in map(str, numbers):
            row |= {name: numbers[name].mean(), f"{name}_std": numbers[name].std()}
        rows.append(row | describe_origin(run.summary for run in group["run"]))
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def is_further(rule: Rule) -> bool:
    """Return whether a paper's rule is another one than the plain last round."""
    return (rule.value, rule.view) != (LAST.value, PLAIN)


def numbers_of(run: RunDirectory, rule: Rule) -> dict[str, float | None]:
    """Return the numbers of a run, as fractions, see `average`."""
    found = {}
    for kind in OF_RULE:
        plain = select_curve(run.table, kind).tolist()
        found[kind] = LAST.reported(plain, kind)
        found[f"{kind}_last10"] = LAST_TEN.reported(plain, kind)
        if is_further(rule):
            values = select_curve(run.table, kind, rule.view).tolist()
            found[f"{kind}_rule"] = rule.reported(values, kind)
    return found


def legend(rule: Rule) -> str:
    further = f" *by the rule*: {rule}, if the run has this view." if is_further(rule) else ""
    return (
        "Runs with a name in *from* are committed; only method, seeds, hardware, precision and test"
        f" views differ from yours. Plain test, mean ± standard deviation over seeds.{further}"
    )


def make_sections(table: pd.DataFrame) -> list[layout.Section]:
    """Return a table of methods for each setting."""
    sections = []
    for setting, rows in table.groupby("setting", sort=False):
        shown = pd.DataFrame(index=displayed([str(method) for method in rows["method"]]))
        shown["from"] = [source or "yours" for source in rows["source"]]
        shown["seeds"] = rows["seeds"].tolist()
        for kind in OF_RULE:
            for end, text in {"": "", "_last10": ", last ten", "_rule": ", by the rule"}.items():
                if f"{kind}{end}" in rows:
                    shown[f"{kind}{text}"] = format_column(rows, f"{kind}{end}")
        for name in ("commits", "hardware"):
            shown[name] = rows[name].tolist()
        sections.append(layout.Section(str(setting), shown))
    return sections


def format_column(rows: pd.DataFrame, name: str) -> list[str]:
    """Format numbers as in `0.512 ± 0.010`."""
    spread = rows.get(f"{name}_std", pd.Series(float("nan"), rows.index))
    texts = []
    for value, deviation in zip(rows[name], spread, strict=True):
        text = "-" if pd.isna(value) else f"{value:.3f}"
        texts.append(text if pd.isna(deviation) else f"{text} ± {deviation:.3f}")
    return texts
