"""Define the tables that analyses write, and compute the values that trackers receive."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedexp.rundir.files import CKA, GRADIENT_DIVERSITY, LOCAL_EPOCHS, WEIGHT_DIVERGENCE


@dataclass(frozen=True)
class Table:
    """The columns of an analysis's table."""

    keys: tuple[str, ...]  # integer columns without empty cells
    texts: tuple[str, ...]  # text columns
    columns: Mapping[str, str]  # column -> name of its mean over the rows of a round


ACCURACIES = ("test_accuracy", "in_local_accuracy", "out_local_accuracy", "train_accuracy")
TABLES = {
    WEIGHT_DIVERGENCE: Table(
        keys=("round", "client"),
        texts=("layer",),
        columns={
            "l1": "weight_divergence_l1",
            "l2": "weight_divergence_l2",
            "others_l1": "weight_divergence_others_l1",
            "others_l2": "weight_divergence_others_l2",
            "distribution_distance": "distribution_distance",
        },
    ),
    GRADIENT_DIVERSITY: Table(
        keys=("round", "clients"),
        texts=("layer",),
        columns={name: name for name in ("gradient_diversity", "weighted_gradient_diversity")},
    ),
    LOCAL_EPOCHS: Table(
        keys=("round", "client", "epoch"),
        texts=(),
        columns={name: f"epochs_{name}" for name in ACCURACIES},
    ),
    CKA: Table(keys=("round",), texts=(), columns={"cka": "cka"}),
}


def round_means(name: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means over the clients of one round, as a dict for trackers.

    If the table has a column of layers, only the rows for the whole model are averaged. If the
    table has a column of epochs, the means before local training (epoch 0) and after local training
    (last epoch) are returned separately. nan and inf are left out.

    name: the name of the table's file. rows: the rows of the round.
    """
    found = {}
    for suffix, chosen in rows_to_average(list(rows)).items():
        for column, title in TABLES[name].columns.items():
            values = np.array([row[column] for row in chosen], dtype=np.float64)
            if np.isfinite(values).any():
                found[title + suffix] = float(values[np.isfinite(values)].mean())
    return found


def rows_to_average(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return a dict that maps each suffix of the values' names to the rows to average."""
    if not rows or "epoch" not in rows[0]:
        return {"": [row for row in rows if row.get("layer", "total") == "total"]}
    last = {row["client"]: row for row in rows}  # epochs ascend
    return {"_before": [row for row in rows if row["epoch"] == 0], "_after": list(last.values())}
