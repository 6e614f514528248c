"""The options in which runs differ, found in their configurations."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedexp.rundir.fingerprint import flatten, is_free, numbered


def varying_options(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each run, option -> value of the options that not all runs share: groups by their
    name (`algorithm`), others by their dotted key.

    Left out are options that do not decide a result, those within a group that follow from which
    option of it was chosen, and those that are everywhere equal to another one (`partition.alpha`
    to `alpha`). A value that a run lacks is None, as are all of a run without a configuration; a
    list is a tuple.
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
    """Return the options of a configuration by their dotted keys, those of the groups by the
    groups' names."""
    choices = dict(config.get("choices") or {})
    values = flatten(numbered({key: value for key, value in config.items() if key != "choices"}))
    kept = {
        key: hashable(value)
        for key, value in values.items()
        if not is_free(key) and not key.endswith("_target_") and key not in choices
    }
    return {key: value for key, value in choices.items() if not is_free(key)} | kept


def hashable(value: Any) -> Any:
    """Return a list, and every list in it, as a tuple."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def differs(key: str, flat: Sequence[Mapping[str, Any]], groups: Sequence[str]) -> bool:
    """Return whether runs differ in an option: of one within a group, runs with the same choice of
    that group."""
    group = key.partition(".")[0]
    if "." not in key or group not in groups:
        return len({options.get(key) for options in flat}) > 1
    by_choice: dict[Any, set[Any]] = {}
    for options in flat:
        by_choice.setdefault(options.get(group), set()).add(options.get(key))
    return any(len(values) > 1 for values in by_choice.values())
