"""Find the options in which runs differ, by comparing their configurations."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedexp.rundir.identity import flatten, is_free


def varying_options(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a dict for each run that maps the options that differ between runs to their values.

    A group is listed by its name (`algorithm`), and any other option by its dotted key. Three kinds
    of options are left out: options that do not affect results, keys whose values follow from the
    selected option of their group, and options that equal another option in every run (such as
    `partition.alpha` and `alpha`).

    A value is None if the run does not have the option or has no configuration. Lists are returned
    as tuples.
    """
    flat = [flat_options(config) for config in configs]
    groups = list(dict.fromkeys(key for config in configs for key in config.get("choices") or {}))
    keys = list(dict.fromkeys(key for options in flat for key in options))
    chosen = [key for key in keys if differs(key, [options for options in flat if options], groups)]
    columns: dict[str, list[Any]] = {}
    for key in sorted(chosen, key=lambda key: (key not in groups, "." in key, keys.index(key))):
        column = [options.get(key) for options in flat]
        if not ("." in key and column in columns.values()):
            columns[key] = column
    return [{key: column[i] for key, column in columns.items()} for i in range(len(configs))]


def flat_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's chosen options by group, and its values by dotted key.

    The group `tuned` is left out, since its option follows from the data set and the algorithm.
    """
    choices = dict(config.get("choices") or {})
    values = flatten({key: value for key, value in config.items() if key != "choices"})
    kept = {
        key: hashable(value)
        for key, value in values.items()
        if not is_free(key) and not key.endswith("_target_") and key not in choices
    }
    chosen = {key: value for key, value in choices.items() if key != "tuned" and not is_free(key)}
    return chosen | kept


def hashable(value: Any) -> Any:
    """Convert a list, and every list in it, to a tuple."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def differs(key: str, flat: Sequence[Mapping[str, Any]], groups: Sequence[str]) -> bool:
    """Return whether the runs differ in an option.

    Options within a group are only compared between runs that have the same option of that group.
    """
    group = key.partition(".")[0]
    if "." not in key or group not in groups:
        return len({options.get(key) for options in flat}) > 1
    by_choice: dict[Any, set[Any]] = {}
    for options in flat:
        by_choice.setdefault(options.get(group), set()).add(options.get(key))
    return any(len(values) > 1 for values in by_choice.values())
