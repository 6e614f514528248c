"""Batch norm on padded batches and on the vectorised engine."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.fedalign import FedAlign
from fedexp.algorithms.fedewc import FedEWC
from fedexp.algorithms.fedfomo import FedFOMO
from fedexp.algorithms.fedntd import FedNTD
from fedexp.algorithms.fedreg import FedReg
from fedexp.engine.base import EVALUATION_BATCH, EVALUATION_VALUES_CUDA, ClientRuntime
from fedexp.engine.batch_norm import batch_norm, uses_batch_statistics
from fedexp.engine.network import FunctionalNetwork, LiveNetwork
from fedexp.engine.sequential import Sequential
from fedexp.engine.vectorised.clients import ClientNetwork
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.models.cnn import CNN
from fedexp.models.resnet import BottleneckResNet, CifarResNet
from fedexp.testing import assert_equal
from fedexp.testing import train as train_with
from fedexp.training.rounds import play_round
from method_rows import stream
from test_algorithms import FIRST, NTD, EveryHook
from test_continual import ROWS as STREAMS
from test_vectorised import Closures, Traces, assert_same_training, recording, traces
from toy_federation import (
    LOCAL,
    Normed,
    make_simulation,
    play,
    random,
)

# clients of 1, 3, 7, 8, 6: one without a step, partial batches of two
THREES = replace(LOCAL, batch_size=3)
MODELS = {
    "batch statistics": CifarResNet(widths=(4, 8)),
    "running statistics": Normed(),
    "pooled convolutions": CNN(
        channels=(3,), kernel=3, padding=1, hidden=(8,), unit_features=None, batch_norm=True
    ),
    "bottlenecks": BottleneckResNet(widths=(4, 8), blocks=2),
}
SLOW = pytest.mark.slow
FEW = (
    *(("running statistics", None), ("running statistics", 2)),
    *(("batch statistics", 2), ("pooled convolutions", 2)),
)


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


def test_statistics_of_bf16_values_are_exact():
    """Autocast rounds the operands and the result of a matrix product to bf16."""
    x = (3 * random(50, 8, 36) + 10).bfloat16()
    mean, var = torch.zeros(8), torch.zeros(8)
    with torch.autocast("cpu", torch.bfloat16):
        batch_norm(torch.ones(50), x, mean, var, training=True, momentum=1.0)
    values = x.double().transpose(0, 1).flatten(1)
    assert_equal(mean.double(), values.mean(1), atol=1e-5)
    assert_equal(var.double(), values.var(1), atol=1e-4)


def test_models_that_normalise_by_the_test_batch_are_recognised():
    found = {
        name: uses_batch_statistics(model.build((1, 6, 6), 4)) for name, model in MODELS.items()
    }
    assert [name for name, theirs in found.items() if theirs] == ["batch statistics"]


def test_evaluation_batches_have_one_size_if_they_affect_the_result():
    class OnCuda(ClientRuntime):
        device = torch.device("cuda")

    def sizes(model):
        runtime = make_simulation(model=model).runtime
        return runtime.evaluation_batch, OnCuda(**vars(runtime)).evaluation_batch

    assert sizes(CifarResNet(widths=(4, 8))) == (EVALUATION_BATCH, EVALUATION_BATCH)
    pixels = 6 * 6  # of an image
    assert sizes(Normed()) == (EVALUATION_BATCH, EVALUATION_VALUES_CUDA // pixels)


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
        for name, model in MODELS.items()
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
