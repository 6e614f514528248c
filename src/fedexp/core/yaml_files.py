"""Read and write yaml files as plain values."""

from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load(text: str) -> Any:
    """Parse a yaml text and return its plain values. Raises ValueError if it is not valid yaml."""
    try:
        return yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def dump(value: Any) -> str:
    """Return a value as a yaml text, with keys in their order."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
