"""The vectorised engine's fast paths against slow simple ones. Some tests need a GPU."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Batch
from fedexp.core import tree
from fedexp.engine.base import Shared
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.vectorised import clients as clients_module
from fedexp.engine.vectorised import convolution
from fedexp.engine.vectorised import engine as engine_module
from fedexp.engine.vectorised import graphs as graphs_module
from fedexp.engine.vectorised.clients import ClientNetwork
from fedexp.engine.vectorised.convolution import apply_linear, convolve
from fedexp.engine.vectorised.engine import OutOfMemory, Vectorised
from fedexp.engine.vectorised.graphs import Graphs
from fedexp.models.cnn import CNN
from fedexp.testing import assert_equal, train
from fedexp.training.exchange import Exchange, sample
from test_algorithms import EveryHook, SignDescent
from toy_federation import LARGER, LOCAL, NTD, assemble, make_simulation, play, play_round

# the second convolution needs the gradient of its input
DEEP = CNN(channels=(3, 4), kernel=3, padding=1, hidden=(8,))
ALGORITHMS = [FedAvg(), NTD, EveryHook(pull=0.5), SignDescent(scale=0.5)]
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# A test that fails there leaves a transform active, so later tests fail too.
traces = pytest.mark.skipif(
    TORCH < (2, 8), reason="torch 2.6 cannot observe operations within torch.func"
)


def assert_same_training(actual, expected, atol=1e-12):
    for name in ("messages", "states", "losses", "buffers", "class_correct"):
        assert_equal(getattr(actual, name), getattr(expected, name), atol=atol)


def normal(*shape):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


# --- layers


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-5), (True, 2e-2)])
@pytest.mark.parametrize("dim", [0, None])
def test_linear_layers_of_several_clients_equal_torch(dim, bf16, tolerance):
    """With a student's weights, and with those of a teacher that all clients share (dim=None).

    Inside vmap on a CPU, torch would not convert the tensors to bf16.
    """
    x, weights, biases = (normal(*size).float() for size in ((3, 4, 5), (3, 2, 5), (3, 2)))
    if dim is None:
        weights, biases = (one[:1].expand_as(one) for one in (weights, biases))
    own = [weights, biases] if dim == 0 else [weights[0], biases[0]]
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = vmap(apply_linear, in_dims=(0, dim, dim))(x, *own)
        expected = torch.stack([F.linear(*each) for each in zip(x, weights, biases, strict=True)])
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- convolutions


def value_and_gradients(function, x, weight, bias):
    """Return a function's outputs for stacked tensors, and gradients of the outputs' cubes."""

    def loss(x, weight, bias):
        y = function(x, weight, bias)
        return (y**3).sum(), y

    gradients, value = vmap(grad(loss, argnums=(0, 1, 2), has_aux=True))(x, weight, bias)
    return value, gradients


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("kernel", "padding", "stride"),
    [
        ((3, 3), (1, 1), (1, 1)),
        ((5, 5), (2, 2), (1, 1)),
        ((1, 1), (0, 0), (1, 1)),
        ((3, 2), (0, 1), (1, 1)),
        ((5, 3), (4, 0), (1, 1)),
        ((6, 7), (0, 0), (1, 1)),
        # also such that no window has the last rows and columns
        ((3, 3), (1, 1), (2, 2)),
        ((3, 3), (1, 1), (3, 1)),
        ((3, 3), (1, 1), (2, 4)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3, 6])
def test_convolution_per_client_equals_vmap(channels, kernel, padding, stride, channels_last):
    x, weight, bias = normal(3, 2, channels, 8, 7), normal(3, 5, channels, *kernel), normal(3, 5)
    if channels_last:
        x, weight = (
            t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) for t in (x, weight)
        )
    ours = value_and_gradients(lambda *inputs: convolve(*inputs, stride, padding), x, weight, bias)
    torchs = value_and_gradients(
        lambda *inputs: F.conv2d(*inputs, padding=padding, stride=stride), x, weight, bias
    )
    torch.testing.assert_close(ours, torchs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("shape", "options", "taken"),
    [
        ((5, 4, 3, 3), {"padding": 1}, True),
        ((5, 4, 3, 3), {"padding": (1,), "stride": [1, 1]}, True),
        ((5, 4, 3, 3), {"stride": 2}, True),
        ((5, 4, 2, 3), {"stride": (3, 2), "padding": (0, 1)}, True),
        ((5, 4, 3, 3), {"dilation": 2}, False),
        ((6, 2, 3, 3), {"groups": 2}, False),
        ((5, 4, 3, 3), {"padding": "same"}, False),
        ((5, 4, 3, 3), {"padding": 3}, True),
    ],
    ids=str,
)
def test_only_plain_convolutions_run_per_client(shape, options, taken, monkeypatch):
    calls = Mock(wraps=convolution._Convolution.apply)
    monkeypatch.setattr(convolution._Convolution, "apply", calls)
    x, weight, bias = normal(3, 2, 4, 7, 7), normal(3, *shape), normal(3, shape[0])
    function = partial(F.conv2d, **options)
    expected = value_and_gradients(function, x, weight, bias)

    def under_the_mode(*inputs):
        with convolution.PerClientLayers():
            return function(*inputs)

    torch.testing.assert_close(
        value_and_gradients(under_the_mode, x, weight, bias), expected, rtol=1e-11, atol=1e-11
    )
    assert calls.call_count == taken


# --- chunks and memory


class Limited:
    """Replacement of `run_steps` on a device where at most `limit` clients fit."""

    def __init__(self, limit, error=None):
        self.limit, self.counts = limit, []
        self.error = error or torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB."
        )

    def __call__(self, clients, graphs):
        self.counts.append(clients.count)
        graphs_module.run_steps(clients, graphs)
        if clients.count > self.limit:
            raise self.error


@pytest.mark.parametrize("evaluate_local", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "error",
    [
        None,
        pytest.param(
            RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), marks=pytest.mark.slow
        ),
        pytest.param(RuntimeError("CUDA error: out of memory"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_out_of_memory_halves_the_chunk(error, evaluate_local, monkeypatch, caplog):
    """5 and 2 clients do not fit, so each is trained alone, also in the next round."""
    simulation = make_simulation(EveryHook(pull=0.5), participation=1.0)
    state = play(simulation, 1)
    before = tree.map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state.server
    )
    cohort = assemble(simulation, state, 2)
    states = tree.map(torch.clone, list(cohort.states))
    expected = train(Vectorised(1), simulation, state, cohort, evaluate_local)
    limited, engine = Limited(1, error), Vectorised()
    monkeypatch.setattr(engine_module, "run_steps", limited)
    with caplog.at_level(logging.WARNING, "fedexp"):
        trained = train(engine, simulation, state, cohort, evaluate_local)
    assert_same_training(trained, expected, atol=0)
    assert limited.counts == [5, 2, 1, 1, 1, 1, 1]
    assert [record.message for record in caplog.records] == [
        "out of memory with 5 clients at a time; repeating round 2 with 2",
        "out of memory with 2 clients at a time; repeating round 2 with 1",
    ]
    assert_equal(state.server, before)
    assert_equal(list(cohort.states), states)
    train(engine, simulation, state, cohort)
    assert limited.counts[7:] == [1] * 5


def test_one_client_that_does_not_fit_is_an_error(monkeypatch):
    simulation = make_simulation()
    monkeypatch.setattr(engine_module, "run_steps", Limited(0))
    with pytest.raises(
        OutOfMemory, match=r"try hardware.precision=bf16, .* smaller local.batch_size"
    ):
        train(Vectorised(), simulation, simulation.initial_state())


def test_cuda_graphs_need_cuda_and_float32():
    """torch's fused SGD reads a learning rate in memory as float32."""
    runtime = make_simulation().runtime
    assert not engine_module.can_be_recorded(runtime)
    assert not engine_module.can_be_recorded(replace(runtime, dtype=torch.float32))


