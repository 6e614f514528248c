"""The data that a paper's experiment has, against those of a run: the same name may stand for other
data.

Each option of the group `experiment` states them under `expected`: labelled training and test
examples of the classes that are learned, in all tasks together, the number of these classes, and of
clients; null where it is not printed.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fedexp.config.options import conf_directory
from fedexp.core import yaml_files

WORDS = {
    "train": "training examples",
    "test": "test examples",
    "classes": "classes",
    "clients": "clients",
}
ROUNDING = 0.001  # of the expected number: a split by fractions may round elsewhere


def other_data(summary: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return how the data of a run differ from those of its experiment, such as `data: 10,000
    training examples, not 502,180`; [] where they do not, and for a summary from before it had
    these numbers."""
    given = dict(text.lstrip("+").partition("=")[::2] for text in overrides)
    found, wanted = summary.get("data") or {}, dict(expected(given.get("experiment", "")))
    if "num_clients" in given:
        wanted["clients"] = int(given["num_clients"])
    if found.get("clients") == 1:  # algorithm.paradigm=centralized
        wanted["clients"] = None
    both = [(word, found.get(name), wanted.get(name)) for name, word in WORDS.items()]
    return [
        f"data: {there:,} {word}, not {number:,}"
        for word, there, number in both
        if number is not None and there is not None and abs(there - number) > ROUNDING * number
    ]


@cache
def expected(experiment: str) -> dict[str, int | None]:
    """Return the numbers of an option of the group `experiment`; {} of another name."""
    path = conf_directory() / "experiment" / f"{experiment}.yaml"
    if not experiment or not path.is_file():
        return {}
    return yaml_files.load(path.read_text(encoding="utf-8")).get("expected") or {}
