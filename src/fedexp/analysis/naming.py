"""Name runs in tables, figures and pages by the settings and methods in which the runs differ."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedexp.analysis.groups import TESTED, distinguish, group_values, split_by_group
from fedexp.config.options import conf_directories
from fedexp.rundir.identity import FREE
from fedexp.rundir.reader import RunDirectory

# Prefixes of overrides that do not appear in names. hardware.precision changes results.
UNNAMED = (*FREE, "seed", "hydra", "hardware=", *(f"{key}{end}" for key in TESTED for end in "=."))
NAMED_GROUPS = (
    "experiment=",
    "dataset=",
    "partition=",
    "algorithm=",
)  # groups that appear in every name
# First words of the keys of data, model, clients and cohorts, which belong to the setting.
DATA = (
    *("dataset", "augment", "scenario", "schedule", "test_per_client", "model"),
    *("partition", "alpha", "min_size", "shards_per_client", "sort_by_label"),
    *("num_clients", "participation", "cohorts"),
)
# These algorithms have solid lines of different colours in pictures.
FIRST = ("fedavg", "fedntd", "fedprox", "scaffold", "moon", "flashback", "fedka", "cfed")
Name = tuple[str, str]  # setting and method
LONG = re.compile(r"\d*\.\d{4,}(e[+-]?\d+)?")


def named_overrides(run: RunDirectory) -> list[str]:
    """Return the overrides of a run that may appear in its name."""
    texts = [text.lstrip("+") for text in run.overrides]
    ends_runs = any(key.startswith("callback.") for key in run.identity or ())
    return [
        text
        for text in texts
        if not text.startswith(UNNAMED) or (ends_runs and text.startswith("callback"))
    ]


def group_overrides(runs: Sequence[RunDirectory]) -> list[list[str]]:
    """Return the named overrides of each run: the same ones for all runs of a group.

    An override that some run of a group lacks only repeats a default. Runs that the overrides put
    on different precisions keep their own.
    """
    found = [{text.partition("=")[0]: text for text in named_overrides(run)} for run in runs]
    groups: dict[Any, list[int]] = {}
    for number, (run, texts) in enumerate(zip(runs, found, strict=True)):
        # without an identity, equal values may only be missing ones
        values = number if run.identity is None else tuple(sorted(group_values(run).items()))
        groups.setdefault((values, texts.get("hardware.precision")), []).append(number)
    named: dict[int, list[str]] = {}
    for members in groups.values():
        keys = set.intersection(*({*found[number]} for number in members))
        kept = [text for key, text in found[members[0]].items() if key in keys]
        named |= dict.fromkeys(members, kept)
    return [named[number] for number in range(len(runs))]


def shared_overrides(runs: Iterable[RunDirectory]) -> set[str]:
    """Return the overrides that all runs share."""
    every = [set(texts) for texts in group_overrides(list(runs))]
    return set.intersection(*every) if every else set()


def names(runs: Sequence[RunDirectory], of_data: bool = False) -> list[Name]:
    """Return the (setting, method) of each run. Only the runs of a group have the same.

    Options of data, model, clients and cohorts belong to the setting, and options of the algorithm
    belong to the method. Other options in which the runs differ belong to the setting if the runs
    have several algorithms, and to the method if all runs have the same algorithm. Groups with the
    same overrides, such as runs before and after a file of options was edited, also have the values
    in which they differ in their names.

    of_data: whether these other options always belong to the method, as in tables.
    """
    shared = shared_overrides(runs)
    chosen = [(run.config.get("choices") or {}) | run.summary for run in runs]
    of_data = of_data or len({options.get("algorithm") for options in chosen}) == 1
    found: dict[Name, list[RunDirectory]] = {}
    for run, options, texts in zip(runs, chosen, group_overrides(runs), strict=True):
        experiments = [text.partition("=")[2] for text in texts if text.startswith("experiment=")]
        data = [f"{options.get('dataset')} {options.get('partition')}", *experiments][-1]
        own = [text for text in texts if text not in shared and not text.startswith(NAMED_GROUPS)]
        name = extended((data, str(options.get("algorithm"))), own, of_data)
        found.setdefault(name, []).append(run)
    named: dict[Path, Name] = {}
    for name, members in found.items():
        groups = split_by_group(members)
        for group, values in zip(groups, distinguish(groups), strict=True):
            own = [f"{key}={plain(value)}" for key, value in values.items()]
            named |= {run.directory: extended(name, own, of_data) for run in group}
    return [named[run.directory] for run in runs]


def extended(name: Name, texts: Iterable[str], of_data: bool) -> Name:
    """Add options to the setting or the method in a name. of_data: see `names`."""
    setting, method = [], []
    for text in texts:
        is_data = not of_data or re.split("[=.]", text)[0] in DATA
        if text.startswith("algorithm.") or not is_data:
            method.append(text.removeprefix("algorithm."))
        else:
            setting.append(text)
    # Sort the parts, so that names do not depend on the order of overrides in the command.
    return " ".join([name[0], *sorted(setting)]), " ".join([name[1], *sorted(method)])


def plain(value: object) -> str:
    """Return a value as one word, in the form of an override."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return "_".join(text.split())


