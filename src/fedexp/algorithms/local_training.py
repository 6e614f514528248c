"""Local training of a client (config node `local`)."""

import math
from dataclasses import field
from typing import Annotated, Literal, get_args

from fedexp.core.errors import require
from fedexp.core.limits import (
    Checked,
    Count,
    CountFrom0,
    CountOrNone,
    Limit,
    NonNegative,
    Positive,
    PositiveShare,
    ShareBelow1,
)

Optimizer = Literal["sgd", "nesterov", "adam", "adamw", "adamax", "adagrad", "rmsprop", "adadelta"]
COUNT_STEPS = ("adam", "adamw", "adamax")  # optimizers whose update depends on the step's number
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
# how the clients' learning rate changes over the rounds
LrSchedule = Literal["exponential", "constant", "step", "cosine", "rates"]
Epochs = Annotated[float, Limit("greater than 0 and at most 1000000", lambda v: 0 < v <= 1e6)]
Rates = Annotated[
    dict[int, float],
    Limit(
        "a map from rounds (2, 3, ...) to learning rates, such as {30: 0.01}",
        lambda v: all(type(round) is int and round > 1 and 0 < v[round] < math.inf for round in v),
    ),
]
# schedules that depend on the total number of rounds
SCHEDULES_OVER_ALL_ROUNDS = ("cosine",)


class LocalTraining(Checked, prefix="local."):
    """A client's local training in a round (config node `local`).

    It consists of `epochs` passes over the client's examples, or of `steps` steps. The passes may
    be a fraction, such as 0.5 or 2.5; the number of steps is then rounded to a whole one.
    """

    epochs: Epochs | None  # None: `steps` is given
    batch_size: Count
    optimizer: Optimizer
    lr: Positive
    lr_decay: PositiveShare  # factor that multiplies the learning rate at each decay; 1: no decay
    momentum: ShareBelow1
    weight_decay: NonNegative
    schedule: LrSchedule = "exponential"
    step_rounds: Count = 10  # for schedule=step: number of rounds between two decays
    lr_min: NonNegative = 0.0  # for schedule=cosine: the rate after the last round
    # for schedule=rates: round -> the rate from this round on
    rates: Rates | None = field(default=None, metadata={"neutral": None})
    # number of rounds in which the rate rises linearly before the schedule starts
    warmup: CountFrom0 = 0
    # True: the last batch of each epoch is left out unless it is complete. A client without a
    # complete batch then returns the model as it received it, with its usual weight (PFLlib).
    drop_last: bool = False
    # True: a client's optimizer keeps its state (momentum) between the rounds in which it trains
    keep_optimizer: bool = False
    # number of local steps; None: as many as `epochs` passes have
    steps: CountOrNone = field(default=None, metadata={"neutral": None})

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.epochs is not None or self.steps is not None
        require(good, "local.epochs", "null", "greater than 0 without local.steps")
        if self.steps is not None:  # so that no method can use passes that clients do not make
            object.__setattr__(self, "epochs", None)
        elif self.epochs is not None and 1 <= self.epochs <= 1e6 and self.epochs % 1 == 0:
            object.__setattr__(self, "epochs", int(self.epochs))
        wanted = "greater than 0 with local.optimizer=nesterov"
        good = self.optimizer != "nesterov" or self.momentum > 0
        require(good, "local.momentum", self.momentum, wanted)
        wanted = (
            f"false with local.optimizer={self.optimizer}, whose step count starts again with each"
            " round"
        )
        good = not (self.keep_optimizer and self.optimizer in COUNT_STEPS)
        require(good, "local.keep_optimizer", self.keep_optimizer, wanted)
        good = self.schedule != "rates" or bool(self.rates)
        wanted = "set with local.schedule=rates, such as {30: 0.01}"
        require(good, "local.rates", self.rates, wanted)
        good = not 0 < self.lr < self.lr_min  # an invalid lr has already been reported
        require(good, "local.lr_min", self.lr_min, f"at most local.lr={self.lr}")

    def steps_of(self, pass_steps: int) -> int:
        """Return the number of local steps of a client, 0 for a client without a batch.

        pass_steps: the number of batches of a pass over its examples.
        """
        if not pass_steps:
            return 0
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(math.floor(self.epochs * pass_steps + 0.5), 1)

    @property
    def keeps_state(self) -> bool:
        """Return whether clients keep an optimizer state. Plain SGD has none."""
        return self.keep_optimizer and not (self.optimizer == "sgd" and self.momentum == 0)

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        """Return the learning rate of all steps of a round.

        round: number of the round, from 1 (within a task). rounds: total number of rounds (of a
        task), required for schedule=cosine. In round i = 1 .. w of the warm-up, the rate is lr * i
        / (w + 1). Then, t rounds after the warm-up, it is
            exponential  lr * lr_decay^t (FedNTD B.3)
            step         lr * lr_decay^floor(t / step_rounds)
            cosine       lr_min + (lr - lr_min) (1 + cos(pi t / (rounds - w))) / 2
            rates        that of the last of `rates` up to this round, or lr before the first
        The cosine schedule is Eq. 5 of Loshchilov and Hutter, ICLR 2017, without restarts.
        """
        if round <= self.warmup:
            return self.lr * round / (self.warmup + 1)
        passed = round - self.warmup - 1
        match self.schedule:
            case "constant":
                return self.lr
            case "rates":
                assert self.rates is not None, "it is required"
                begun = [first for first in self.rates if first <= round]
                return self.rates[max(begun)] if begun else self.lr
            case "step":
                return self.lr * self.lr_decay ** (passed // self.step_rounds)
            case "cosine":
                assert rounds is not None, "the caller knows all rounds"
                share = min(passed / (rounds - self.warmup), 1.0)
                return self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * share)) / 2
        return self.lr * self.lr_decay**passed
