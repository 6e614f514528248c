"""Batch norm on padded batches and on the vectorised engine."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from fedexp.algorithms.fedalign import FedAlign
from fedexp.algorithms.fedewc import FedEWC
from fedexp.algorithms.fedfomo import FedFOMO
from fedexp.algorithms.fedntd import FedNTD
from fedexp.algorithms.fedreg import FedReg
from fedexp.algorithms.moon import Moon
from fedexp.core import tree
from fedexp.engine.base import EVALUATION_BATCH, EVALUATION_BATCH_CUDA, ClientRuntime
from fedexp.engine.batch_norm import batch_norm, ignore_padding, uses_batch_statistics
from fedexp.engine.network import FunctionalNetwork, LiveNetwork
from fedexp.engine.sequential import Sequential
from fedexp.engine.vectorised.clients import ClientNetwork
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.models.resnet import BottleneckResNet, CifarResNet, TorchvisionResNet
from fedexp.testing import assert_equal
from fedexp.testing import train as train_with
from fedexp.training.rounds import play_round
from method_rows import stream
from test_algorithms import FIRST, NTD, SHIPPED, EveryHook
from test_continual import ROWS as STREAMS
from test_vectorised import Closures, Traces, assert_same_training, recording, traces
from toy_federation import (
    LOCAL,
    Noise,
    Normed,
    assemble,
    make_simulation,
    play,
    random,
)

# clients of 1, 3, 7, 8, 6: one without a step, partial batches of two
THREES = replace(LOCAL, batch_size=3)
RESNETS = {
    "batch statistics": CifarResNet(widths=(4, 8)),
    "running statistics": Normed(),
    "bottlenecks": BottleneckResNet(widths=(4, 8), blocks=2),
}
SLOW = pytest.mark.slow
FEW = (("running statistics", None), ("running statistics", 2), ("batch statistics", 2))


# --- the layer


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 2, 4)], ids=str)
def test_padding_does_not_affect_statistics(shape, affine):
    """Rows of examples and running statistics equal torch's without padding. Padding rows and all
    gradients equal the formula's."""
    x, mask = random(*shape), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    rows = mask > 0
    weight, bias = (random(3, 1)[:, 0] + 2, random(1, 3)[0]) if affine else (None, None)
    mean, var = random(3, 3)[0], random(3, 4)[:, 0] ** 2
    ours, theirs = (mean.clone(), var.clone()), (mean.clone(), var.clone())
    inputs = [leaf.clone().requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    values = batch_norm(mask, inputs[0], *ours, *(inputs[1:] or (None, None)), True, 0.3, 1e-3)
    whole = x[rows].requires_grad_()
    expected = F.batch_norm(whole, *theirs, weight, bias, True, 0.3, 1e-3)
    assert_equal(values[rows], expected, atol=1e-13)
    assert_equal(ours, theirs, atol=1e-13)
    count = 3 * x[0, 0].numel()
    dims, view = (0, *range(2, x.dim())), (-1, *[1] * (x.dim() - 2))

    def normalise_plainly(x, weight=None, bias=None):
        centre = x[rows].sum(dims) / count
        spread = ((x[rows] - centre.view(view)) ** 2).sum(dims) / count
        z = (x - centre.view(view)) / (spread + 1e-3).sqrt().view(view)
        return z if weight is None else z * weight.view(view) + bias.view(view)

    copies = [leaf.detach().clone().requires_grad_() for leaf in inputs]
    assert_equal(values, normalise_plainly(*copies), atol=1e-13)
    some = random(*shape, 1)[..., 0]
    grads = [
        torch.autograd.grad((some * out**2).sum(), of)
        for out, of in ((values, inputs), (normalise_plainly(*copies), copies))
    ]
    assert_equal(grads[0], grads[1], atol=1e-12)


def test_stacked_clients_equal_single_clients():
    """Each client has a mask, weights and running statistics."""
    x, masks = (
        random(4, 6, 3, 5, 5),
        (torch.arange(6) < torch.tensor([[6], [2], [3], [5]])).double(),
    )
    weight, mean, var = random(4, 3), random(4, 3), random(3, 4).T.contiguous() ** 2

    def step(x, mask, weight, mean, var):
        def loss(x, weight):
            running = mean.clone(), var.clone()
            return (
                batch_norm(mask, x, *running, weight, None, True) ** 3 * mask[:, None, None, None]
            ).sum(), running

        return grad(loss, argnums=(0, 1), has_aux=True)(x, weight)

    together = vmap(step)(x, masks, weight, mean, var)
    alone = [step(*(leaf[i] for leaf in (x, masks, weight, mean, var))) for i in range(4)]
    assert_equal(together, tree.stack(alone), atol=1e-12)


def test_a_batch_of_padding_only_is_finite():
    """Results of finished clients are discarded, but must not be NaN."""
    x, mask = random(2, 3, 4, 4).requires_grad_(), torch.zeros(2, dtype=torch.float64)
    values = batch_norm(mask, x, None, None, None, None, True)
    (gradient,) = torch.autograd.grad(values.sum(), x)
    assert values.isfinite().all()
    assert gradient.isfinite().all()


def test_batch_statistics_of_bf16_inputs_are_summed_in_fp32():
    """The mean of 1,000 values near 100, which bf16 rounds by up to half a unit, is exact to a
    thousandth."""
    x = (100 + random(10, 1, 100).float()).to(torch.bfloat16)
    mean, var = torch.zeros(1), torch.ones(1)
    values = batch_norm(torch.ones(10), x, mean, var, torch.ones(1), torch.zeros(1), True, 1.0)
    assert values.dtype == torch.bfloat16
    assert_equal(mean, x.double().mean().float()[None], atol=1e-3)
    assert_equal(var, x.double().var().float()[None], atol=1e-2)


def test_the_mask_applies_to_layers_in_training_only():
    layer, x = nn.BatchNorm2d(3).double(), random(4, 3, 2, 2)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0]).double()
    layer(x)  # so that running statistics differ from those of the batch
    layer.eval()
    plain = layer(x)
    with ignore_padding(mask):
        assert_equal(layer(x), plain)
        counted = layer.train()(x)
    assert_equal(counted[mask > 0], nn.BatchNorm2d(3).double()(x[mask > 0]), atol=1e-13)
    assert layer.num_batches_tracked == 2
    with ignore_padding(None):
        assert_equal(layer(x), nn.BatchNorm2d(3).double()(x), atol=0)


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="the mask has 2 values, but the input has 3 rows"):
        batch_norm(torch.ones(2), torch.zeros(3, 1), None, None, None, None, True)