def differing(names: Iterable[str]) -> list[str]:
    """Remove the words that all names share, unless a name would become empty."""
    names = list(names)
    words = [name.split(" ") for name in names]
    shared = set.intersection(*map(set, words)) if words else set()
    short = [" ".join(word for word in each if word not in shared) for each in words]
    return short if all(short) else names


@cache
def display_names() -> dict[str, str]:
    """Map each algorithm's option to the name that papers use for it.

    The name is the text before the colon in the first line of the option's file.
    """
    return {
        path.stem: path.read_text(encoding="utf-8").partition(":")[0].lstrip("# ")
        for conf in conf_directories()
        for path in (conf / "algorithm").glob("*.yaml")
    }


def displayed(texts: Sequence[str]) -> list[str]:
    """Return the names of methods, settings or runs in the form in which they are displayed.

    Options are replaced by their display names, such as FedAvg for fedavg. Long numbers are rounded
    to the fewest digits (at least three) that keep different names different.
    """
    known = display_names()
    words = [[known.get(word, word) for word in text.split(" ")] for text in texts]
    full = [" ".join(each) for each in words]
    for digits in (3, 4, 6, 9):
        short = [rounded(text, digits) for text in full]
        if len(set(short)) == len(set(full)):
            return short
    return full


def number_methods(methods: Iterable[str]) -> dict[str, int]:
    """Map methods, sorted by name, to the numbers of their colours and line styles.

    The number is the place of the algorithm among all options, so that a method looks the same in
    all pictures. Of several variants of an algorithm, the first one has this number. The other
    variants, and algorithms that are not options, have numbers after those of all options. methods:
    names that begin with an option or its display name.
    """
    known = display_names()
    options = [*FIRST, *sorted(known.keys() - {*FIRST})]
    places = {word: i for i, option in enumerate(options) for word in (option, known.get(option))}
    found: dict[str, int] = {}
    further = itertools.count(len(options))
    for name in ordered(set(methods)):
        place = places.get(name.split(" ")[0].rstrip(","))
        if place is None or place in found.values():
            place = next(further)
        found[name] = place
    return found


def rounded(text: str, digits: int) -> str:
    return LONG.sub(lambda found: f"{float(found[0]):.{digits}g}", text)


def ordered(labels: Iterable[str]) -> list[str]:
    """Sort labels alphabetically, comparing the numbers in them by value."""
    return sorted(labels, key=natural_key)


def natural_key(text: str) -> list[tuple[float, str]]:
    """Return a sort key that compares numbers by value and puts them before words."""
    pieces = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(piece), "") if i % 2 else (math.inf, piece) for i, piece in enumerate(pieces)]