def test_padding_repeats_an_example_of_the_same_client():
    """The label of another client's example, such as example 0, may be invalid here."""
    simulation = make_simulation(participation=1.0)
    cohort = assemble(simulation, simulation.initial_state(), 1)
    padded = clients_module.pad(cohort.schedules, simulation.runtime)
    parts = simulation.stages[0].federation.parts
    assert len(set(padded.steps)) > 1
    for i, client in enumerate(cohort.clients):
        assert set(padded.index[:, i].flatten().tolist()) == set(parts[client].tolist())


# --- local models on the test set


def test_stacked_models_are_evaluated_like_single_models():
    """100 random models on 20 images."""
    simulation = make_simulation(local=replace(LOCAL, batch_size=3))  # 9 images at a time
    runtime, server = simulation.runtime, simulation.initial_state().server
    stacked = {name: normal(100, *value.shape) for name, value in server["params"].items()}
    correct = engine_module.evaluate_together(runtime, stacked)
    expected = [
        runtime.evaluate({k: v[i] for k, v in stacked.items()}).class_correct for i in range(100)
    ]
    assert_equal(correct, torch.stack(expected))
    assert len(set(correct.sum(1).tolist())) > 5


# --- recorded steps


class Closures:
    """A capture that keeps the step itself."""

    def warm_up(self, step):
        step()

    def record(self, step):
        return step


