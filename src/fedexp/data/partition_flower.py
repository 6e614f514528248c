"""Partitioners from flwr-datasets, Flower's data package, by class name."""

import inspect
from dataclasses import field
from typing import Any

import numpy as np

from fedexp.core.errors import ConfigError, require_choice
from fedexp.core.packages import how_to_install
from fedexp.data.partition import Assigned, Partitioner

LABEL, NUMBER = "label", "number"  # columns of the table that is partitioned


class Flower(Partitioner):
    """Partition with `flwr_datasets.partitioner.<name>(**options)`.

    Unless set in `options`, `num_partitions` is the number of clients, `partition_by` is the label
    (or the data set's natural clients for a natural partitioner), and `seed` is drawn by
    seeds.partition.
    """

    name: str | None
    options: dict[str, Any] = field(default_factory=dict)

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        made = self.partitioner(num_clients, int(rng.integers(2**31)), natural=owners is not None)
        columns = {LABEL: labels.tolist(), NUMBER: list(range(len(labels)))}
        if owners is not None:
            columns["owner"] = owners.tolist()
        from datasets import Dataset

        try:
            made.dataset = Dataset.from_dict(columns)
            count = made.num_partitions
            parts = [np.array(made.load_partition(k)[NUMBER], np.int64) for k in range(count)]
        except Exception as error:  # flwr-datasets raises many types
            raise self.refused(error) from error
        return parts, {}

    @property
    def source(self) -> str:
        return f"partition.name={self.name}:"

    def partitioner(self, num_clients: int, seed: int, natural: bool) -> Any:
        """Return the flwr-datasets partitioner, without data."""
        try:
            from flwr_datasets import partitioner
        except ImportError:
            raise ConfigError(
                f"partition=flower: needs the package flwr-datasets: {how_to_install('flower')}"
            ) from None
        known = [name for name in dir(partitioner) if name.endswith("Partitioner")]
        require_choice("partition.name", str(self.name), known)
        kind = getattr(partitioner, str(self.name))
        column = "owner" if natural and "NaturalId" in str(self.name) else LABEL
        usual = {"num_partitions": num_clients, "partition_by": column, "seed": seed}
        taken = inspect.signature(kind).parameters
        options = {key: value for key, value in usual.items() if key in taken} | self.options
        try:
            return kind(**options)
        except Exception as error:
            raise self.refused(error) from error

    def refused(self, error: Exception) -> ConfigError:
        """Return the error for options or data that flwr-datasets does not accept."""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ConfigError(f"partition.name={self.name}: {self.name} says: {reason}")
