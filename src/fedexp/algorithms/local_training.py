"""Local training of a client (config node `local`)."""

import math
from typing import Literal, get_args

from fedexp.core.errors import require
from fedexp.core.limits import (
    Checked,
    Count,
    CountFrom0,
    NonNegative,
    Positive,
    PositiveShare,
    ShareBelow1,
)

Optimizer = Literal["sgd", "nesterov", "adam", "adamw", "adamax", "adagrad", "rmsprop", "adadelta"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
# of the clients' learning rate, from round to round
LrSchedule = Literal["exponential", "constant", "step", "cosine"]
# those in which the rate of a round depends on the number of all rounds
SCHEDULES_OVER_ALL_ROUNDS = ("cosine",)


class LocalTraining(Checked, prefix="local."):
    """Local training of a client in a round: `epochs` over its own examples (config node
    `local`)."""

    epochs: Count
    batch_size: Count
    optimizer: Optimizer
    lr: Positive
    lr_decay: PositiveShare  # 1: constant
    momentum: ShareBelow1
    weight_decay: NonNegative
    schedule: LrSchedule = "exponential"
    step_rounds: Count = 10  # of schedule=step: rounds between two decays
    lr_min: NonNegative = 0.0  # of schedule=cosine: where it would end after the last round
    warmup: CountFrom0 = 0  # rounds of a linear rise before the schedule begins

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = "greater than 0 with local.optimizer=nesterov"
        good = self.optimizer != "nesterov" or self.momentum > 0
        require(good, "local.momentum", self.momentum, wanted)
        good = not 0 < self.lr < self.lr_min  # of a wrong lr it has been said
        require(good, "local.lr_min", self.lr_min, f"at most local.lr={self.lr}")

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        """Return the learning rate of round 1, 2, ... (of a task), which is constant within a
        round.

        rounds: all rounds (of a task), which schedule=cosine needs. With t rounds since the warm-up
        of w rounds: exponential lr * lr_decay^t (FedNTD B.3), step lr * lr_decay^floor(t /
        step_rounds), cosine lr_min + (lr - lr_min) (1 + cos(pi t / (rounds - w))) / 2 (Loshchilov
        and Hutter, ICLR 2017, Eq. 5, without restarts), and before, in round i = 1 .. w, lr * i /
        (w + 1).
        """
        if round <= self.warmup:
            return self.lr * round / (self.warmup + 1)
        passed = round - self.warmup - 1
        match self.schedule:
            case "constant":
                return self.lr
            case "step":
                return self.lr * self.lr_decay ** (passed // self.step_rounds)
            case "cosine":
                assert rounds is not None, "the caller knows all rounds"
                share = min(passed / (rounds - self.warmup), 1.0)
                return self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * share)) / 2
        return self.lr * self.lr_decay**passed