class Traces:
    """A capture that keeps kernels and the memory that they work on, and never calls the step
    again, as CUDA does."""

    def __init__(self, fail=False):
        self.fail, self.recorded, self.replayed = fail, 0, 0
        self.frames = []

    def warm_up(self, step):
        step()

    def record(self, step):
        if self.fail:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        changed = [
            leaf for r in self.graphs._recorded.values() for leaf in changed_by_a_step(r.frame)
        ]
        before = [leaf.clone() for leaf in changed]
        traced = make_fx(lambda: step())()
        # tracing carries the step out, recording must not
        for leaf, value in zip(changed, before, strict=True):
            leaf.copy_(value)
        self.recorded += 1

        def replay():
            self.replayed += 1
            with torch.no_grad():
                traced()

        return replay


def changed_by_a_step(frame):
    return [
        *frame.params.values(),
        *frame.buffers.values(),
        *frame.memory["momentum"].values(),
        frame.losses,
    ]


def recording(capture, *options):
    """An engine that records its steps with `capture`, on whatever device."""
    engine = Vectorised(*options)
    engine._graphs = capture.graphs = Graphs(capture)
    return engine


@traces
@pytest.mark.parametrize(
    ("algorithm", "capture", "options"),
    [
        pytest.param(
            *(algorithm, capture, options),
            id=f"{type(algorithm).__name__}-{capture.__name__}-{options}",
            marks=()
            if isinstance(algorithm, EveryHook) and capture is Traces and not options
            else pytest.mark.slow,
        )
        for algorithm in ALGORITHMS
        for capture in (Closures, Traces)
        for options in ((), (3,))
    ],
)
def test_recorded_steps_equal_eager_steps(algorithm, capture, options):
    """A recording must not keep clients, learning rates and server states of its round."""
    # a recording takes seconds, and two clients need two
    few = {} if options else {"sizes": (3, 8, 7), "participation": 0.67}
    simulation = make_simulation(algorithm, model=DEEP, **few)
    state, capture = simulation.initial_state(), capture()
    engine = recording(capture, *options)
    for number in range(1, 5):
        cohort, lr = assemble(simulation, state, number), 0.1 / number
        plain, recorded = (
            one.train(Shared(algorithm, simulation.runtime, state.server, lr), cohort, True)
            for one in (Vectorised(*options, cuda_graphs=False), engine)
        )
        assert_same_training(recorded, plain, atol=1e-13)
        state.advance(play_round(simulation, state))
    if isinstance(capture, Traces):
        # at most once for each number of clients, in each of two frames
        assert 0 < capture.recorded <= 8
        assert capture.replayed > 2 * capture.recorded
    assert not engine._graphs.failed


@traces
def test_recorded_steps_keep_the_optimizer():
    """Finished clients keep their state, although larger graphs run on."""
    local = replace(LOCAL, keep_optimizer=True)
    simulation = make_simulation(local=local, sizes=LARGER, participation=1.0)
    state, engine = simulation.initial_state(), recording(Closures())
    for _ in range(3):
        plain, recorded = (
            train(one, simulation, state) for one in (Vectorised(cuda_graphs=False), engine)
        )
        assert_same_training(recorded, plain, atol=1e-13)
        state.advance(play_round(simulation, state))


@pytest.mark.parametrize(
    ("order", "beside"),
    [("teacher", 1), ("teacher teacher", 1), ("gradient teacher", 0), ("masked", 0)],
)
def test_teacher_runs_beside_only_work_before_the_first_gradient(monkeypatch, order, beside):
    """Later, the second stream could write into memory that the first stream still reads. The same
    holds for a mask that the step itself computes."""
    found = Mock(side_effect=lambda *_: nullcontext())
    monkeypatch.setattr(clients_module, "beside", found)
    simulation = make_simulation()
    runtime, server = simulation.runtime, simulation.initial_state().server
    x, y = runtime.load_train(torch.arange(4), None)
    net = ClientNetwork(runtime.net, {}, teacher=server["params"], start=Mock())
    batch = net.set_batch(Batch(x, y, torch.ones(4, dtype=x.dtype), 0))
    calls = {
        "teacher": lambda: net(server["params"], batch.x),
        "masked": lambda: net(server["params"], batch.x, torch.ones_like(batch.mask)),
        "gradient": lambda: net.gradient(
            lambda p: net(p, batch.x).logits.sum(), dict(server["params"])
        ),
    }
    for name in order.split():
        calls[name]()
    assert found.call_count == beside


