"""Unusual data and failing clients for every algorithm."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import toy_federation
from fedexp.core import storage, tree
from fedexp.data.partition import Partitioner
from fedexp.engine.base import Engine
from fedexp.engine.sequential import Sequential
from fedexp.rundir import files
from test_algorithms import SHIPPED, record
from test_continual import ROWS as CONTINUAL
from toy_federation import (
    CLASSES,
    DRAWN,
    KEPT,
    LOSSES,
    ON_THE_SERVER,
    STRUCTURE,
    Noise,
    Normed,
    first_of_each_class,
    make_simulation,
    one_of_each_kind,
)

ROWS = first_of_each_class(SHIPPED, CONTINUAL)
UNDEFINED_CLASS, UNTESTED_CLASS = 3, 2


# --- clients that break


@dataclass(frozen=True)
class Breaking(Engine):
    """An engine that multiplies the messages of one client by NaN, Inf or a very large number."""

    engine: Engine
    client: int
    factor: float

    def train(self, shared, cohort, evaluate_local):
        trained = self.engine.train(shared, cohort, evaluate_local)
        if self.client not in cohort.clients:
            return trained
        scale = torch.ones(len(cohort.clients), dtype=shared.runtime.dtype)
        scale[list(cohort.clients).index(self.client)] = self.factor

        def scaled(leaf: torch.Tensor) -> torch.Tensor:
            return (
                leaf * scale.view(-1, *[1] * (leaf.dim() - 1)) if leaf.is_floating_point() else leaf
            )

        return replace(trained, messages=tree.map(scaled, trained.messages))


@pytest.mark.parametrize(
    "factor", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)], ids=str
)
@one_of_each_kind(
    "name",
    {name: row for name, row in ROWS.items() if name != "LocalOnly"},  # its clients send nothing
    *KEPT,
    *DRAWN,
    *ON_THE_SERVER,
    *STRUCTURE,
    "finish",
    "public",
)
def test_non_finite_client_ends_run_and_is_named(name, factor, tmp_path, caplog):
    whole = ROWS[name].simulation(participation=1.0)
    broken = replace(whole, engine=Breaking(whole.engine, 2, factor))
    with caplog.at_level(logging.WARNING, logger="fedexp"):
        state = record(broken, tmp_path, resume=False)
    assert (state.status, state.round, state.not_finite) == ("diverged", 1, [2])
    assert (
        "round 1: the run has diverged, because the loss or the model of clients [2] is not finite"
        in caplog.text
    )
    saved = storage.load_tree(tmp_path / files.CHECKPOINT)
    assert (saved["status"], saved["not_finite"]) == ("diverged", [2])
    assert pd.read_csv(tmp_path / files.ROUNDS)["round"].tolist() == [0, 1]


def test_infinite_running_statistics_end_the_run(tmp_path, monkeypatch):
    """The batch statistics of training stay finite."""
    trained = Sequential.train

    def train(*arguments):
        result = trained(*arguments)
        scaled = {k: v / 0 if v.is_floating_point() else v for k, v in result.buffers.items()}
        return replace(result, buffers=scaled)

    monkeypatch.setattr(Sequential, "train", train)
    state = record(make_simulation(model=Normed()), tmp_path, resume=False)
    assert (state.status, state.round) == ("diverged", 1)


# --- odd data


@dataclass(frozen=True, kw_only=True)
class OneClassEach(Partitioner):
    """Client k has only class k: one example of class 0, four of the others. No client has the last
    class."""

    def assign(self, labels, num_classes, num_clients, rng, owners):
        return [np.flatnonzero(labels == k)[: 4 if k else 1] for k in range(num_clients)], {}


def lacking_noise(self: Noise) -> dict[str, Any]:
    """Return data without training examples of the last class and test examples of the
    one before."""
    data = READ(self)
    data["y_train"] = np.where(data["y_train"] == UNDEFINED_CLASS, 0, data["y_train"])
    keep = data["y_test"] != UNTESTED_CLASS
    return data | {"x_test": data["x_test"][keep], "y_test": data["y_test"][keep]}


READ = Noise.read


@one_of_each_kind(
    "name",
    {name: row for name, row in ROWS.items() if row not in CONTINUAL},
    *KEPT,
    *ON_THE_SERVER,
    *LOSSES,
    "public",
)
def test_run_completes_with_one_class_per_client_and_missing_classes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(Noise, "read", lacking_noise)
    monkeypatch.setattr(toy_federation, "Ragged", lambda sizes: OneClassEach())
    clients = CLASSES - 1
    settings = {"sizes": (1,) * clients, "participation": 1.0, "dataset": None}
    state = record(ROWS[name].simulation(**settings), tmp_path, resume=False)
    assert state.status == "completed"
    counts = state.record.counts
    assert ((counts > 0).sum(1) == 1).all()
    assert counts[0].sum() == 1
    assert counts[:, UNDEFINED_CLASS].sum() == 0
    by_class = pd.read_csv(tmp_path / "class_accuracy.csv").pivot(
        index="round", columns="class", values="accuracy"
    )
    assert by_class[UNTESTED_CLASS].isna().all()  # an empty cell
    assert by_class.drop(columns=UNTESTED_CLASS).notna().all(axis=None)
    rounds = pd.read_csv(tmp_path / files.ROUNDS)
    assert rounds["forgetting"][2:].notna().all()  # over the classes that are tested
    assert rounds[["test_loss", "test_accuracy"]].notna().all(axis=None)
    assert pd.read_csv(tmp_path / files.CLIENTS).groupby("round").size().tolist() == [clients] * 3


@one_of_each_kind("name", ROWS, *KEPT, *ON_THE_SERVER, *STRUCTURE, "public")
def test_run_completes_with_one_client(name, tmp_path):
    state = record(ROWS[name].simulation(sizes=(12,), participation=1.0), tmp_path, resume=False)
    assert state.status == "completed"
    assert set(pd.read_csv(tmp_path / files.CLIENTS)["client"]) == {0}
