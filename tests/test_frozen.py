"""Parameters with requires_grad=False on every engine, and batch norm for clients without two
examples per batch."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedbn import FedBN
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.storage import read_table
from fedexp.models.cnn import CNN
from fedexp.training.rounds import play_round
from fedexp.training.summary import summary_of
from test_algorithms import SHIPPED, record
from test_continual import ROWS as CONTINUAL
from toy_federation import (
    KEPT,
    LOCAL,
    STRUCTURE,
    Normed,
    assert_engines_play,
    engines_compared,
    first_of_each_class,
    make_simulation,
    one_of_each_kind,
    play,
)

# CNN has no batch norm
ROWS = first_of_each_class([row for row in SHIPPED if row.cls is not FedBN], CONTINUAL)
# what reads them one by one
PER_PARAMETER = ("adapt", "transform_grads", "local_step", "must_train", "refine")


@dataclass(frozen=True, kw_only=True)
class Frozen(CNN):
    """The small CNN with frozen parameters, given by prefixes of their names."""

    prefixes: tuple[str, ...]

    def build(self, shape: Any, num_classes: int) -> nn.Module:
        module = super().build(shape, num_classes)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(self.prefixes))
        return module


def frozen(*prefixes: str) -> Frozen:
    return Frozen(channels=(3,), kernel=3, padding=1, hidden=(8,), prefixes=prefixes)


@one_of_each_kind("name", ROWS, *KEPT, *STRUCTURE, *PER_PARAMETER)
def test_frozen_parameters_are_neither_trained_nor_sent(name):
    """Nor does the server keep them; the model still uses them."""
    simulation = ROWS[name].simulation(model=frozen("convolutions"))
    named = dict(simulation.runtime.net.module.named_parameters())
    body = {k: v.clone() for k, v in named.items() if k.startswith("convolutions")}
    assert body
    state = play(simulation, ROWS[name].rounds)
    assert tree.is_finite(state.server["params"])
    assert not any(k.startswith("convolutions") for k in state.server["params"])
    assert not any(
        "convolutions" in str(path)
        for path, _ in torch.utils._pytree.tree_flatten_with_path(state.server)[0]
    )
    assert all(torch.equal(named[k], v) for k, v in body.items())
    # the clients of LocalOnly send nothing, so the server's model stays the initial one
    alone = name == "LocalOnly"
    start, end = simulation.initial, state.clients[0] if alone else state.server["params"]
    assert any(not torch.equal(start[k], end[k]) for k in start)


@pytest.mark.parametrize(
    "name", ["FedAvg", "FedNTD", "FedCurv", "Scaffold", "FedAlign", "FedEWC", "CFeD"]
)
@engines_compared
def test_engines_agree_on_frozen_parameters(name, engines):
    simulation = ROWS[name].simulation(model=frozen("convolutions", "hidden"))
    assert_engines_play(simulation, engines, ROWS[name].rounds)


@one_of_each_kind("name", ROWS, *PER_PARAMETER, "heads", "initial_params")
def test_a_frozen_classifier_works_or_is_rejected(name):
    """It is rejected, with one message, only if the algorithm treats the classifier separately."""
    if ROWS[name].cls.must_train:
        with pytest.raises(
            ConfigError,
            match=rf"classifier.weight, classifier.bias must be trainable.*because {name} trains",
        ):
            ROWS[name].simulation(model=frozen("classifier"))
        return
    simulation = ROWS[name].simulation(model=frozen("classifier"))
    assert tree.is_finite(play(simulation, 3).server["params"])


# --- batch norm


@pytest.mark.parametrize(
    ("given", "sizes", "left_out", "steps", "refused", "message"),
    [
        # batches of 4: the last of 5 examples is skipped, because it would be alone in its batch
        (
            {"model": Normed()},
            (1, 5, 1, 3, 8),
            {"clients": 2, "examples": 3},
            [0, 2, 0, 2, 4],
            (1, 1, 1),
            r"local.batch_size=4: no client has a batch of at least two .*; use a larger",
        ),
        # of 7 and 6 examples, 3 and 2 are left out
        (
            {"local": replace(LOCAL, drop_last=True)},
            (1, 3, 7, 8, 6),
            {"clients": 2, "examples": 9},
            [0, 0, 2, 4, 2],
            (1, 3),
            "no client has a complete batch; use a smaller",
        ),
    ],
    ids=["batch norm", "drop_last"],
)
def test_clients_without_a_batch_are_reported_and_refused(
    given, sizes, left_out, steps, refused, message, tmp_path, caplog
):
    simulation = make_simulation(sizes=sizes, participation=1.0, **given)
    assert "2 of 5 clients never train" in caplog.text
    assert simulation.left_out == left_out
    result = play_round(simulation, simulation.initial_state())
    assert [schedule.steps for schedule in result.cohort.schedules] == steps
    # clients without a step return the model that they received
    assert [loss for loss, many in zip(result.losses, steps, strict=True) if not many] == [0, 0]
    weights = [size if many else 0 for size, many in zip(sizes, steps, strict=True)]
    assert result.train_loss == pytest.approx(np.average(result.losses, weights=weights))
    assert summary_of(simulation, record(simulation, tmp_path))["left_out"] == left_out
    table = read_table(tmp_path / "clients.csv")
    assert (table["train_loss"].isna() == (table["steps"] == 0)).all()
    with pytest.raises(ConfigError, match=message):
        make_simulation(sizes=refused, **given)
    assert make_simulation(sizes=refused).left_out == {}


class Twice(FedAvg):
    """Trains on each part of two in separate batches."""

    def training_part(self, federation, client):
        return federation.parts[client], federation.parts[client]


def test_examples_that_are_left_out_of_several_parts_are_counted():
    simulation = make_simulation(Twice(), local=replace(LOCAL, drop_last=True), sizes=(5, 3))
    assert simulation.left_out == {"clients": 1, "examples": 8}


@pytest.mark.parametrize("sizes", [(1, 3), (40,)], ids=["parts", "all examples"])
def test_the_refused_batch_size_is_the_given_one(sizes):
    """Also if one client has all 40 training examples."""
    local = replace(LOCAL, batch_size=100, drop_last=True)
    with pytest.raises(
        ConfigError, match=r"^local\.batch_size=100: no client has a complete batch"
    ):
        make_simulation(sizes=sizes, local=local)
    complete = make_simulation(sizes=(40,), local=replace(local, batch_size=40))
    assert complete.runtime.local.batch_size == 40
