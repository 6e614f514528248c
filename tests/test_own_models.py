"""Own networks that return logits; networks of torchvision and timm by name."""

import http.server
import socket
import threading
import urllib.error
import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fedexp.algorithms.fedmultihead import FedMultiHead
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.rng import seeded
from fedexp.models.own import OwnModel, Reading
from fedexp.models.pretrained import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    WITHOUT_BRANCHES,
    Timm,
    Torchvision,
    require_answer,
)
from fedexp.testing import train
from fedexp.training.model_fit import model_file_errors
from fedexp.training.rounds import play_round
from test_algorithms import SHIPPED, assert_equal
from test_continual import ROWS as CONTINUAL
from toy_federation import (
    ENGINES,
    LOCAL,
    SIZES,
    TWO_TASKS,
    assert_engines_play,
    engines_compared,
    first_of_each_class,
    make_simulation,
    one_of_each_kind,
    play,
)

ROWS = first_of_each_class(SHIPPED, CONTINUAL)
# what an algorithm wants of a model
MODEL = ("adapt", "needs_features", "needs_head", "must_train", "heads")


# what needs more than logits; FedAlign: a stage
FEATURES = (
    *("AFCL", "CCVR", "FedCBDR", "GLFC", "FedALA", "FedDecorr", "FedMultiHead"),
    *("FedPAC", "FedProto", "FedRep", "FedRoD", "MFCL", "Moon"),
)


class Net(nn.Module):
    """An ordinary network: it returns a tensor, and its last layer is called fc."""

    def __init__(self, shape: Any, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 3, 3)
        self.inner = nn.Linear(3, 6)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.dropout(self.inner(self.stem(x).relu().mean((2, 3))).relu()))


@dataclass(frozen=True, kw_only=True)
class Own(OwnModel):
    dropout: float = 0.0

    def network(self, shape: Any, num_classes: int) -> nn.Module:
        return Net(shape, num_classes, self.dropout)


class Fast(Own):
    vectorises: ClassVar[bool] = True


def test_splitting_off_the_head_keeps_the_outputs():
    with seeded(0):
        whole = Net((1, 6, 6), 4)
    with seeded(0):
        split = Own(head="fc").build((1, 6, 6), 4)
    x = torch.randn(5, 1, 6, 6)
    output = split(x)
    features = whole.inner(whole.stem(x).relu().mean((2, 3))).relu()
    torch.testing.assert_close(output.logits, whole(x), rtol=0, atol=0)
    torch.testing.assert_close(output.features, features, rtol=0, atol=0)
    assert split.training


@one_of_each_kind(
    "name", ROWS, *MODEL, "client_setup", "local_step", "refine", "roles", "exchanges"
)
def test_algorithms_run_on_own_networks_or_reject_them(name):
    row, lacking = ROWS[name], {"FedAlign": "no last stage", "FedBN": "no batch norm"}
    if name in lacking:
        with pytest.raises(ConfigError, match=lacking[name]):
            row.simulation(model=Own(head="fc"))
        return
    for model in (Own(head="fc"), Own()):
        if name in FEATURES and model.head is None:
            with pytest.raises(
                ConfigError, match=rf"model: {name} needs .*head: fc .*linear layers: inner, fc"
            ):
                row.simulation(model=model)
        else:
            state = play(row.simulation(model=model), row.rounds)
            assert tree.is_finite(state.server["params"])


@engines_compared
@pytest.mark.parametrize("head", ["fc", None])
def test_engines_agree_on_own_networks(head, engines):
    assert_engines_play(ROWS["FedNTD"].simulation(model=Fast(head=head)), engines)


class Idle(Net):
    """A network with a layer that its forward pass does not use."""

    def __init__(self, shape: Any, num_classes: int, dropout: float = 0.0):
        super().__init__(shape, num_classes, dropout)
        self.idle = nn.Linear(3, 2)


