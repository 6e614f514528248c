"""Check your own part, in a pytest test or interactively. The checks take a few seconds.

from fedexp.testing import check

check(Smoothed(smoothing=0.1), zero=Smoothed(smoothing=0.0))
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedexp.algorithms.base import FedAvg
from fedexp.config.build import build
from fedexp.config.composition import composed, without_hydra
from fedexp.config.overrides import key_of
from fedexp.data.partition import Partitioner
from fedexp.data.types import DataSource
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.models import Model
from fedexp.testing.algorithm import check_algorithm
from fedexp.testing.callback import check_callback
from fedexp.testing.dataset import check_dataset
from fedexp.testing.federation import (
    ENGINES,
    PROCESS,
    as_assertion,
    assemble,
    assert_engines_agree,
    assert_equal,
    gradient_of,
    play,
    record,
    set_up_client,
    train,
)
from fedexp.testing.metric import check_metric
from fedexp.testing.model import check_model
from fedexp.testing.partition import check_partition
from fedexp.trackers.base import CallbackConfig

__all__ = [
    "ENGINES",
    "PROCESS",
    "assemble",
    "assert_engines_agree",
    "assert_equal",
    "check",
    "gradient_of",
    "play",
    "record",
    "set_up_client",
    "train",
]
CHECKS: dict[type, Callable[..., None]] = {
    FedAvg: check_algorithm,
    ForgettingMetric: check_metric,
    Partitioner: check_partition,
    CallbackConfig: check_callback,
    Model: check_model,
    DataSource: check_dataset,
}


@as_assertion()
def check(
    part: Any, config_dir: Path | None = None, overrides: Sequence[str] = (), **options: Any
) -> None:
    """Check a part: an algorithm, metric, partition, callback, tracker, analysis, model or data
    set.

    part: an object of the class that the yaml file names, or the class if all its fields have
        defaults, or an option, such as "dataset=mine".
    config_dir: the directory with the yaml file of the option.
    overrides: changes to the small federation on which parts are checked, and to the option, such
        as ["public.fraction=0.3"].
    options: what the check of this kind of part needs to know, see `check_algorithm`,
        `check_metric`, `check_partition`, `check_callback`, `check_model` and `check_dataset`.

    Raises AssertionError with a message that says what is wrong, where, and what would be right.
    """
    if isinstance(part, str):
        own = f"{part.partition('=')[0]}."
        part = select(part, config_dir, overrides)
        shared = [text for text in overrides if not key_of(text).startswith(own)]
        overrides = () if isinstance(part, DataSource) else shared
    part = part() if isinstance(part, type) else part
    options |= {"overrides": overrides} if overrides else {}
    for base, function in CHECKS.items():
        if isinstance(part, base):
            return function(part, **options)
    known = ", ".join(f"{base.__module__}.{base.__name__}" for base in CHECKS)
    raise TypeError(f"{part!r}: must inherit from one of {known}")


def select(option: str, config_dir: Path | None, overrides: Sequence[str]) -> Any:
    """Return the part that an option, such as `dataset=mine`, selects."""
    with composed([option, *overrides], None if config_dir is None else Path(config_dir)) as found:
        part = getattr(build(without_hydra(found)), option.partition("=")[0])
    return part[0] if isinstance(part, list) else part
