"""Use the partitioners in flwr-datasets, the data package of Flower."""

import inspect
from dataclasses import field
from typing import Any

import numpy as np

from fedexp.core.errors import ConfigError, reason_of, require_choice
from fedexp.core.packages import how_to_install
from fedexp.data.partition import Assigned, Partitioner

LABEL, NUMBER = "label", "number"  # columns of the table that flwr-datasets partitions


class Flower(Partitioner):
    """Partition the examples with `flwr_datasets.partitioner.<name>(**options)`.

    Three arguments have defaults, which `options` can override. `num_partitions` is the number of
    clients, `partition_by` is the label (for a natural partitioner, the data set's natural client),
    and `seed` is drawn with the seed seeds.partition.
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
            raise self.rejected(error) from error
        return parts, {}

    @property
    def source(self) -> str:
        return f"partition.name={self.name}:"

    def partitioner(self, num_clients: int, seed: int, natural: bool) -> Any:
        """Return the partitioner of flwr-datasets, without data.

        natural: whether the data set has natural clients.
        """
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
            raise self.rejected(error) from error

    def rejected(self, error: Exception) -> ConfigError:
        """Return the error to raise if flwr-datasets rejects the options or the data."""
        return ConfigError(
            f"partition.name={self.name}: flwr-datasets rejects the options or the data:"
            f" {reason_of(error)}"
        )