@engines_compared
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_unused_parameters_have_a_zero_gradient(decay, engines):
    """They change only by weight decay, as in torch.optim with a zero gradient."""
    local = replace(LOCAL, weight_decay=decay)
    simulation = make_simulation(model=FastOf(make=Idle), local=local)
    trained = assert_engines_play(simulation, engines, 1).server["params"]
    start, end = (each["network.idle.weight"] for each in (simulation.initial, trained))
    assert torch.equal(end, start) if decay == 0 else (end.abs() < start.abs()).all()


@pytest.mark.parametrize("engine", ["sequential", pytest.param("workers", marks=pytest.mark.slow)])
def test_dropout_depends_only_on_client_and_round(engine):
    """Dropout is the same in one process and in two, whatever was drawn before, and changes every
    round."""
    torch.manual_seed(1)
    model = Own(head="fc", dropout=0.5)
    first = play(make_simulation(model=model), 2)
    torch.manual_seed(2)
    torch.rand(7)
    other = play(replace(make_simulation(model=model), engine=ENGINES[engine]), 2)
    assert_equal(other.server, first.server, atol=1e-12)
    without = play(make_simulation(model=Own(head="fc")), 2)
    assert not torch.equal(
        without.server["params"]["classifier.weight"], first.server["params"]["classifier.weight"]
    )


class Single(Net):
    """A network with two tensors without dimensions: a parameter and a running mean."""

    def __init__(self, shape: Any, num_classes: int, dropout: float = 0.0):
        super().__init__(shape, num_classes, dropout)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * x.detach().mean())
        return self.scale * super().forward(x)


def test_scalar_tensors_are_averaged():
    """The mean of the local scales s_k and running means m_k is sum_k p_k s_k and sum_k p_k m_k,
    where p_k are the clients' shares of the examples."""
    simulation = make_simulation(model=Of(make=Single), participation=1.0)
    result = play_round(simulation, simulation.initial_state())
    trained = train(simulation.engine, simulation, simulation.initial_state())
    p = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    for found, local in (
        (result.server["buffers"]["network.mean"], trained.buffers["network.mean"]),
        (result.server["params"]["network.scale"], trained.messages["params"]["network.scale"]),
    ):
        torch.testing.assert_close(found, p @ local, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["FedDF", "Flashback"])
def test_server_dropout_depends_only_on_the_round(name):
    """The server seeds dropout from the run's seed and the round. Two runs with one seed therefore
    agree, whatever the state of torch's global generator."""
    model, states = Own(head="fc", dropout=0.5), []
    for noise in (1, 2):
        simulation = ROWS[name].simulation(model=model)
        states.append(simulation.initial_state())
        for _ in range(3):
            torch.manual_seed(noise)
            states[-1].advance(play_round(simulation, states[-1]))
    assert_equal(states[1].server, states[0].server, atol=0)


