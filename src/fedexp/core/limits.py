"""Check the fields of a dataclass against limits in the fields' annotations.

For example, `rate: Positive` accepts positive numbers, and `variant: Literal["released", "paper"]`
accepts one of two words.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Container
from dataclasses import FrozenInstanceError, dataclass, fields
from difflib import get_close_matches
from functools import wraps
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform, get_args, get_origin
from weakref import WeakSet

from fedexp.core.errors import ConfigError, require, require_choice

CORRECT: WeakSet[type] = WeakSet()  # classes whose names were checked


@dataclass(frozen=True)
class Limit:
    """A condition that a value must fulfil, and a description of it for messages."""

    words: str
    holds: Callable[[Any], bool]


NonNegative = Annotated[float, Limit("finite and at least 0", lambda value: 0 <= value < math.inf)]
NonNegativeOrNone = NonNegative | None
Positive = Annotated[float, Limit("finite and greater than 0", lambda value: 0 < value < math.inf)]
PositiveOrNone = Positive | None
Share = Annotated[float, Limit("from 0 to 1", lambda value: 0 <= value <= 1)]
PositiveShare = Annotated[float, Limit("greater than 0 and at most 1", lambda v: 0 < v <= 1)]
PositiveShares = Annotated[
    list[float],
    Limit("a list of numbers greater than 0 and at most 1", lambda v: all(0 < x <= 1 for x in v)),
]
OpenShare = Annotated[float, Limit("greater than 0 and less than 1", lambda v: 0 < v < 1)]
ShareBelow1 = Annotated[float, Limit("at least 0 and less than 1", lambda v: 0 <= v < 1)]
ShareBelow1OrNone = ShareBelow1 | None
Count = Annotated[int, Limit("at least 1", lambda value: value >= 1)]
CountFrom0 = Annotated[int, Limit("at least 0", lambda value: value >= 0)]
CountOrNone = Count | None
Name = Annotated[str, Limit("a non-empty name", bool)]
Seed32 = Annotated[int, Limit(f"from 0 to {2**32 - 1}", lambda value: 0 <= value < 2**32)]
Labels = Annotated[
    list[int], Limit("a non-empty list of distinct labels", lambda v: len(set(v)) == len(v) > 0)
]
Counts = Annotated[
    tuple[int, ...],
    Limit("a non-empty list of positive integers", lambda v: len(v) > 0 and min(v) > 0),
]


# dotted key -> the value that keeps the earlier behaviour, for options that every run has had only
# since a later version. The classes that give a prefix declare them (see fedexp.rundir.identity).
NEUTRAL: dict[str, Any] = {}


def check_limits(owner: Any, prefix: str, top: Container[str] = ()) -> None:
    """Raise ConfigError unless every field of a dataclass has a value that its annotation allows.

    prefix: the text before the names of the fields in messages. top: the fields that get no prefix,
    since they are on the top level of the configuration.
    """
    for field in fields(owner):
        value = getattr(owner, field.name)
        key = field.name if field.name in top else prefix + field.name
        kind, optional = without_none(field.type)
        if optional and value is None:
            continue
        if get_origin(kind) is Literal and value not in get_args(kind):
            require_choice(key, value, filter(None, get_args(kind)))
        for limit in getattr(kind, "__metadata__", ()):
            shown = list(value) if isinstance(value, tuple) else value
            words = f"{limit.words}, or null" if optional else limit.words
            require(limit.holds(value), key, shown, words)


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Return (T, True) for the annotation `T | None`, and (annotation, False) for any other."""
    kinds = get_args(annotation)
    if len(kinds) == 2 and NoneType in kinds:
        return kinds[kinds[0] is NoneType], True
    return annotation, False


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Checked:
    """A base class whose subclasses are frozen dataclasses with keyword-only, checked fields.

    The limits of the fields, and the names of hooks, are checked when an object is created. prefix:
    the text before the names of the fields in messages.
    """

    prefix: ClassVar[str] = ""
    top: ClassVar[Container[str]] = ()  # fields that are on the top level of the configuration
    version: ClassVar[int] = 1  # raise it with a correction that changes the numbers of a class

    def __init_subclass__(cls, prefix: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if prefix is not None:
            cls.prefix = prefix
        if own := vars(cls).get("__post_init__"):
            cls.__post_init__ = with_limits(own)  # type: ignore[assignment, method-assign]
        dataclass(frozen=True, kw_only=True)(cls)
        if prefix is not None:
            for each in fields(cls):  # type: ignore[arg-type]
                if "neutral" in each.metadata:
                    NEUTRAL[prefix + each.name] = each.metadata["neutral"]
        # Subclasses inherit these methods. A class that defines them cannot be decorated again.
        del cls.__setattr__, cls.__delattr__

    def __post_init__(self) -> None:
        require_known_names(type(self))
        check_limits(self, self.prefix, self.top)

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


def with_limits(own: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a class's `__post_init__` that also checks what `Checked` does, without `super()`."""

    @wraps(own)
    def check(self: Any) -> None:
        require_known_names(type(self))
        own(self)
        check_limits(self, self.prefix, self.top)

    return check


def require_known_names(cls: type) -> None:
    """Raise ConfigError for a hook or attribute of a class or its bases that would be ignored.

    Its name is misspelt, or is that of an earlier version (`_replaced` of a base class). Classes
    are checked when they are used, because a module may have others that are not finished.
    """
    if cls in CORRECT:
        return
    for each in cls.__mro__:
        require_own_names(each)
    CORRECT.add(cls)


def require_own_names(cls: type) -> None:
    """Check the names that a class itself defines, see `require_known_names`."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base) if name[0] != "_"}
    own = vars(cls).keys()
    fields = vars(cls).get("__annotations__", {})
    replaced = ChainMap(*(vars(base).get("_replaced", {}) for base in cls.__mro__))
    for name in sorted(own - inherited - fields.keys()):
        if name in replaced:
            raise ConfigError(
                f"{cls.__name__}.{name}: is not used by fedexp any more; use {replaced[name]}"
            )
        if name[0] != "_" and (meant := meant_by(name, inherited - own)):
            raise ConfigError(
                f"{cls.__name__}.{name}: is not used by fedexp (nearest: '{meant}'); correct the"
                " name, or begin it with an underscore"
            )


def meant_by(name: str, known: Collection[str]) -> str | None:
    """Return the known name that a name misspells, or None."""
    swapped = [each for each in known if sorted(each) == sorted(name)]  # such as `strat`
    return next(iter(swapped or get_close_matches(name, known, 1, 0.85)), None)


def without_limits(annotation: Any) -> Any:
    """Return the annotation's type without its limits."""
    kind, optional = without_none(annotation)
    if optional:
        return without_limits(kind) | None
    if get_origin(annotation) is Literal:
        return str | None if None in get_args(annotation) else str
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
