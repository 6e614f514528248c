"""Views of the test images for a model: plain, or through the transform of the training images (`test_views`).

The first view has the columns, keys and files that every run has; those of another view have its name at their end.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedexp.core.errors import require, require_choice

PLAIN, AUGMENTED = "plain", "augmented"
VIEWS = (PLAIN, AUGMENTED)


def suffix(view: str) -> str:
    """Return what stands at the end of a column or key of a view: nothing for the plain one."""
    return "" if view == PLAIN else f"_{view}"


def suffixed(values: Mapping[str, Any], view: str) -> dict[str, Any]:
    """Return the values under the names that they have in a view."""
    return {f"{name}{suffix(view)}": value for name, value in values.items()}


def file_of(name: str, view: str) -> str:
    """Return the name of a file of a view: class_accuracy.csv becomes class_accuracy_augmented.csv."""
    path = Path(name)
    return str(path.with_name(f"{path.stem}{suffix(view)}{path.suffix}"))


def require_views(views: Sequence[str]) -> None:
    """Raise ConfigError unless the views are known and different, and the plain one is the first."""
    require_list("test_views", views, VIEWS, "view ")


def require_list(key: str, values: Sequence[str], choices: Sequence[str], noun: str = "") -> None:
    """Raise ConfigError unless the values of a list are among the choices and different, with the first choice first.

    noun: what a value is called in messages, with a space."""
    for value in values:
        require_choice(key, value, choices)
    named = f"[{','.join(values)}]"
    require(list(values[:1]) == [choices[0]], key, named, f"a list whose first {noun}is {choices[0]}")
    require(len(set(values)) == len(values), key, named, f"a list in which no {noun or 'name '}stands twice")


def others(views: Iterable[str]) -> tuple[str, ...]:
    """Return the views beside the plain one."""
    return tuple(view for view in views if view != PLAIN)