@traces
def test_recorded_steps_with_clients_without_a_batch():
    """The last of two parts of the cohort has no other clients."""
    local = replace(LOCAL, drop_last=True)
    simulation = make_simulation(local=local, sizes=(1, 3, 7, 8), participation=1.0)
    state = simulation.initial_state()
    plain = train(Vectorised(cuda_graphs=False), simulation, state)
    assert_same_training(train(recording(Closures(), 3), simulation, state), plain)
    cohort = assemble(simulation, state, 1)
    cohort = cohort.take(cohort.longest_first())
    assert cohort.schedules[-1].steps == 0
    known = np.concatenate(simulation.stages[0].federation.parts)
    assert 0 not in known  # other examples may have no label
    assert np.isin(clients_module.pad(cohort.schedules, simulation.runtime).index, known).all()


@traces
def test_local_models_are_copied_between_recorded_steps():
    """The frames have more clients than still run."""
    simulation = make_simulation()
    state, engine = simulation.initial_state(), recording(Closures())
    for number in range(1, 4):  # run, recorded, replayed
        exchange = Exchange(simulation, simulation.algorithm, state.server, {}, number)
        cohort = exchange.assemble(sample(simulation, number))
        cohort = replace(cohort, marks=exchange.marks(cohort))
        plain, recorded = (
            one.train(
                Shared(simulation.algorithm, simulation.runtime, state.server, 0.1), cohort, False
            ).epochs
            for one in (Vectorised(), engine)
        )
        assert [len(models) for models in plain] == [len(marks) for marks in cohort.marks]
        torch.testing.assert_close(recorded, plain, rtol=0, atol=0)


@pytest.mark.slow
def test_recorded_steps_are_not_shared_with_other_algorithms_or_options():
    """The models have the same shape."""
    first, engine = make_simulation(NTD), recording(Closures())
    other = replace(first, algorithm=replace(NTD, tau=3.0))
    slower = make_simulation(replace(NTD, tau=3.0), local=replace(LOCAL, momentum=0.5))
    for simulation in (first, other, slower):
        state = simulation.initial_state()
        expected = train(Vectorised(), simulation, state)
        for _ in range(3):
            assert_same_training(train(engine, simulation, state), expected, atol=1e-13)
    assert len(engine._graphs._recorded) <= graphs_module.FRAMES


@traces
def test_steps_that_cannot_be_recorded_run_eagerly(caplog):
    simulation = make_simulation(NTD)
    state = play(simulation, 1)
    engine = recording(Traces(fail=True))
    with caplog.at_level(logging.WARNING, "fedexp"):
        for _ in range(2):
            assert_same_training(
                train(engine, simulation, state), train(Vectorised(), simulation, state)
            )
    (record,) = caplog.records
    assert "(operation not permitted when stream is capturing)" in record.message


# --- kernels launched


# --- bf16


def test_bf16_training_is_close_to_fp32():
    """bf16 keeps 8 bits: one rounding is at most 2^-9 = 0.2 %; after 6 steps, a few per cent of the
    change."""
    simulation = make_simulation(NTD, model=DEEP)
    state = tree.map(lambda leaf: leaf.float(), simulation.initial_state().server)
    cohort = assemble(simulation, simulation.initial_state(), 1)
    outcomes = {}
    for precision in ("fp32", "bf16"):
        module = simulation.runtime.net.module.float()
        runtime = replace(
            simulation.runtime, net=FunctionalNetwork(module, precision), dtype=torch.float32
        )
        engine = Vectorised()
        outcomes[precision] = engine.train(Shared(NTD, runtime, state, 0.1), cohort, False)
    full, half = (outcomes[p].messages["params"] for p in ("fp32", "bf16"))
    start = state["params"]
    change = torch.cat([(full[k] - start[k]).flatten() for k in full]).norm()
    difference = torch.cat([(half[k] - full[k]).flatten() for k in full]).norm()
    assert all(leaf.dtype == torch.float32 for leaf in half.values())
    assert 0 < difference < 0.05 * change
    torch.testing.assert_close(outcomes["bf16"].losses, outcomes["fp32"].losses, rtol=0.02, atol=0)


