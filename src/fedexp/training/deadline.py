"""Until when a job may work, where the command has a budget of time."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedexp.core.errors import BudgetSpent

VARIABLE = "FEDEXP_DEADLINE"  # key of hydra.job.env_set: seconds since the epoch


@dataclass(frozen=True)
class Deadline:
    """The moment by which a job has saved its state and ended."""

    # seconds since the epoch: the clocks of all machines of a sweep must agree
    at: float = math.inf

    def check(self, seconds: float = 0.0) -> None:
        """Raise BudgetSpent unless what takes so many seconds is over before the deadline."""
        if time.time() + seconds >= self.at:
            raise BudgetSpent


def deadline_of(hydra_config: Any) -> Deadline:
    """Return the deadline of a job, as its overrides have brought it along."""
    given: Mapping[str, Any] = hydra_config.job.get("env_set") or {}
    return Deadline(float(given[VARIABLE])) if VARIABLE in given else Deadline()
