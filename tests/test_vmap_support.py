"""Which networks the vectorised engine can train, as a trial decides (vectorised/support.py)."""

import logging
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from fedexp.algorithms.base import FedAvg
from fedexp.core.errors import ConfigError
from fedexp.engine.vectorised.support import find_obstacle
from fedexp.models import Output
from fedexp.models.own import OwnModel
from fedexp.training.prepare import fit_engine
from test_algorithms import assert_equal
from test_own_models import Own
from toy_federation import HARDWARE, Hardware, make_simulation, play

IMAGES = torch.zeros(2, 1, 6, 6)


class Logits(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Output:
        logits = super().forward(x)
        return Output(logits, logits)


class Last(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Scaling(nn.Module):
    """Draws one number for all clients if it is vectorised."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.draw()) if self.training else x


def draw_from_numpy() -> float:
    return np.random.rand()  # noqa: NPY002 (what users call)


class OnlyAtRest(nn.Module):
    """A layer that fails in eval mode if it is vectorised."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x * x.sum().item()


def network(layer: nn.Module) -> nn.Module:
    """Return a network for IMAGES with a layer in the middle, which gets tensors [B, 1, 6, 6]."""
    return Logits(nn.Conv2d(1, 1, 1), layer, nn.Flatten(), nn.Linear(36, 4))


@pytest.mark.parametrize("layer", [nn.LayerNorm(6), nn.BatchNorm2d(1), nn.Dropout(0.0)])
def test_supported_layers_are_vectorised(layer):
    assert find_obstacle(network(layer), IMAGES) is None


@pytest.mark.parametrize(
    ("layer", "name", "reason"),
    [
        (nn.Dropout(0.1), "the layer 1 (Dropout)", "draws random numbers in training"),
        (Scaling(random.random), "the layer 1 (Scaling)", "draws random numbers in training"),
        (Scaling(draw_from_numpy), "the layer 1 (Scaling)", "draws random numbers in training"),
        (
            nn.InstanceNorm2d(1, track_running_stats=True),
            "the layer 1 (InstanceNorm2d)",
            "has running statistics, but is not nn.BatchNorm1d to 3d",
        ),
        (nn.Sequential(nn.Flatten(1, 2), Last(6, 6)), "the layer 1.1 (Last)", "not supported by"),
        (Branching(), "the layer 1 (Branching)", "not supported by torch.func.vmap"),
        (OnlyAtRest(), "the layer 1 (OnlyAtRest)", "not supported by torch.func.vmap"),
    ],
)
def test_layers_that_cannot_be_vectorised_are_named(layer, name, reason):
    obstacle = find_obstacle(network(layer), IMAGES)
    assert obstacle is not None
    assert obstacle.startswith(name)
    assert reason in obstacle


# --- in runs


class Grey(VisionTransformer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.expand(-1, 3, -1, -1))


@dataclass(frozen=True, kw_only=True)
class SmallViT(OwnModel):
    """torchvision's vision transformer with two layers for images of 6 x 6 pixels."""

    head: str | None = "heads.head"

    def network(self, shape: Any, num_classes: int) -> nn.Module:
        sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12}
        return Grey(image_size=6, patch_size=3, num_classes=num_classes, **sizes)


@pytest.mark.parametrize("model", [SmallViT(), SmallViT(freeze=("encoder",))])
def test_vectorised_transformer_equals_sequential_one(model):
    models = []
    for engine in ("sequential", "vectorised"):
        simulation = make_simulation(model=model, engine=engine)
        state = play(simulation, 2)
        models.append(state.server["params"])
    assert_equal(*models, atol=1e-12)
    start = simulation.initial
    assert all(not torch.equal(models[0][name], start[name]) for name in start)


def test_dropout_on_the_vectorised_engine_is_rejected():
    message = (
        r"hardware.engine=vectorised: must be another engine, because the vectorised engine does"
        r" not support this run: the layer network.dropout \(Dropout\) draws random numbers"
    )
    with pytest.raises(ConfigError, match=message):
        make_simulation(model=Own(dropout=0.5), engine="vectorised")


class Rejecting(Own):
    vectorises: ClassVar[bool | None] = False


class Insisting(Own):
    vectorises: ClassVar[bool | None] = True


def test_model_can_declare_whether_it_is_vectorised():
    with pytest.raises(ConfigError, match=r"this run: Rejecting has vectorises = False"):
        make_simulation(model=Rejecting(), engine="vectorised")
    make_simulation(model=Insisting(dropout=0.5), engine="vectorised")


@pytest.mark.parametrize(("dropout", "engine"), [(0.0, "vectorised"), (0.5, "sequential")])
def test_automatic_engine_says_why_clients_train_one_after_another(dropout, engine, caplog):
    """On a GPU, `auto` means the vectorised engine, which the test requests here."""
    asked = Hardware(**HARDWARE | {"engine": "vectorised"})
    resolved, asked = asked.resolve(4), replace(asked, engine="auto")
    module = Own(dropout=dropout).build((1, 6, 6), 4)
    data = make_simulation().runtime.data
    with caplog.at_level(logging.INFO, logger="fedexp"):
        built = SimpleNamespace(model=Own(), algorithm=FedAvg(), hardware=asked)
        fitted = fit_engine(built, resolved, module, data)
    assert (fitted.engine, fitted.vectorises) == (engine, engine == "vectorised")
    said = "one after another" in caplog.text and "network.dropout (Dropout)" in caplog.text
    assert said == (dropout > 0)
