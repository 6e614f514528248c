"""Make checked objects from a configuration.

Unknown keys, wrong types and out-of-range values are collected from the whole configuration and
reported in one ConfigError.
"""

import dataclasses
from typing import Any

from omegaconf import DictConfig

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.local_training import LocalTraining
from fedexp.algorithms.server_optimizers import ServerOptimizer
from fedexp.config.cohorts import Cohorts
from fedexp.config.settings import LocalEvaluation, Seeds, Settings, Stop
from fedexp.config.values import attempt, deduplicate, make, make_group, resolve
from fedexp.core.errors import ConfigError
from fedexp.data.changes import DataSchedule
from fedexp.data.held_out import Public, Validation
from fedexp.data.partition import Partitioner
from fedexp.data.surrogate import Surrogate
from fedexp.data.tasks import Scenario
from fedexp.data.types import DataSource
from fedexp.data.views import evaluation_views
from fedexp.engine.hardware import Hardware
from fedexp.figures.pictures import Pictures, as_node
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.models import Model
from fedexp.trackers.base import CallbackConfig, TrackerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """The checked parts of a configuration, before any data are loaded.

    If a field holds an option of a config group, the field's type is the base class of the group,
    or a list if a run may have several options of the group.
    """

    settings: Settings  # the scalar keys on the top level
    seeds: Seeds
    local: LocalTraining
    server: ServerOptimizer
    public: Public
    surrogate: Surrogate
    validation: Validation
    stop: Stop
    local_evaluation: LocalEvaluation
    cohorts: Cohorts
    schedule: DataSchedule
    figures: Pictures
    dataset: DataSource
    scenario: Scenario
    partition: Partitioner
    model: Model
    algorithm: FedAvg
    forgetting_metric: list[ForgettingMetric]
    analysis: list[CallbackConfig]
    hardware: Hardware
    tracker: list[TrackerConfig]
    callback: list[CallbackConfig]
    values: dict[str, Any]  # the resolved configuration

    @property
    def views(self) -> tuple[str, ...]:
        """Return the views in which the run is evaluated."""
        settings = self.settings
        return evaluation_views(settings.test_views, settings.evaluate_on, self.has_validation)

    @property
    def holds_out_test(self) -> bool:
        """Return whether the test set consists of training examples that clients hold out."""
        return self.settings.test_per_client > 0 or self.partition.gives_test

    @property
    def has_validation(self) -> bool:
        """Return whether the run has a validation set."""
        return self.validation.fraction > 0 or bool(
            getattr(self.dataset, "validation_splits", None)
        )


FIELDS: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Built)}
SCALARS = {field.name for field in dataclasses.fields(Settings)}
NODES = (
    *("seeds", "local", "server", "public", "surrogate", "validation", "stop"),
    *("local_evaluation", "schedule", "figures"),
)
GROUPS = {name: base for name, base in FIELDS.items() if name not in (*NODES, "settings", "values")}


def build(config: DictConfig) -> Built:
    """Check the whole configuration and make its parts. Raises ConfigError with all errors."""
    errors: list[str] = []
    resolved = resolve(config)
    values = resolved | {"figures": as_node(resolved.get("figures", True))}
    made: dict[str, Any] = {}
    for name in NODES:
        made[name] = attempt(errors, make, FIELDS[name], values.get(name, {}), f"{name}.")
    # keys such as alpha and min_size are also fields of the partition's node
    partition = values.get("partition")
    of_partition = {*partition} - SCALARS if isinstance(partition, dict) else set()
    others = {*FIELDS, *of_partition, "expected"}
    own = {key: value for key, value in values.items() if key not in others}
    made["settings"] = attempt(errors, make, Settings, own, "")
    for group, base in GROUPS.items():
        made[group] = attempt(errors, make_group, values.get(group), group, base)
    if errors:
        raise ConfigError("\n".join(deduplicate(errors, config)))
    return Built(**made, values=resolved)
