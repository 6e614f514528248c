"""Look up what a job of a named sweep needs and how much it trains, in its composed configuration;
no data are read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedexp.algorithms.base import FedAvg
from fedexp.analysis.algorithm_costs import node_of
from fedexp.config.options import conf_directory
from fedexp.config.values import make_target

Overrides = frozenset[str]


@dataclass(frozen=True)
class Workload:
    """The work of one run, as far as its time follows from it."""

    data: tuple[str, ...]  # data sets that it reads, the one that it trains on first
    # data set, scenario and model: times of runs that have all in common compare
    kind: tuple[str, ...]
    # over the training data, of all clients together: rounds x participation x local epochs
    passes: float
    batch_size: int


def workloads(jobs: Iterable[tuple[Overrides, str]]) -> dict[tuple[Overrides, str], Workload]:
    """Return the work of each job, given as (its overrides, the option `algorithm`)."""
    from hydra import compose, initialize_config_dir

    found: dict[tuple[Overrides, str], Workload] = {}
    # composing is what takes the time, and no option of an algorithm counts here
    composed: dict[Overrides, Any] = {}
    with initialize_config_dir(str(conf_directory().resolve()), version_base="1.3"):
        for overrides, algorithm in jobs:
            setting = frozenset(text for text in overrides if not text.startswith("algorithm"))
            if setting not in composed:
                composed[setting] = compose(
                    "config", overrides=sorted(setting), return_hydra_config=True
                )
            found[overrides, algorithm] = workload(composed[setting], setting, algorithm)
    return found


def workload(config: Any, setting: Overrides, algorithm: str) -> Workload:
    """Return the work of an algorithm at a composed configuration."""
    choices, needs_surrogate, central = config.hydra.runtime.choices, *demands(algorithm)
    data = [str(choices["dataset"]), *map(str, config.scenario.get("domains") or ())]
    if needs_surrogate and config.surrogate.dataset:
        data.append(str(config.surrogate.dataset))
    model = " ".join(
        [str(choices["model"]), *sorted(text for text in setting if text.startswith("model."))]
    )
    passes = config.rounds * config.local.epochs * (1.0 if central else config.participation)
    return Workload(
        tuple(dict.fromkeys(data)),
        (str(choices["dataset"]), str(choices["scenario"]), model),
        round(passes, 9),
        int(config.local.batch_size),
    )


@cache
def demands(algorithm: str) -> tuple[bool, bool]:
    """Return (whether an option needs unlabelled examples, whether it trains on the data of all
    clients in one place)."""
    node: Mapping[str, Any] = node_of(conf_directory() / "algorithm" / f"{algorithm}.yaml")
    return make_target(dict(node), "algorithm", FedAvg).needs.surrogate, node.get(
        "paradigm"
    ) == "centralized"
