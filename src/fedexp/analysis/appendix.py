"""Describe the runs of a sweep for the appendix of a paper: data, model, settings, time, software.

All values are read from the files of the runs. What an earlier version of fedexp did not store is
`not recorded`.
"""

import itertools
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis.frame import KEYS, seeds_of
from fedexp.analysis.groups import group_values
from fedexp.analysis.layout import Section
from fedexp.analysis.measures import describe_machine, parts_of
from fedexp.analysis.naming import differing, displayed
from fedexp.analysis.significance import ABOUT, LEAST_SEEDS
from fedexp.core.console import plural
from fedexp.data.partitioned import format_range
from fedexp.rundir import files, origin
from fedexp.rundir.reader import RunDirectory

UNKNOWN = "not recorded"
GROUPS = ("forgetting_metric", "analysis")  # options that only measure
# prefixes of the keys of a section, which the section of equal settings does not repeat
DATA, PARTITION, MODEL = ("dataset.", "augment"), ("partition.", "num_clients"), ("model.",)
Facts = dict[str, str]


@dataclass(frozen=True)
class Described:
    """A run with what its files say about its origin."""

    run: RunDirectory

    @cached_property
    def origin(self) -> Mapping[str, Any]:
        """The content of origin.json, or {} for runs of fedexp 0.1."""
        return origin.read(self.run.directory) if self.run.has(origin.NAME) else {}

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values that the runs of a group share."""
        return group_values(self.run)

    @property
    def parts(self) -> Sequence[Mapping[str, Any]]:
        return self.origin.get("parts") or parts_of(self.run.summary)

    def chosen(self, prefixes: tuple[str, ...]) -> Facts:
        """Return the values whose keys begin with one of the prefixes."""
        found = {k: v for k, v in self.values.items() if k.startswith(prefixes)}
        return {code(key): text(value) for key, value in found.items()}


@dataclass(frozen=True)
class Group:
    """The runs of a setting and method, which differ only in their seeds."""

    setting: str  # as displayed; "" if there is only one
    method: str
    runs: Sequence[Described]

    @property
    def name(self) -> str:
        return f"{self.setting} {self.method}".strip()

    @property
    def values(self) -> dict[str, Any]:
        return self.runs[0].values


@dataclass(frozen=True)
class SharedFacts:
    """What several groups have in common, such as their data."""

    name: str
    facts: Facts
    runs: list[Described]


def describe_sweep(table: pd.DataFrame) -> list[Section]:
    """Return the sections of the appendix. table: the runs of the sweep, see `frame.tidy`."""
    settings, methods = (shorten(table[key]) for key in KEYS)
    groups = [
        Group(settings[str(setting)], methods[str(method)], list(map(Described, group["run"])))
        for (setting, method), group in table.groupby(KEYS, sort=False)
    ]
    sections = [
        compare_facts("Data", groups, "dataset", DATA, sizes_of_data),
        compare_facts("Clients and partition", groups, "partition", PARTITION, sizes_of_clients),
        compare_facts("Model", groups, "model", MODEL, sizes_of_model),
        differing_settings(groups),
        equal_settings(groups),
        seeds(groups),
        tests(groups),
        time(groups),
        software(groups),
        commands(groups),
        own_files(groups),
    ]
    return [section for section in sections if len(section.table)]


def code(key: str) -> str:
    return f"`{key}`"


def text(value: Any) -> str:
    """Return a value as in a yaml file, and one of an unknown key as `not recorded`."""
    return value if isinstance(value, str) else json.dumps(value)


def known(value: Any) -> str:
    return UNKNOWN if value is None else text(value)


def pairs(title: str, rows: Iterable[tuple[str, ...]], *heads: str, about: str = "") -> Section:
    """Return a section whose rows are tuples. heads: of the columns, the first one included."""
    found = list(rows)
    index = pd.Index([row[0] for row in found], dtype=object)
    frame = pd.DataFrame([row[1:] for row in found], index, columns=list(heads[1:]))
    return Section(title, frame, heads[0], about)


def compare_facts(
    title: str,
    groups: Sequence[Group],
    part: str,
    prefixes: tuple[str, ...],
    measured: Callable[[Sequence[Described]], Facts],
) -> Section:
    """Return a section with a column for each variant of a part of the runs.

    part: a key of the summary with the name of the option. prefixes: of the keys of its settings.
    measured: returns further facts of the runs with equal settings.
    """
    columns: list[SharedFacts] = []
    for group in groups:
        first = group.runs[0]
        name, facts = known(first.run.summary.get(part)), first.chosen(prefixes)
        same = next((each for each in columns if (each.name, each.facts) == (name, facts)), None)
        if same is None:
            columns.append(SharedFacts(name, facts, [*group.runs]))
        else:
            same.runs.extend(group.runs)
    every = [measured(column.runs) | column.facts for column in columns]
    keys = dict.fromkeys(key for facts in every for key in facts)
    rows = [(key, *(facts.get(key, "-") for facts in every)) for key in keys]
    return pairs(title, rows, "", *(head_of(column, columns) for column in columns))


def head_of(column: SharedFacts, columns: Sequence[SharedFacts]) -> str:
    """Return a column's name, with the settings in which columns of the same name differ."""
    same = [each.facts for each in columns if each.name == column.name]
    keys = dict.fromkeys(key for facts in same for key in facts)
    differ = [key for key in keys if len({facts.get(key) for facts in same}) > 1]
    return " ".join([column.name, *(f"{key}={column.facts.get(key, '-')}" for key in differ)])


