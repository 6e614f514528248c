"""Configuration -> checked objects: unknown keys, wrong types and values out of range are collected
over the whole of it and raised as one ConfigError."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.local_training import LocalTraining
from fedexp.algorithms.server_optimizers import NO_SERVER_OPTIMIZER, ServerOptimizer
from fedexp.config.cohorts import SAMPLED, Cohorts
from fedexp.config.settings import ALL_LOCAL, NO_STOP, LocalEvaluation, Seeds, Settings, Stop
from fedexp.config.values import attempt, make, make_target, resolve
from fedexp.core.errors import ConfigError
from fedexp.data.changes import NO_SCHEDULE, DataSchedule
from fedexp.data.held_out import NONE_HELD_OUT, Public, Validation
from fedexp.data.partition import Partitioner
from fedexp.data.surrogate import Surrogate
from fedexp.data.tasks import Scenario
from fedexp.data.types import DataSource
from fedexp.engine.hardware import Hardware
from fedexp.figures.pictures import PNG, Pictures, as_node
from fedexp.metrics.analysis import NO_ANALYSIS, Analysis
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.models import Model
from fedexp.rundir.fingerprint import flatten
from fedexp.trackers.base import TrackerConfig

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """The checked parts of a configuration; nothing has been loaded or started yet.

    The type of a group's field is the base of its options: what an option stands for must derive
    from it.
    """

    settings: Settings  # the keys that are in no node
    seeds: Seeds
    local: LocalTraining
    server: ServerOptimizer = NO_SERVER_OPTIMIZER
    public: Public
    surrogate: Surrogate
    validation: Validation = NONE_HELD_OUT
    stop: Stop = NO_STOP
    local_evaluation: LocalEvaluation = ALL_LOCAL
    cohorts: Cohorts = SAMPLED
    schedule: DataSchedule = NO_SCHEDULE
    figures: Pictures = PNG
    dataset: DataSource
    scenario: Scenario
    partition: Partitioner
    model: Model
    algorithm: FedAvg
    forgetting_metric: ForgettingMetric
    analysis: Analysis = NO_ANALYSIS
    hardware: Hardware
    tracker: TrackerConfig
    values: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)  # resolved

    @property
    def sources(self) -> dict[str, DataSource]:
        """Return the data sets, by their keys in the configuration."""
        domains = getattr(self.scenario, "domains", [])
        found = {f"scenario.domains.{i}": domain for i, domain in enumerate(domains)}
        if self.surrogate.dataset is not None:
            found["surrogate.dataset"] = self.surrogate.dataset
        return {"dataset": self.dataset, **found}


# keys of Built that are nodes of a fixed class; the others are groups, whose options name theirs
NODES = {
    *("seeds", "local", "server", "public", "surrogate", "validation", "stop", "cohorts"),
    *("schedule", "figures", "local_evaluation"),
}
PARTS: dict[str, Any] = {
    field.name: field.type
    for field in dataclasses.fields(Built)
    if field.name not in ("settings", "values")
}
GROUPS = {name: base for name, base in PARTS.items() if name not in NODES}


def build(config: DictConfig) -> Built:
    """Check the whole configuration; raise one ConfigError that lists everything that is wrong with
    it."""
    errors: list[str] = []
    resolved = resolve(config)
    values = {**resolved, "figures": as_node(resolved.get("figures", True))}
    if "revisions" not in config:  # else `resolve` has noted them
        del values["revisions"]
    others = {*PARTS, *partition_keys(values), "expected"}
    own = {key: value for key, value in values.items() if key not in others}
    made: dict[str, Any] = {"settings": attempt(errors, make, Settings, own, "")}
    for name, schema in PARTS.items():
        if name in NODES:
            made[name] = attempt(errors, make, schema, values.get(name, {}), f"{name}.")
        else:
            made[name] = attempt(errors, make_target, values.get(name), name, schema)
    if errors:
        raise ConfigError("\n".join(deduplicate(errors, config)))
    return Built(**made, values=resolved)


def partition_keys(values: Mapping[str, Any]) -> set[str]:
    """Return the top-level keys that a partition brings along (alpha, min_size): those that are
    also fields of its node."""
    node = values.get("partition")
    own = {field.name for field in dataclasses.fields(Settings)}
    return set(node) - own if isinstance(node, dict) else set()


def deduplicate(errors: list[str], config: DictConfig) -> list[str]:
    """Return the lines without repetitions: what is wrong with `seed` is so with each of `seeds`
    that follows it."""
    lines = dict.fromkeys("\n".join(errors).splitlines())
    wrong = {line.partition("=")[0] for line in lines}
    written = flatten(OmegaConf.to_container(config, resolve=False))

    def follows_another(line: str) -> bool:
        found = REFERENCE.fullmatch(str(written.get(line.partition("=")[0])))
        return found is not None and found[1] in wrong

    return [line for line in lines if not follows_another(line)]
