"""The tables of the group `analysis` in a run directory: their columns, and the numbers that trackers are told."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedexp.rundir.files import GRADIENT_DIVERSITY, LOCAL_EPOCHS, WEIGHT_DIVERGENCE


@dataclass(frozen=True)
class Table:
    """Columns of the table of an analysis, for its readers."""

    keys: tuple[str, ...]  # columns of whole numbers that every row has
    texts: tuple[str, ...]  # columns of words
    columns: Mapping[str, str]  # column -> name of its mean over the rows of a round that `told` has
    told: Mapping[str, Any]  # column -> value of the rows that are averaged; empty: all rows


LAYERS = {"layer": "total"}  # all layers together
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
        told=LAYERS,
    ),
    GRADIENT_DIVERSITY: Table(
        keys=("round", "clients"),
        texts=("layer",),
        columns={name: name for name in ("gradient_diversity", "weighted_gradient_diversity")},
        told=LAYERS,
    ),
    LOCAL_EPOCHS: Table(keys=("round", "client", "epoch"), texts=(), columns={}, told={}),
}


def round_means(name: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return what trackers are told of the rows of one round in a file of this name; nan and inf are left out."""
    table = TABLES[name]
    chosen = [row for row in rows if all(row[column] == value for column, value in table.told.items())]
    found = {}
    for column, title in table.columns.items():
        values = np.array([row[column] for row in chosen], dtype=np.float64)
        if np.isfinite(values).any():
            found[title] = float(values[np.isfinite(values)].mean())
    return found