def sizes_of_data(runs: Sequence[Described]) -> Facts:
    sizes = runs[0].run.summary.get("data") or {}
    names = {"classes": "classes", "training examples": "train"}
    names |= {f"{name} examples": name for name in ("validation", "test")}
    facts = {
        name: known(sizes.get(key, 0 if sizes and key == "validation" else None))
        for name, key in names.items()
    }
    facts["shape of an input"] = known(runs[0].origin.get("shape"))
    parts = [part for each in runs for part in each.parts]
    sums = {str(part["data"].get("arrays")) for part in parts if "data" in part}
    return facts | {"checksum": ", ".join(sorted(sums)) or UNKNOWN}


def sizes_of_clients(runs: Sequence[Described]) -> Facts:
    found = [each.run.partitions[0] for each in runs if each.run.has(files.PARTITION)]
    facts = dict.fromkeys(("examples of a client", "classes of a client", "divisions"), UNKNOWN)
    if found:
        facts["examples of a client"] = format_range(np.concatenate([each.sizes for each in found]))
        held = np.concatenate([(each.counts > 0).sum(1) for each in found])
        facts["classes of a client"] = format_range(held)
        facts["divisions"] = str(len({each.hash for each in found}))
    return facts


def sizes_of_model(runs: Sequence[Described]) -> Facts:
    counted = [each.origin.get("parameters") or {} for each in runs]
    names = {"parameters": "all", "trained parameters": "trained"}
    return {
        name: ", ".join(dict.fromkeys(known(each.get(key)) for each in counted))
        for name, key in names.items()
    }


def shorten(names: "pd.Series[str]") -> dict[str, str]:
    """Return the names of settings or methods as they are displayed, "" for a single one."""
    unique = list(names.unique())
    shown = displayed(differing(unique)) if len(unique) > 1 else [""]
    return dict(zip(unique, shown, strict=True))


def differing_settings(groups: Sequence[Group]) -> Section:
    """Return a row for each value of a setting that differs, with the groups that have it."""
    keys = sorted({key for group in groups for key in group.values})
    rows = []
    for key in keys:
        having: dict[str, list[Group]] = {}
        for group in groups:
            if key in group.values:
                having.setdefault(text(group.values[key]), []).append(group)
        whole = len(having) == 1 and sum(map(len, having.values())) == len(groups)
        if not whole:
            rows += [(code(key), value, members(of, groups)) for value, of in having.items()]
    about = "Settings that only some runs have, or in which they differ."
    return pairs("Settings that differ", rows, "setting", "value", "of", about=about)


def members(some: Sequence[Group], groups: Sequence[Group]) -> str:
    """Return the names of some groups: of whole methods or settings, if possible."""
    for key in ("method", "setting"):
        names = list(dict.fromkeys(getattr(group, key) for group in some))
        if "" not in names and sum(getattr(each, key) in names for each in groups) == len(some):
            return "; ".join(names)
    return "; ".join(group.name for group in some)


def equal_settings(groups: Sequence[Group]) -> Section:
    first = groups[0].values
    shown = (*DATA, *PARTITION, *MODEL)
    equal = {
        key: value
        for key, value in first.items()
        if not key.startswith(shown)
        and all(key in group.values and group.values[key] == value for group in groups)
    }
    about = "Options that later versions of fedexp have added are left out while they are off."
    rows = [(code(key), text(value)) for key, value in equal.items()]
    return pairs("Settings that are equal", rows, "setting", "value", about=about)


def seeds(groups: Sequence[Group]) -> Section:
    rows = []
    for group in groups:
        every = [seeds_of(each.run) for each in group.runs]
        equal = [dict.fromkeys(item.partition("=")[2] for item in each.split()) for each in every]
        short = ", ".join(next(iter(each)) for each in equal if each)
        plain = all(len(each) == 1 for each in equal)
        ended = [str(each.run.status) for each in group.runs]
        counts = ", ".join(f"{ended.count(word)} {word}" for word in dict.fromkeys(ended))
        shown = short if plain else "; ".join(each or UNKNOWN for each in every)
        rows.append((group.name, str(len(group.runs)), shown or UNKNOWN, counts))
    about = "A seed sets the partition, the sampling and the training, unless they are named."
    return pairs("Seeds", rows, "", "runs", "seeds", "status", about=about)


