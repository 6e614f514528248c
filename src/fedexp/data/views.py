"""Views, which are the sets that a model is tested on.

Views of the test images are `plain` and `augmented`, which applies the training transform
(`test_views`). The third view is the validation set (`validation`, `evaluate_on`).

The plain view has the columns, keys and files that every run has. The augmented view appends its
name to them. Columns and keys of the validation set begin with its name; its files end with it.
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
    """Return the suffix of a view's files and W&B names, which is empty for the plain view."""
    return "" if view == PLAIN else f"_{view}"


def name_in_view(name: str, view: str) -> str:
    """Return a column's or key's name in a view.

    Examples: test_accuracy, test_accuracy_augmented, validation_accuracy.
    """
    return (
        f"{VALIDATION}_{name.removeprefix('test_')}"
        if view == VALIDATION
        else f"{name}{suffix(view)}"
    )


def rename_for_view(values: Mapping[str, Any], view: str) -> dict[str, Any]:
    """Return the values with their keys changed to the view's names."""
    return {name_in_view(name, view): value for name, value in values.items()}


def file_in_view(name: str, view: str) -> str:
    """Return a view's file name: class_accuracy.csv becomes class_accuracy_augmented.csv."""
    path = Path(name)
    return str(path.with_name(f"{path.stem}{suffix(view)}{path.suffix}"))


def require_views(views: Sequence[str]) -> None:
    """Raise ConfigError unless the test views are known and different, and the first is plain."""
    require_list("test_views", views, TEST_VIEWS)


def require_list(key: str, values: Sequence[str], choices: Sequence[str]) -> None:
    """Raise ConfigError unless all values are allowed and different and start with choices[0]."""
    for value in values:
        require_choice(key, value, choices)
    valid = list(values[:1]) == [choices[0]] and len(set(values)) == len(values)
    words = f"a list that starts with {choices[0]}, without repetitions"
    require(valid, key, f"[{','.join(values)}]", words)


def extra_views(views: Iterable[str]) -> tuple[str, ...]:
    """Return all views except the plain view."""
    return tuple(view for view in views if view != PLAIN)


def evaluation_views(
    test_views: Sequence[str], evaluate_on: str | None, held_out: bool
) -> tuple[str, ...]:
    """Return the views in which a run is evaluated, the test views first.

    evaluate_on: if None, the validation set if there is one (held_out), and otherwise the test set,
    so that test data are used only on request.
    """
    on = evaluate_on or (VALIDATION if held_out else TEST)
    if on == VALIDATION:
        return (VALIDATION,)
    return (*test_views, VALIDATION) if on == BOTH else tuple(test_views)


def configured_views(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `evaluation_views` of a plain configuration.

    Configurations that are older than views are evaluated in the plain view.
    """
    validation = config.get("validation")
    fraction = validation.get("fraction") if isinstance(validation, Mapping) else None
    held_out = isinstance(fraction, int | float) and fraction > 0
    return evaluation_views(
        config.get("test_views") or (PLAIN,), config.get("evaluate_on"), held_out
    )


def selection_view(views: Sequence[str]) -> str:
    """Return the view whose accuracy decides the best round and whether a target is reached.

    This is the validation set if the run is evaluated on it.
    """
    return VALIDATION if VALIDATION in views else views[0]
