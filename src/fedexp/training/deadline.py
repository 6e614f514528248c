"""Until when a job may work, where the command has a budget of time."""

import math
import time
from dataclasses import dataclass

from fedexp.core.errors import BudgetSpent


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
