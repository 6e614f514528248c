"""Low-rank adapters: the equation, and which parameters are trained, sent and exported."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.training.rounds import play_round
from fedexp_continual.models.lora import Adapted, LoRA, LowRank, TorchvisionLoRA
from test_own_models import ROWS, Net
from toy_federation import assert_engines_play, engines_compared, make_simulation

HEAD = {"classifier.weight", "classifier.bias"}


@dataclass(frozen=True, kw_only=True)
class Own(Adapted):
    vectorises: ClassVar[bool] = True
    head: str | None = "fc"

    def network(self, shape: Any, num_classes: int) -> nn.Module:
        return Net(shape, num_classes)


def randomised(network: nn.Module) -> nn.Module:
    """Set B of every adapter to random values."""
    for module in network.modules():
        if isinstance(module, LowRank):
            nn.init.normal_(module.up.weight)
    return network


def test_linear_layer_adds_its_low_rank_product():
    """By hand: W = [[1, 2]], b = 3, A = [[1, -1]] (r = 1), B = [[4]], scale 0.5, x = (1, 5): W x +
    b = 1 + 10 + 3 = 14, A x = -4, 0.5 * 4 * -4 = -8, in total 6."""
    layer = nn.Linear(2, 1)
    layer.weight.data, layer.bias.data = torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])
    adapted = LowRank(layer, 1, 0.5)
    assert adapted(torch.tensor([1.0, 5.0])).item() == 14, "B begins at zero"
    adapted.down.weight.data, adapted.up.weight.data = (
        torch.tensor([[1.0, -1.0]]),
        torch.tensor([[4.0]]),
    )
    assert adapted(torch.tensor([1.0, 5.0])).item() == 6


@pytest.mark.parametrize("padding", [1, "same"])
def test_adapter_of_convolution_pads_like_the_convolution(padding):
    """With A = W and B = 1, the output is doubled."""
    conv = nn.Conv2d(1, 1, 3, padding=padding, padding_mode="circular", bias=False)
    adapted = LowRank(conv, 1, 1.0)
    adapted.down.weight.data, adapted.up.weight.data = conv.weight.data, torch.ones(1, 1, 1, 1)
    x = torch.randn(2, 1, 5, 5)
    torch.testing.assert_close(adapted(x), 2 * conv(x))


def test_only_adapters_and_head_are_trained_and_sent():
    """inner (3 -> 6) with rank 2: A has 6 numbers and B 12; the head (6 -> C) has 7 C. Eight bytes
    each."""
    simulation = make_simulation(model=Own(lora=LoRA(rank=2)))
    classes = simulation.runtime.data.num_classes
    named = dict(simulation.runtime.net.module.named_parameters())
    before = {k: v.clone() for k, v in named.items() if "base" in k or "stem" in k}
    adapters = {f"backbone.inner.{name}.weight" for name in ("down", "up")}
    assert set(simulation.initial) == adapters | HEAD
    b_alone = make_simulation(model=Own(lora=LoRA(rank=2, freeze_a=True))).initial
    assert set(b_alone) == {"backbone.inner.up.weight"} | HEAD
    result = play_round(simulation, simulation.initial_state())
    clients = len(result.cohort.clients)
    assert result.bytes_up == result.bytes_down == clients * 8 * (6 + 12 + 7 * classes)
    assert all(
        not torch.equal(simulation.initial[k], v) for k, v in result.server["params"].items()
    )
    assert all(torch.equal(named[k], v) for k, v in before.items())


@engines_compared
@pytest.mark.parametrize(
    "name",
    [
        "FedAvg",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("FedNTD", "Scaffold", "FedEWC")),
    ],
)
def test_engines_agree_on_adapters(name, engines):
    model = Own(lora=LoRA(rank=2, targets=("stem", "inner")))
    trained = assert_engines_play(ROWS[name].simulation(model=model), engines)
    assert tree.is_finite(trained.server["params"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Own(lora=LoRA(rank=2, targets=("iner",))),
            "targets=iner: no linear layer or convolution has this name.*nearest: 'inner'",
        ),
        (Own(lora=LoRA(rank=2, targets=("fc",))), "targets=fc: no linear layer or convolution"),
        (
            Own(head=None, lora=LoRA(rank=2)),
            "with adapters, the head is also trained, so its name is needed; set model.head",
        ),
        (
            TorchvisionLoRA(
                name="vit_b_16",
                weights=None,
                image_size=None,
                lora=LoRA(rank=2, targets=("out_proj",)),
            ),
            "targets=out_proj: .*is a grouped convolution or a part of nn.MultiheadAttention",
        ),
    ],
)
def test_unsupported_layers_are_rejected(model, message):
    shape = (1, 6, 6) if isinstance(model, Own) else (3, 224, 224)
    with (
        pytest.raises(ConfigError, match=message),
        torch.device("cpu" if isinstance(model, Own) else "meta"),
    ):
        model.build(shape, 4)
