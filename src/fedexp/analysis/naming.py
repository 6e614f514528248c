"""Name runs in tables, figures and pages by the settings and methods in which the runs differ."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

from fedexp.config.options import conf_directories

# Prefixes of overrides that only say where a run is computed. They do not include
# hardware.precision, which changes results.
HARDWARE = tuple(
    f"hardware{rest}"
    for rest in ("=", ".device", ".engine", ".threads", ".workers", ".chunk", ".jobs")
)
# Prefixes of overrides that do not appear in names.
UNNAMED = (
    *(
        "seed",
        "resume",
        "tracker",
        "hydra",
        "data_dir",
        "checkpoint_interval",
        *HARDWARE,
    ),
    *("figures", "objective", "test_views", "evaluate", "forgetting_metric", "analysis"),
    *("keep_models", "keep_local_models"),
)
NAMED_GROUPS = (
    "experiment=",
    "dataset=",
    "partition=",
    "algorithm=",
)  # groups that appear in every name
# Keys of the data. If all runs have the same algorithm, these keys define settings, and all other
# keys define methods.
DATA = ("dataset", "scenario", "partition", "alpha", "shards_per_client", "num_clients")
LONG = re.compile(r"\d*\.\d{4,}(e[+-]?\d+)?")


class RunLike(Protocol):
    """The attributes of a run that its name is derived from."""

    @property
    def overrides(self) -> Sequence[str]: ...

    @property
    def summary(self) -> Mapping[str, Any]: ...


Run = TypeVar("Run", bound=RunLike)


def named_overrides(run: RunLike) -> list[str]:
    """Return the overrides of a run that may appear in its name."""
    return [text.lstrip("+") for text in run.overrides if not text.startswith(UNNAMED)]


def shared_overrides(runs: Iterable[RunLike]) -> set[str]:
    """Return the overrides that all runs share."""
    every = [set(named_overrides(run)) for run in runs]
    return set.intersection(*every) if every else set()


def summary_and_options(run: RunLike) -> Mapping[str, Any]:
    """Return one mapping with the run's summary and the selected option of each group.

    Options are also included for a run that has not ended.
    """
    return {**(getattr(run, "config", {}).get("choices") or {}), **run.summary}


def names(
    runs: Sequence[RunLike], without: str = "", of_data: bool = False
) -> list[tuple[str, str]]:
    """Return the (setting, method) of each run.

    Options of the data belong to the setting, and options of the algorithm belong to the method.
    Other options in which the runs differ belong to the setting if the runs have several
    algorithms, and to the method if all runs have the same algorithm.

    without: a key to leave out of the names. of_data: whether these other options always belong to
    the method, as in tables.
    """
    shared = shared_overrides(runs)
    of_data = of_data or len({summary_and_options(run).get("algorithm") for run in runs}) == 1
    found = []
    for run in runs:
        options = summary_and_options(run)
        texts = [text for text in named_overrides(run) if text.partition("=")[0] != without]
        experiments = [text.partition("=")[2] for text in texts if text.startswith("experiment=")]
        data = [f"{options.get('dataset')} {options.get('partition')}", *experiments][-1]
        setting, method = [], []
        for text in texts:
            if text in shared or text.startswith(NAMED_GROUPS):
                continue
            is_data = not of_data or text.partition("=")[0] in DATA
            if text.startswith("algorithm.") or not is_data:
                method.append(text.removeprefix("algorithm."))
            else:
                setting.append(text)
        # Sort the parts, so that names do not depend on the order of overrides in the command.
        algorithm = str(options.get("algorithm"))
        found.append((" ".join([data, *sorted(setting)]), " ".join([algorithm, *sorted(method)])))
    return found


def grouped(
    runs: Sequence[Run], without: str = "", of_data: bool = False
) -> dict[str, dict[str, list[Run]]]:
    """Return a dict that maps each setting to a dict from methods to their runs.

    See `names` for the arguments.
    """
    found: dict[str, dict[str, list[Run]]] = {}
    for run, (setting, method) in zip(runs, names(runs, without, of_data), strict=True):
        found.setdefault(setting, {}).setdefault(method, []).append(run)
    return found


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


def rounded(text: str, digits: int) -> str:
    return LONG.sub(lambda found: f"{float(found[0]):.{digits}g}", text)


def ordered(labels: Iterable[str]) -> list[str]:
    """Sort labels alphabetically, comparing the numbers in them by value."""
    return sorted(labels, key=natural_key)


def natural_key(text: str) -> list[tuple[float, str]]:
    """Return a sort key that compares numbers by value and puts them before words."""
    pieces = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(piece), "") if i % 2 else (math.inf, piece) for i, piece in enumerate(pieces)]
