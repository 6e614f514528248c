"""Limits of the fields of a dataclass, stated by their annotations: `rate: Positive` for a number,
`variant: Literal["released", "paper"]` for a choice."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform, get_args, get_origin

from fedexp.core.errors import require, require_choice


@dataclass(frozen=True)
class Limit:
    """A condition on a value, and its words in a message."""

    words: str
    holds: Callable[[Any], bool]


NonNegative = Annotated[float, Limit("finite and at least 0", lambda value: 0 <= value < math.inf)]
Positive = Annotated[float, Limit("finite and greater than 0", lambda value: 0 < value < math.inf)]
PositiveOrNone = Annotated[
    float | None, Limit("greater than 0, or null", lambda v: v is None or 0 < v < math.inf)
]
Share = Annotated[float, Limit("from 0 to 1", lambda value: 0 <= value <= 1)]
PositiveShare = Annotated[float, Limit("greater than 0 and at most 1", lambda v: 0 < v <= 1)]
PositiveShares = Annotated[
    list[float],
    Limit("a list of numbers greater than 0 and at most 1", lambda v: all(0 < x <= 1 for x in v)),
]
OpenShare = Annotated[float, Limit("greater than 0 and less than 1", lambda v: 0 < v < 1)]
ShareBelow1 = Annotated[float, Limit("at least 0 and less than 1", lambda v: 0 <= v < 1)]
ShareBelow1OrNone = Annotated[
    float | None, Limit("at least 0 and less than 1, or null", lambda v: v is None or 0 <= v < 1)
]
Count = Annotated[int, Limit("at least 1", lambda value: value >= 1)]
CountFrom0 = Annotated[int, Limit("at least 0", lambda value: value >= 0)]
CountOrNone = Annotated[int | None, Limit("at least 1, or null", lambda v: v is None or v >= 1)]
Name = Annotated[str, Limit("a name", bool)]
Counts = Annotated[
    tuple[int, ...],
    Limit("a non-empty list of positive integers", lambda v: len(v) > 0 and min(v) > 0),
]


def check_limits(owner: Any, prefix: str) -> None:
    """Raise ConfigError unless every field of a dataclass is what its annotation allows."""
    for field in fields(owner):
        key, value = prefix + field.name, getattr(owner, field.name)
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            require_choice(key, value, filter(None, get_args(field.type)))
        for limit in getattr(field.type, "__metadata__", ()):
            shown = list(value) if isinstance(value, tuple) else value
            require(limit.holds(value), key, shown, limit.words)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Checked:
    """Makes every subclass a dataclass, frozen and with keyword-only fields; their limits are
    checked when an object is made. prefix: of the fields' names in messages."""

    prefix: ClassVar[str] = ""

    def __init_subclass__(cls, prefix: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if prefix is not None:
            cls.prefix = prefix
        dataclass(frozen=True, kw_only=True)(cls)
        # Those of this class serve; without their own, subclasses may be decorated once more.
        del cls.__setattr__, cls.__delattr__

    def __post_init__(self) -> None:
        check_limits(self, self.prefix)

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


def without_limits(annotation: Any) -> Any:
    """Return the plain type behind an annotation."""
    if get_origin(annotation) is Literal:
        return str | None if None in get_args(annotation) else str
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