def test_models_that_normalise_by_the_test_batch_are_recognised():
    found = {
        name: uses_batch_statistics(model.build((1, 6, 6), 4)) for name, model in RESNETS.items()
    }
    assert found == {"batch statistics": True, "running statistics": False, "bottlenecks": False}


def test_evaluation_batches_have_one_size_if_they_affect_the_result():
    class OnCuda(ClientRuntime):
        device = torch.device("cuda")

    def sizes(model):
        runtime = make_simulation(model=model).runtime
        return runtime.evaluation_batch, OnCuda(**vars(runtime)).evaluation_batch

    assert sizes(CifarResNet(widths=(4, 8))) == (EVALUATION_BATCH, EVALUATION_BATCH)
    assert sizes(Normed()) == (EVALUATION_BATCH, EVALUATION_BATCH_CUDA)


# --- the network of one client


def test_client_network_equals_live_network():
    """Differentiated parameters use train mode; others use eval mode with the received
    statistics."""
    frozen = FunctionalNetwork(Normed().build((1, 6, 6), 4).double(), "fp64")
    params = {k: v.detach().clone() for k, v in frozen.module.named_parameters()}
    live = LiveNetwork(frozen)
    live.load(params, frozen.buffers())
    ours = ClientNetwork(frozen, frozen.buffers())
    x, other = random(4, 1, 6, 6), random(3, 1, 6, 6)

    def objective(net):
        def value(p):
            teacher = net(params, x).logits
            return ((net(p, x).logits - teacher) ** 2).sum() + net(p, other).logits.sum()

        return value

    for _ in range(2):
        results = [net.gradient(objective(net), params) for net in (live, ours)]
        assert_equal(results[1], results[0], atol=1e-13)
        assert_equal(ours.buffers(), live.buffers(), atol=1e-13)
    assert ours.buffers()["norm.num_batches_tracked"] == 4
    assert_equal(frozen.buffers()["norm.num_batches_tracked"], torch.tensor(0))


# --- the engine


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        pytest.param(model, engine, id=f"{name}-{engine.chunk}", marks=marks)
        for name, model in RESNETS.items()
        for engine in (Vectorised(), Vectorised(2), Vectorised(3))
        for marks in [() if (name, engine.chunk) in FEW else SLOW]
    ],
)
def test_vectorised_engine_equals_sequential_engine(engine, model):
    """With momentum, weight decay, augmentation, a teacher in eval mode and local evaluation."""
    simulation = make_simulation(FedNTD(**NTD), THREES, model=model, participation=1.0)
    state = simulation.initial_state()
    for _ in range(2):
        expected, trained = (
            train_with(each, simulation, state, evaluate_local=True)
            for each in (Sequential(), engine)
        )
        assert_same_training(trained, expected)
        assert all(
            not torch.equal(v[1], v[3]) for k, v in trained.buffers.items() if "running" in k
        )
        state.advance(play_round(simulation, state))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=row.cls.__name__, marks=() if row.cls in (FedFOMO, FedReg, EveryHook) else SLOW
        )
        for row in FIRST.values()
        if row.cls is not FedAlign
    ],
)
def test_engines_agree_for_every_algorithm(row):
    """In the second round, when clients have states."""
    simulation = row.simulation(model=Normed(), local=THREES)
    state = play(simulation, 1)
    expected, trained = (
        train_with(engine, simulation, state, evaluate_local=True)
        for engine in (Sequential(), Vectorised())
    )
    assert_same_training(trained, expected)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.cls.__name__}{number}", marks=() if row.cls is FedEWC else SLOW)
        for number, row in enumerate(STREAMS)
    ],
)
def test_engines_agree_for_every_stream_algorithm(row):
    """Over four rounds of two tasks."""
    servers = []
    for engine in (Sequential(), Vectorised()):
        simulation = replace(stream(row.make(), model=Normed()), engine=engine)
        servers.append(play(simulation, 4).server)
    assert_equal(servers[1], servers[0], atol=1e-10)


