"""Views: the data that a model is evaluated on.

Two views consist of the test images (option `test_views`): `plain` leaves them unchanged, and
`augmented` applies the training transform to them. The third view is the validation set (options
`validation` and `evaluate_on`).

The results of each view have different columns, keys and file names. The plain view uses the
ordinary names. In the augmented view, `_augmented` is appended to each name. For the validation
set, columns and keys start with `validation_`, and file names end with `_validation`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedexp.core.errors import require, require_choice

PLAIN, AUGMENTED, VALIDATION = "plain", "augmented", "validation"
# the tables of each view, in addition to its columns of rounds.csv and tasks.csv
CLASSES = "class_accuracy.csv"
LOCAL = "local_class_accuracy.csv"
PERSONAL = "personal_class_accuracy.csv"
EXAMPLES = "example_correct.csv"
OWN = "own_accuracy.csv"
DOMAINS = "domain_accuracy.csv"
VIEW_TABLES = (CLASSES, LOCAL, PERSONAL, EXAMPLES, OWN, DOMAINS)
TEST_VIEWS = (PLAIN, AUGMENTED)
VIEWS = (*TEST_VIEWS, VALIDATION)
TEST, BOTH = "test", "both"


def suffix(view: str) -> str:
    """Return the suffix of a view's file names and W&B names. It is empty for the plain view."""
    return "" if view == PLAIN else f"_{view}"


def data_name(view: str) -> str:
    """Return the word for a view's data in titles: validation, or test."""
    return VALIDATION if view == VALIDATION else TEST


def name_in_view(name: str, view: str) -> str:
    """Return the name of a column or key in a view.

    For example, `test_accuracy` becomes `test_accuracy_augmented` or `validation_accuracy`.
    """
    return (
        f"{VALIDATION}_{name.removeprefix('test_')}"
        if view == VALIDATION
        else f"{name}{suffix(view)}"
    )


def rename_for_view(values: Mapping[str, Any], view: str) -> dict[str, Any]:
    """Return a copy of the values in which the keys are renamed for a view."""
    return {name_in_view(name, view): value for name, value in values.items()}


def file_in_view(name: str, view: str) -> str:
    """Return the name of a file in a view.

    For example, `class_accuracy.csv` becomes `class_accuracy_augmented.csv`.
    """
    path = Path(name)
    return str(path.with_name(f"{path.stem}{suffix(view)}{path.suffix}"))


def require_list(key: str, values: Sequence[str], choices: Sequence[str]) -> None:
    """Raise ConfigError unless all values are choices, none is repeated and choices[0] is first.

    key: name of the option, for messages.
    """
    for value in values:
        require_choice(key, value, choices)
    valid = list(values[:1]) == [choices[0]] and len(set(values)) == len(values)
    words = f"a list that starts with {choices[0]} and has no repetitions"
    require(valid, key, f"[{','.join(values)}]", words)


def evaluation_views(
    test_views: Sequence[str], evaluate_on: str | None, held_out: bool
) -> tuple[str, ...]:
    """Return the views in which a run is evaluated, starting with the test views.

    evaluate_on: test, validation or both. None: validation if there is a validation set, else test.
    A run with a validation set therefore uses the test data only on request.
    held_out: whether there is a validation set.
    """
    on = evaluate_on or (VALIDATION if held_out else TEST)
    if on == VALIDATION:
        return (VALIDATION,)
    return (*test_views, VALIDATION) if on == BOTH else tuple(test_views)


def configured_views(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the views in which a run with this plain configuration is evaluated.

    Configurations from before views were introduced use the plain view.
    """
    validation, dataset = (config.get(name) for name in ("validation", "dataset"))
    fraction = validation.get("fraction") if isinstance(validation, Mapping) else None
    splits = dataset.get("validation_splits") if isinstance(dataset, Mapping) else None
    held_out = bool(splits) or (isinstance(fraction, int | float) and fraction > 0)
    return evaluation_views(
        config.get("test_views") or (PLAIN,), config.get("evaluate_on"), held_out
    )


def selection_view(views: Sequence[str]) -> str:
    """Return the view whose accuracy determines the best round and whether a target is reached.

    This is the validation set if the run is evaluated on it, and otherwise the first view.
    """
    return VALIDATION if VALIDATION in views else views[0]