# --- on a GPU


def move(values, device, dtype=None):
    """A tree on a device, its floating-point leaves in `dtype`."""
    return tree.map(
        lambda leaf: (
            leaf.to(device, dtype if leaf.is_floating_point() else None)
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        values,
    )


class OnGpu:
    """A simulation on a CUDA device."""

    def __init__(self, simulation, dtype=torch.float64):
        self.simulation, self.dtype, self.device = simulation, dtype, torch.device("cuda")
        self.runtime = replace(simulation.runtime.to(self.device), dtype=dtype)
        self.runtime.net.module.to(dtype)

    def train(self, engine, server, cohort, lr=0.1, evaluate_local=True):
        """What comes back stays on the device."""
        cohort = replace(cohort, states=move(list(cohort.states), self.device, self.dtype))
        server = move(server, self.device, self.dtype)
        return engine.train(
            Shared(self.simulation.algorithm, self.runtime, server, lr), cohort, evaluate_local
        )


@pytest.mark.gpu
@every_algorithm
def test_training_on_a_gpu_equals_the_cpu(algorithm):
    """In float64, without CUDA graphs."""
    simulation = make_simulation(algorithm, model=DEEP, participation=1.0)
    state, gpu, engine = (
        simulation.initial_state(),
        OnGpu(simulation),
        Vectorised(),
    )
    for number in range(1, 4):
        cohort = assemble(simulation, state, number)
        expected = simulation.engine.train(
            Shared(algorithm, simulation.runtime, state.server, 0.1 / number), cohort, True
        )
        trained = gpu.train(engine, state.server, cohort, 0.1 / number)
        on_host = {name: move(value, "cpu") for name, value in vars(trained).items()}
        assert_same_training(replace(trained, **on_host), expected, atol=1e-11)
        state.advance(play_round(simulation, state))
    assert engine._graphs is None


@pytest.mark.gpu
@every_algorithm
def test_gpu_graphs_equal_eager_steps(algorithm):
    """In float32, in rounds with other clients, server states and learning rates."""
    simulation = make_simulation(algorithm, model=DEEP)
    state, gpu = simulation.initial_state(), OnGpu(simulation, torch.float32)
    eager, engine = (Vectorised(cuda_graphs=graphs) for graphs in (False, True))
    for number in range(1, 6):
        cohort, lr = assemble(simulation, state, number), 0.1 / number
        plain, recorded = (
            gpu.train(one, state.server, cohort, lr, False) for one in (eager, engine)
        )
        assert_same_training(recorded, plain, atol=1e-5)
        state.advance(play_round(simulation, state))
    assert not engine._graphs.failed
    assert any(frame.replays for frame in engine._graphs._recorded.values())


@pytest.mark.gpu
def test_gpu_streams_write_to_memory_of_the_main_stream(monkeypatch):
    """Memory that one side stream has freed may still be in use when another one writes."""
    allocated, empty_stack = [], tree.empty_stack

    def recording(leaf, count):
        allocated.append(torch.cuda.current_stream())
        return empty_stack(leaf, count)

    monkeypatch.setattr(tree, "empty_stack", recording)
    x, weight = normal(3, 2, 6, 6, 6).cuda(), normal(3, 5, 6, 3, 3).cuda()
    vmap(grad(lambda *inputs: (convolve(*inputs, padding=1) ** 2).sum(), argnums=(0, 1)))(x, weight)
    assert allocated == [torch.cuda.current_stream()] * 3


@pytest.mark.gpu
def test_gpu_streams_do_not_disturb_each_other():
    """The sizes are those of training, so that the streams run at the same time."""

    def gradients(x, weight):
        return grad(lambda *inputs: (convolve(*inputs, padding=2) ** 2).mean(), argnums=(0, 1))(
            x, weight
        )

    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(20):
        x = torch.randn(10, 50, 16, 16, 32, device="cuda", generator=generator).permute(
            0, 1, 4, 2, 3
        )
        weight = torch.randn(10, 64, 5, 5, 32, device="cuda", generator=generator).permute(
            0, 1, 4, 2, 3
        )
        together = vmap(gradients)(x, weight)
        for i in range(10):
            alone = [t[i].clone().requires_grad_() for t in (x, weight)]
            expected = torch.autograd.grad((F.conv2d(*alone, padding=2) ** 2).mean(), alone)
            torch.testing.assert_close(
                [t[i] for t in together], list(expected), rtol=1e-3, atol=1e-6
            )
