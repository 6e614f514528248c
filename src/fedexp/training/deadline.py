"""Until when a job may work, where the command has a budget of time."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedexp.core.errors import BudgetSpent

# key of hydra.job.env_set: `<seconds since the epoch> <seconds to the first checkpoint>`
VARIABLE = "FEDEXP_DEADLINE"


@dataclass(frozen=True)
class Deadline:
    """The moment by which a job has saved its state and ended."""

    # seconds since the epoch: the clocks of all machines of a sweep must agree
    at: float = math.inf
    # seconds that the job takes to its first checkpoint, as far as that is known
    needed: float = 0.0

    def check(self, seconds: float) -> None:
        """Raise BudgetSpent unless what takes so many seconds is over before the deadline."""
        if time.time() + seconds >= self.at:
            raise BudgetSpent

    def check_start(self) -> None:
        """Raise BudgetSpent where the job could not save a round before the deadline."""
        self.check(self.needed)


def deadline_of(hydra_config: Any) -> Deadline:
    """Return the deadline of a job, as its overrides have brought it along."""
    given: Mapping[str, Any] = hydra_config.job.get("env_set") or {}
    if VARIABLE not in given:
        return Deadline()
    at, needed = map(float, str(given[VARIABLE]).split())
    return Deadline(at, needed)
