"""Errors that a user can mend: shown as one message without a traceback, exit code 2."""

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A setting, file or option that fedexp cannot work with. `str(error)` is the whole message for the user."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """A hint ` (nearest: 'x')` for a misspelt name, or an empty string."""
    match = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f" (nearest: '{match[0]}')" if match else ""


def require(condition: bool, key: str, value: Any, allowed: str) -> None:
    """Raise ConfigError(`key=value: must be <allowed>`) unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}={value}: must be {allowed}")


def require_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError naming the allowed values and the nearest one unless `value` is one of `choices`."""
    choices = list(choices)
    require(value in choices, key, value, f"one of {', '.join(choices)}{nearest(str(value), choices)}")