class Scaled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Tuple(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


class Few(Net):
    def __init__(self, shape: Any, num_classes: int):
        super().__init__(shape, 1)


class Missing(Net):
    def __init__(self, shape: Any, num_classes: int):
        super().__init__(shape, num_classes)
        torch.load("nowhere.pt")


@dataclass(frozen=True, kw_only=True)
class Of(OwnModel):
    """A network class, built for images with a fixed number of channels."""

    make: Any
    channels: int = 1

    def network(self, shape: Any, num_classes: int) -> nn.Module:
        return self.make((self.channels, *shape[1:]), num_classes)


class FastOf(Of):
    vectorises: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Own(head="fcc"),
            r"model.head=fcc: must be the name of the last layer.*nearest: 'fc'.*layers: inner, fc",
        ),
        (Own(head="stem"), r"model.head=stem: must be the name of the last layer, a linear layer"),
        (Of(make=Scaled, head="fc"), r"model.head=fc: must be the last layer"),
        (
            Of(make=Tuple),
            r"the network must return logits.* \[examples, classes\], but it returned tuple",
        ),
        (
            Of(make=Net, channels=3, head="fc"),
            r"model: its network cannot process images of 1 x 6 x 6 .*3 channels",
        ),
        (
            Own(freeze=("stemm",)),
            r"model.freeze=stemm: .* no module or.*nearest: 'stem'.*names are: stem, inner, fc",
        ),
        (Own(freeze=("stem", "inner", "fc")), r"all parameters are frozen"),
        (Of(make=Few), r"have shape \[2, 1\], but must have shape \[2, "),
        (Of(make=Missing), r"model: Of cannot read nowhere\.pt \(No such file"),
    ],
)
def test_invalid_networks_are_rejected(model, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_simulation(model=model)
    assert len(str(error.value).splitlines()) == 1


def test_other_errors_of_a_model_are_not_hidden():
    with pytest.raises(OSError, match="no file name"), model_file_errors(Own()):
        raise OSError("no file name")


def test_model_with_one_head_per_task_is_accepted():
    """Two tasks of one class each, of four classes: the model may have two outputs."""
    tasks = replace(TWO_TASKS, rounds_per_task=1, classes=[[0], [1]])
    simulation = make_simulation(FedMultiHead(), scenario=tasks, sizes=(2, 3))
    assert simulation.stages[0].federation.tasks == ((0,), (1,))


def test_freeze_names_parts_or_the_backbone():
    simulation = make_simulation(model=Own(head="fc", freeze=("stem", "inner.bias")))
    assert set(simulation.initial) == {
        "backbone.inner.weight",
        "classifier.weight",
        "classifier.bias",
    }
    simulation = make_simulation(model=Own(head="fc", freeze=("backbone",)))
    assert set(simulation.initial) == {"classifier.weight", "classifier.bias"}
    assert set(play(simulation, 1).server["params"]) == {"classifier.weight", "classifier.bias"}


# --- torchvision


def torchvision(**changes: Any) -> Torchvision:
    return Torchvision(**{"name": "resnet18", "weights": None, "image_size": None} | changes)


@pytest.fixture
def weights(tmp_path):
    """Return a network for 1000 classes and a file with its weights, as published by
    torchvision."""
    from torchvision.models import resnet18

    with seeded(3):
        network = resnet18(weights=None)
    torch.save(network.state_dict(), tmp_path / "resnet18.pth")
    return network.eval(), tmp_path / "resnet18.pth"


def normalised(values, m, s):
    return (values - torch.tensor(m).view(3, 1, 1)) / torch.tensor(s).view(3, 1, 1)


def test_torchvision_weights_get_normalised_images(weights):
    """Images normalised for the data set are normalised for ImageNet: p = x * s + m, (p - M) /
    S."""
    network, path = weights
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = torchvision(weights=str(path)).build((3, 32, 32), 10).eval()
    mean, std = (0.49, 0.48, 0.44), (0.2, 0.3, 0.25)
    built.reading.set_data_normalisation(mean, std)
    pixels = torch.rand(2, 3, 32, 32)
    network.fc = nn.Identity()
    expected = network(normalised(pixels, IMAGENET_MEAN, IMAGENET_STD))
    features = built(normalised(pixels, mean, std)).features
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
    assert built.classifier.out_features == 10


def test_normalisation_matches_torchvision():
    """For all networks. GoogLeNet and Inception with weights convert images from ImageNet's
    normalisation."""
    from torchvision import models

    for name in models.list_models(module=models):
        wanted = models.get_model_weights(name).DEFAULT.transforms()
        mean, std = torchvision(name=name).normalisation()
        if name in WITHOUT_BRANCHES:
            kind = models.GoogLeNet if name == "googlenet" else models.Inception3
            with torch.device("meta"):
                network = kind(aux_logits=False, transform_input=True, init_weights=False)
            pixels = torch.rand(2, 3, 4, 4)
            given = normalised(pixels, wanted.mean, wanted.std)
            torch.testing.assert_close(
                normalised(pixels, mean, std), network._transform_input(given)
            )
        else:
            assert (list(mean), list(std)) == (wanted.mean, wanted.std), name


def test_grey_images_are_repeated_and_resized():
    reading = Reading((4, 4), None, None)
    x = torch.rand(2, 1, 8, 8)
    read = reading(x)
    assert read.shape == (2, 3, 4, 4)
    # By hand: halving with antialias is the mean of pixels weighted 1, 3, 3, 1 in each direction,
    # away from the edge.
    weights = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    assert read[0, 1, 1, 2].item() == pytest.approx(
        (weights[:, None] * weights * x[0, 0, 1:5, 3:7]).sum().item(), abs=1e-6
    )


def test_weights_of_another_network_are_rejected(weights):
    with pytest.raises(
        ConfigError, match=r"model.weights=.* must be the state dict of torchvision's resnet34"
    ):
        torchvision(name="resnet34", weights=str(weights[1])).build((3, 32, 32), 10)
    with pytest.raises(
        ConfigError, match=r"model.name=resnet18: needs images with 1 or 3 channels, but .* have 4"
    ):
        torchvision().build((4, 32, 32), 10)


def test_published_weights_are_loaded_or_reported_missing(weights, monkeypatch):
    from torchvision.models import ResNet18_Weights

    network, _ = weights
    state = network.state_dict()
    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", lambda self, **_: state)
    built = torchvision(weights="DEFAULT", freeze=("backbone",)).build((3, 32, 32), 10)
    torch.testing.assert_close(built.backbone.conv1.weight, network.conv1.weight, rtol=0, atol=0)
    assert [k for k, p in built.named_parameters() if p.requires_grad] == [
        "classifier.weight",
        "classifier.bias",
    ]

    def offline(self, **_):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", offline)
    with pytest.raises(
        ConfigError,
        match=r"the weights for resnet18 cannot be downloaded from https://\S+\.pth .*<file>",
    ):
        torchvision(weights="DEFAULT").build((3, 32, 32), 10)


def test_weights_whose_server_does_not_answer_are_named_at_once():
    """A closed port refuses connections; a server that lacks the file answers."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/model.safetensors"
        with pytest.raises(ConfigError, match=rf"weights for vit .* from {address} \(.*refused"):
            require_answer("vit", address)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        require_answer("vit", f"http://127.0.0.1:{server.server_port}/model.safetensors")
        thread.join()


# --- timm


def vit(**changes: Any) -> Timm:
    """Return timm's smallest vision transformer."""
    return Timm(**{"name": "test_vit", "weights": None, "image_size": 32} | changes)


def test_timm_networks_get_resized_normalised_images():
    timm = pytest.importorskip("timm")
    with seeded(5):
        network = timm.create_model("test_vit", num_classes=4).eval()
    with seeded(5):
        built = vit(image_size=None).build((3, 32, 32), 4).eval()
    wants = timm.data.resolve_model_data_config(network)
    assert built.reading.size == wants["input_size"][1:]
    built.reading.set_data_normalisation((0.5,) * 3, (0.25,) * 3)
    pixels = torch.rand(2, 3, *wants["input_size"][1:])
    mean, std = (torch.tensor(wants[key]).view(3, 1, 1) for key in ("mean", "std"))
    expected = network((pixels - mean) / std)
    torch.testing.assert_close(built((pixels - 0.5) / 0.25).logits, expected, rtol=1e-4, atol=1e-5)


def test_timm_does_not_try_again_if_no_server_answers(monkeypatch):
    pytest.importorskip("timm")
    asked = []

    def offline(request, timeout):
        asked.append(request.full_url)
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(ConfigError, match=r"for test_vit cannot be .*/model.safetensors .*no rou"):
        vit(weights="DEFAULT").build((3, 32, 32), 10)
    assert len(asked) == 1


def test_timm_weights_are_read_from_a_file(tmp_path):
    timm = pytest.importorskip("timm")
    with seeded(6):
        network = timm.create_model("test_vit", num_classes=1000)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    built = vit(weights=str(tmp_path / "vit.pth"), image_size=None).build((3, 32, 32), 4)
    torch.testing.assert_close(
        built.backbone.blocks[0].mlp.fc1.weight, network.blocks[0].mlp.fc1.weight, rtol=0, atol=0
    )
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(
        ConfigError, match=r"model.weights=.*other.pth: .* timm's weights for test_vit"
    ):
        vit(weights=str(tmp_path / "other.pth")).build((3, 32, 32), 4)
    with pytest.raises(
        ConfigError,
        match=r"model.name=test_vitt: timm has no network with this name \(nearest: 'test_vit",
    ):
        vit(name="test_vitt").build((3, 32, 32), 4)
