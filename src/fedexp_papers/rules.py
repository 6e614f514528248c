"""Reporting rules: how a paper computes one number from a run, and how noisy this number is.

A sweep's file states the rule of its paper: `report: {value: last | mean_of_last(n) | ema(w) |
best, view: plain | augmented}`.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VIEWS = ("plain", "augmented")
NOISE_ROUNDS = 10  # number of final rounds from which a run's noise is estimated
FORM = re.compile(r"(last|best|mean_of_last\((?P<n>[1-9]\d*)\)|ema\((?P<w>0?\.\d+)\))")


@dataclass(frozen=True)
class Rule:
    """A paper's rule for reporting accuracy and forgetting.

    Raises ValueError for an unknown `value` or `view`.
    """

    value: str = "last"
    view: str = "plain"
    name: str = ""  # such as "inferred protocol"; empty if the paper states the rule
    # metric -> standard deviation over seeds of one run's value (a fraction), if known
    spread: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not FORM.fullmatch(self.value):
            raise ValueError(
                f"report.value={self.value}: must be last, mean_of_last(n), ema(w) with 0 < w < 1,"
                " or best"
            )
        if self.view not in VIEWS:
            raise ValueError(f"report.view={self.view}: must be one of {', '.join(VIEWS)}")

    def __str__(self) -> str:
        text = f"{self.value}, {self.view} test"
        return f"{self.name}: {text}" if self.name else text

    def reported(self, values: Sequence[float], metric: str) -> float | None:
        """Apply the rule to the values (fractions) of the evaluated rounds, from round 1 on.

        Return None for an empty list. For forgetting, `best` is the minimum.
        """
        if not len(values):
            return None
        if self.value == "best":
            return float(min(values) if metric == "forgetting" else max(values))
        if weight := self._argument("w"):
            return ema(values, weight)
        return statistics.fmean(values[-int(self._argument("n") or 1) :])

    def standard_error(self, values: Sequence[float]) -> float | None:
        """Return the standard error of the reported number within one run.

        Return None if there are fewer than two rounds. The error is estimated from the last ten
        rounds, which are treated as independent. With their standard deviation s (n - 1 in the
        denominator), the standard error is s if a single round is reported (last, best), and s /
        sqrt(n) for the mean of n rounds.

        For a moving average with weight w on earlier rounds, the error is s sqrt((1 - w) / (1 +
        w)), since the squares of the weights (1 - w) w^k sum to (1 - w)^2 / (1 - w^2).
        """
        window = values[-NOISE_ROUNDS:]
        if len(window) < 2:
            return None
        rounds, weight = self._argument("n") or 1, self._argument("w")
        factor = math.sqrt((1 - weight) / (1 + weight))
        return statistics.stdev(window) * factor / math.sqrt(min(rounds, len(values)))

    def error_over_seeds(self, metric: str, seeds: int) -> float | None:
        """Return the standard error of a mean over one or two seeds.

        The error is computed from the known standard deviation of one run over seeds. Return None
        if this standard deviation is unknown. With three or more seeds, also return None, since the
        standard deviation of these seeds is used instead.
        """
        known = self.spread.get(metric)
        return None if known is None or not 0 < seeds < 3 else known / math.sqrt(seeds)

    def _argument(self, name: str) -> float:
        """Return n or w in the rule, or 0 if the rule has none."""
        match = FORM.fullmatch(self.value)
        return float(match[name] or 0) if match else 0.0


def read_rule(node: Mapping[str, Any]) -> Rule:
    """Read the rule from a sweep's file. Raises ValueError or TypeError if it is invalid."""
    spread = {str(metric): float(value) for metric, value in node.get("spread", {}).items()}
    texts = {str(key): str(value) for key, value in node.items() if key != "spread"}
    return Rule(**texts, spread=spread)


def ema(values: Sequence[float], weight: float) -> float:
    """Return the last value of an exponential moving average.

    The average is defined by e_1 = x_1 and e_t = weight e_{t-1} + (1 - weight) x_t.

    FedNTD's authors state a weight of 0.6 for Table 1 but no formula (issue 4 in their repository).
    We interpret 0.6 as the weight of the earlier average, since their code logs to Weights &
    Biases, whose smoothing has this definition. TensorBoard uses the same definition, with 0.6 as
    the default. If 0.6 were the weight of the newest value, the average would effectively cover
    fewer rounds: (1 + w) / (1 - w) would be 2.3 instead of 4. Over the 24 committed runs of Table 1
    (plain view), the results of the two definitions differ by 0.7 points of accuracy and 0.007 of F
    on average, and by at most 3.2 points and 0.032.
    """
    average = float(values[0])
    for value in values[1:]:
        average = weight * average + (1 - weight) * float(value)
    return average