@pytest.mark.slow
def test_engines_agree_for_fedalign_on_bottlenecks():
    """The narrow last stage leaves padding out too."""
    (row,) = (row for row in SHIPPED if row.cls is FedAlign)
    simulation = row.simulation(model=BottleneckResNet(widths=(4, 8), blocks=1), local=THREES)
    state = play(simulation, 1)
    ours, theirs = (
        train_with(each, simulation, state, evaluate_local=True)
        for each in (Vectorised(), Sequential())
    )
    assert_same_training(ours, theirs)


def larger(monkeypatch, times):
    """Enlarge the 6 x 6 images."""
    read = Noise.read

    def repeated(self):
        arrays = read(self)
        return arrays | {
            name: arrays[name].repeat(times, 1).repeat(times, 2) for name in ("x_train", "x_test")
        }

    monkeypatch.setattr(Noise, "read", repeated)


@SLOW
@pytest.mark.parametrize(
    ("model", "times", "sizes"),
    [
        (TorchvisionResNet(depth=18, weights=None), 7, (3, 5, 6)),
        (TorchvisionResNet(depth=50, weights=None), 7, (3, 5, 6)),
        (CifarResNet(widths=(64, 128, 256, 512)), 2, (3, 5)),
        (BottleneckResNet(widths=(16, 32, 64), blocks=6), 2, (3, 5)),
    ],
)
def test_engines_agree_for_published_networks(model, times, sizes, monkeypatch):
    """On 42 x 42 pixels the last stage of torchvision's has four. With one, a batch of two examples
    has two values of a channel, whose variance can be so small that rounding errors grow without
    bound. The four stages of resnet10 need 9 x 9."""
    larger(monkeypatch, times)
    local = replace(THREES, epochs=1, lr=0.01)
    simulation = make_simulation(local=local, model=model, sizes=sizes, participation=1.0)
    state = simulation.initial_state()
    ours, theirs = (train_with(each, simulation, state) for each in (Vectorised(), Sequential()))
    for name in ("messages", "losses", "buffers"):
        assert_equal(getattr(ours, name), getattr(theirs, name), atol=1e-8)


@pytest.mark.parametrize("capture", [Closures, pytest.param(Traces, marks=[SLOW, traces])])
def test_recorded_steps_keep_running_statistics(capture):
    """Also those of clients that finish early."""
    simulation = make_simulation(FedNTD(**NTD), THREES, model=Normed(), participation=1.0)
    state, engine = simulation.initial_state(), recording(capture())
    for _ in range(3):
        expected = train_with(Vectorised(cuda_graphs=False), simulation, state, evaluate_local=True)
        assert_same_training(
            train_with(engine, simulation, state, evaluate_local=True), expected, atol=1e-13
        )
        state.advance(play_round(simulation, state))
    assert not engine._graphs.failed


def test_moon_starts_from_the_initial_model_and_statistics():
    """A new client's previous model has the initial running statistics, not the global model's."""
    moon, servers = Moon(mu=1.0, tau=0.5, projection=0), []
    for engine in ("sequential", "vectorised"):
        simulation = make_simulation(moon, THREES, model=Normed(), participation=0.6, engine=engine)
        state = play(simulation, 1)
        cohort = assemble(simulation, state, 2)
        late = next(
            each
            for client, each in zip(cohort.clients, cohort.states, strict=True)
            if client not in state.clients
        )
        assert_equal(late["previous"], simulation.initial | simulation.initial_buffers)
        assert_equal(late["previous"]["norm.running_mean"], torch.zeros(3, dtype=torch.float64))
        assert not torch.equal(
            state.server["buffers"]["norm.running_mean"], late["previous"]["norm.running_mean"]
        )
        servers.append(play(simulation, 5).server)
    assert_equal(servers[1], servers[0], atol=1e-12)
