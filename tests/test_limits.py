"""Limits of a dataclass's fields in their annotations."""

import math
from dataclasses import dataclass, field
from typing import Literal

import pytest

from fedexp.core import limits
from fedexp.core.errors import ConfigError


@dataclass(frozen=True)
class Limited:
    """A field of every type of fedexp.core.limits, and a choice."""

    weight: limits.NonNegative = 0.0
    rate: limits.Positive = 1e-9
    share: limits.Share = 1.0
    part: limits.PositiveShare = 1.0
    validation: limits.OpenShare = 0.5
    momentum: limits.ShareBelow1 = 0.0
    steps: limits.Count = 1
    warmup: limits.CountFrom0 = 0
    minutes: limits.PositiveOrNone = None
    patience: limits.CountOrNone = None
    targets: limits.PositiveShares = field(default_factory=lambda: [1.0])
    channels: limits.Counts = (1,)
    variant: Literal["paper", "released"] = "paper"


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("weight", [-1e-9, math.inf, math.nan], "finite and at least 0"),
        ("rate", [0.0, math.inf, math.nan], "finite and greater than 0"),
        ("share", [-0.1, 1.1, math.nan], "from 0 to 1"),
        ("part", [0.0, 1.1], "greater than 0 and at most 1"),
        ("validation", [0.0, 1.0], "greater than 0 and less than 1"),
        ("momentum", [-0.1, 1.0], "at least 0 and less than 1"),
        ("steps", [0], "at least 1"),
        ("warmup", [-1], "at least 0"),
        ("minutes", [0.0, math.inf, math.nan], "finite and greater than 0, or null"),
        ("patience", [0], "at least 1, or null"),
        ("targets", [[0.5, 0.0], [1.1]], "a list of numbers greater than 0 and at most 1"),
        ("channels", [(), (1, 0)], "a non-empty list of positive integers"),
        ("variant", ["papers"], "one of paper, released (nearest: 'paper')"),
    ],
)
def test_annotations_limit_the_fields_of_a_dataclass(name, values, words):
    limits.check_limits(Limited(), "local.")
    limits.check_limits(Limited(minutes=1e-9, patience=1), "local.")
    for value in values:
        with pytest.raises(ConfigError) as error:
            limits.check_limits(Limited(**{name: value}), "local.")
        shown = list(value) if isinstance(value, tuple) else value
        assert str(error.value) == f"local.{name}={shown}: must be {words}"


def test_own_checks_do_not_replace_the_limits():
    """A class may define `__post_init__` without calling that of its base."""

    class Own(limits.Checked, prefix="own."):
        share: limits.Share
        most: float

        def __post_init__(self) -> None:
            if self.share > self.most:
                raise ConfigError("own.share: must be at most own.most")

    class Derived(Own):
        pass

    for kind in (Own, Derived):
        assert kind(share=0.5, most=0.5).share == 0.5
        with pytest.raises(ConfigError, match=r"^own\.share=7\.0: must be from 0 to 1$"):
            kind(share=7.0, most=9.0)
        with pytest.raises(ConfigError, match=r"at most own\.most"):
            kind(share=0.5, most=0.25)