def tests(groups: Sequence[Group]) -> Section:
    """Return what was tested and how methods are compared."""

    def options(key: str) -> str:
        found = {
            text(names_of(each.run.config.get(key))) for group in groups for each in group.runs
        }
        return "; ".join(sorted(found - {"null"})) or UNKNOWN

    every = (view for group in groups for each in group.runs for view in each.run.views)
    rows = [("test sets", ", ".join(dict.fromkeys(every)) or UNKNOWN)]
    rows += [(code(key), options(key)) for key in ("evaluate", "eval_interval", *GROUPS)]
    size = max(len(group.runs) for group in groups)
    rows.append(("results", f"mean and standard deviation (n - 1) over {plural(size, 'seed')}"))
    if len(groups) > 1 and size > 1:
        rows.append(("comparison", ABOUT))
        rows.append(("least number of seeds for p = 0.05", str(LEAST_SEEDS)))
    return pairs("Tests", rows, "", "value")


def names_of(node: Any) -> Any:
    """Return the names of the options of a group, or any other value unchanged."""
    return list(node) if isinstance(node, Mapping) else node


def time(groups: Sequence[Group]) -> Section:
    """Return the hardware with the time that its runs took."""
    rows: dict[tuple[str, ...], list[float]] = {}
    used: dict[tuple[str, ...], set[Any]] = {}
    for each in itertools.chain.from_iterable(group.runs for group in groups):
        for part, seconds in zip(each.parts, seconds_of(each), strict=True):
            hardware = part.get("hardware") or {}
            name = describe_machine(hardware) if hardware else UNKNOWN
            about = known(hardware.get("engine")), known(hardware.get("workers"))
            key = (name, *about, known(hardware.get("threads")))
            rows.setdefault(key, []).append(seconds)
            used.setdefault(key, set()).add(each.run.directory)
    lines = []
    for machine, durations in rows.items():
        hours = float(np.sum(durations)) / 3600
        cores = np.nan if UNKNOWN in machine else hours * int(machine[2]) * int(machine[3])
        shown = [UNKNOWN if np.isnan(number) else f"{number:.2f}" for number in (hours, cores)]
        lines.append((*machine, str(len(used[machine])), *shown))
    heads = ("", "engine", "processes", "threads", "runs", "hours", "core hours")
    explained = (
        "Hours are the durations of all rounds. Core hours are hours, times processes, times"
        " threads of a process; on a GPU, a process has one GPU."
    )
    return pairs("Hardware and time", lines, *heads, about=explained)


def seconds_of(each: Described) -> list[float]:
    """Return the time of each part of a run in seconds; nan if it is unknown."""
    rounds, parts = each.run.rounds, each.parts
    if len(parts) == 1 or rounds is None or "seconds" not in rounds:
        whole = each.run.summary.get("seconds")
        return [np.nan if whole is None else float(whole) / len(parts)] * len(parts)
    ends = [*(int(part["first_round"]) for part in parts[1:]), np.inf]
    starts = [0, *ends[:-1]]
    spans = zip(starts, ends, strict=True)
    numbers = rounds["round"]
    return [float(rounds["seconds"][(numbers >= a) & (numbers < b)].sum()) for a, b in spans]


def software(groups: Sequence[Group]) -> Section:
    every = [part for group in groups for each in group.runs for part in each.parts]
    found: dict[str, dict[str, None]] = {}
    for part in every:
        facts = {**(part.get("versions") or {}), "commit of fedexp": part.get("commit")}
        facts["hash of the code"] = str(part.get("source") or UNKNOWN)[:12]
        for name, value in facts.items():
            found.setdefault(name, {})[known(value)] = None
    lists = {json.dumps(part.get("packages")) for part in every}
    many = "; ".join(plural(len(json.loads(each) or ()), "package") for each in sorted(lists))
    unknown = lists == {"null"} or not lists
    rows = [(name, ", ".join(values)) for name, values in found.items()]
    rows.append(("all packages", UNKNOWN if unknown else f"{many}, in `origin.json` of each run"))
    return pairs("Software", rows, "", "versions")


def commands(groups: Sequence[Group]) -> Section:
    """Return the commands that computed the runs, with PYTHONPATH if it was set."""
    found: dict[str, int] = {}
    for each in itertools.chain.from_iterable(group.runs for group in groups):
        for command in each.origin.get("commands") or [None]:
            line = UNKNOWN
            if command is not None:
                path = command["PYTHONPATH"]
                start = f"PYTHONPATH={shlex.quote(path)} " if path else ""
                line = start + shlex.join(command["argv"])
            found[line] = found.get(line, 0) + 1
    rows = [(line if line == UNKNOWN else code(line), str(n)) for line, n in found.items()]
    return pairs("Commands", rows, "command", "runs")


def own_files(groups: Sequence[Group]) -> Section:
    """Return the user's own files with the start of their hashes."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for group in groups:
        for part in (part for each in group.runs for part in each.parts):
            for name, content in part.get("own_files", {}).items():
                found.setdefault((code(name), content[:12]), {})[group.name] = None
    rows = [(*key, "; ".join(names)) for key, names in sorted(found.items())]
    about = f"Copies are in `{files.SOURCES}/` of each run."
    return pairs("Own files", rows, "file", "SHA-256", "of", about=about)
