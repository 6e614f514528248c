"""A model that cannot read the data, or lacks a file, is bad input: found before the run begins."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedexp.algorithms.fedmultihead import FedMultiHead
from fedexp.core.errors import ConfigError
from fedexp.models import Model, Output
from fedexp.training.model_fit import model_file_errors
from toy_federation import TWO_TASKS, make_simulation


class Colours(nn.Module):
    """Made for `channels` channels and `classes` classes, whatever the images have."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.convolution, self.classifier = nn.Conv2d(channels, 4, 3), nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> Output:
        features = self.convolution(x).mean((2, 3))
        return Output(features, self.classifier(features))


@dataclass(frozen=True, kw_only=True)
class Fixed(Model):
    mixes_examples: ClassVar[bool] = False
    vectorises: ClassVar[bool] = True

    channels: int
    classes: int = 4

    def build(self, shape, num_classes):
        return Colours(self.channels, self.classes)


@dataclass(frozen=True, kw_only=True)
class Weighted(Fixed):
    def build(self, shape, num_classes):
        network = super().build(shape, num_classes)
        network.load_state_dict(torch.load("nowhere.pt"))
        return network


def test_error_names_both_shapes_if_a_model_has_other_channels():
    said = (
        r"model: its network cannot process images of 1 x 6 x 6 \(channels x height x width\):"
        r" .*expected input"
    )
    with pytest.raises(ConfigError, match=said):
        make_simulation(model=Fixed(channels=5))


def test_a_model_for_fewer_classes_is_rejected():
    with pytest.raises(ConfigError, match=r"have shape \[2, 1\], but must have shape \[2, "):
        make_simulation(model=Fixed(channels=1, classes=1))


def test_a_missing_weights_file_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"model: Weighted cannot read nowhere\.pt \(No such file"
    ):
        make_simulation(model=Weighted(channels=1))


def test_other_errors_of_a_model_are_not_hidden():
    with pytest.raises(OSError, match="no file name"), model_file_errors(Fixed(channels=1)):
        raise OSError("no file name")


def test_model_with_one_head_per_task_is_accepted():
    """Two tasks of one class each, of four classes: the model may have two outputs."""
    tasks = replace(TWO_TASKS, rounds_per_task=1, classes=[[0], [1]])
    simulation = make_simulation(FedMultiHead(), scenario=tasks, sizes=(2, 3))
    assert simulation.stages[0].federation.tasks == ((0,), (1,))
