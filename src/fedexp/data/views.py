"""Views of what a model is tested on: test images, plain or through the transform of training
(`test_views`), and the validation set (`validation`, `evaluate_on`).

The first view of the test images has the columns, keys and files that every run has; those of the
augmented one have its name at their end. Columns and keys of the validation set begin with its
name, its files end with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedexp.core.errors import require, require_choice

PLAIN, AUGMENTED, VALIDATION = "plain", "augmented", "validation"
TEST_VIEWS = (PLAIN, AUGMENTED)
VIEWS = (*TEST_VIEWS, VALIDATION)
TEST, BOTH = "test", "both"
EVALUATE_ON = (TEST, VALIDATION, BOTH)


def suffix(view: str) -> str:
    """Return what stands at the end of a file, or of a name in W&B, of a view: nothing for the
    plain one."""
    return "" if view == PLAIN else f"_{view}"


def named(name: str, view: str) -> str:
    """Return the name that a column or key has in a view: test_accuracy, test_accuracy_augmented or
    validation_accuracy."""
    return (
        f"{VALIDATION}_{name.removeprefix('test_')}"
        if view == VALIDATION
        else f"{name}{suffix(view)}"
    )


def all_named(values: Mapping[str, Any], view: str) -> dict[str, Any]:
    """Return the values under the names that they have in a view."""
    return {named(name, view): value for name, value in values.items()}


def file_of(name: str, view: str) -> str:
    """Return the name of a file of a view: class_accuracy.csv becomes
    class_accuracy_augmented.csv."""
    path = Path(name)
    return str(path.with_name(f"{path.stem}{suffix(view)}{path.suffix}"))


def require_views(views: Sequence[str]) -> None:
    """Raise ConfigError unless the test views are known and different, and the plain one is the
    first."""
    require_list("test_views", views, TEST_VIEWS, "view ")


def require_list(key: str, values: Sequence[str], choices: Sequence[str], noun: str = "") -> None:
    """Raise ConfigError unless the values of a list are among the choices and different, with the
    first choice first.

    noun: what a value is called in messages, with a space."""
    for value in values:
        require_choice(key, value, choices)
    named = f"[{','.join(values)}]"
    require(
        list(values[:1]) == [choices[0]], key, named, f"a list whose first {noun}is {choices[0]}"
    )
    require(
        len(set(values)) == len(values),
        key,
        named,
        f"a list in which no {noun or 'name '}stands twice",
    )


def others(views: Iterable[str]) -> tuple[str, ...]:
    """Return the views beside the plain one."""
    return tuple(view for view in views if view != PLAIN)


def evaluated(
    test_views: Sequence[str], evaluate_on: str | None, held_out: bool
) -> tuple[str, ...]:
    """Return the views in which a run is evaluated, the test views first.

    evaluate_on: None is the validation set where there is one (held_out), else the test set: test
    data are never used unasked."""
    on = evaluate_on or (VALIDATION if held_out else TEST)
    return (*(() if on == VALIDATION else test_views), *(() if on == TEST else (VALIDATION,)))


def views_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `evaluated` of a configuration as plain values; one from before there were any views
    has the plain one."""
    validation = config.get("validation")
    fraction = validation.get("fraction") if isinstance(validation, Mapping) else None
    held_out = isinstance(fraction, int | float) and fraction > 0
    return evaluated(config.get("test_views") or (PLAIN,), config.get("evaluate_on"), held_out)


def choosing(views: Sequence[str]) -> str:
    """Return the view whose accuracy chooses the best round and says when a target is reached: the
    validation set where a run is evaluated on it."""
    return VALIDATION if VALIDATION in views else views[0]
