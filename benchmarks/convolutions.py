"""Check and time the vectorised engine's Triton convolutions on a CUDA device, in 100 seconds.

- check: their results and gradients against float64, beside those of the usual path
- time: a local step of FedAvg and FedNTD with 1, 4 and 10 clients on both paths, and whether
  recorded steps have the bits of eager steps
- options: the convolutions with other blocks and launch options

Every line is printed as soon as it is known. When the budget is used up, the program ends.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedexp.core import tree
from fedexp.core.errors import reason_of
from fedexp.engine.base import Shared
from fedexp.engine.vectorised import pooled_convolutions
from fedexp.engine.vectorised.convolution import PerClientLayers
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.models.cnn import CNN
from fedexp.training.exchange import Exchange, broadcast

START = time.perf_counter()
PRECISIONS = ("bf16", "tf32", "fp32")
# image shape and padding of each network with channels [32, 64] and kernels of 5 x 5
NETWORKS = {
    "cnn 32x32x3": ((3, 32, 32), 2),
    "t_cnn 32x32x3": ((3, 32, 32), 0),
    "cnn 28x28x1": ((1, 28, 28), 2),
    "cnn 64x64x3": ((3, 64, 64), 2),
    "t_cnn 31x27x1": ((1, 31, 27), 0),
}
LIMITS = {"bf16": 1e-1, "tf32": 3e-2, "fp32": 9e-4}  # relative errors that today's path has


def say(*words: str) -> None:
    print(f"[{time.perf_counter() - START:5.1f}s]", *words, flush=True)


def use(precision: str) -> None:
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.deterministic = True


@contextmanager
def path(triton: bool) -> Any:
    """Use the Triton kernels, or not."""
    pooled_convolutions.enabled = triton
    try:
        yield
    finally:
        pooled_convolutions.enabled = True


def network(name: str) -> nn.Module:
    shape, padding = NETWORKS[name]
    module = CNN(channels=(32, 64), kernel=5, padding=padding, hidden=(8,)).build(shape, 10)
    return module.to(memory_format=torch.channels_last)


# --- compilation, in several processes at once


def compile_all(device: str, options: bool) -> None:
    """Compile the kernels of all networks in processes of their own, into Triton's cache."""
    start, command = time.perf_counter(), [sys.executable, "-m", "benchmarks.convolutions"]
    jobs = []
    for name in NETWORKS:
        for precision in precisions(name):
            more = ["--device", device, "--compile", f"{name}/{precision}"]
            jobs.append(subprocess.Popen([*command, *more]))
    for precision in TRIED if options else ():
        for number in range(len(TRIED[precision])):
            more = ["--device", device, "--compile", f"cnn 32x32x3/{precision}/{number}"]
            jobs.append(subprocess.Popen([*command, *more]))
    codes = [job.wait() for job in jobs]
    say(f"compiled {len(jobs)} sets of kernels in {time.perf_counter() - start:.1f} s: {codes}")


def precisions(name: str) -> tuple[str, ...]:
    """Return the precisions in which a network is tried."""
    return PRECISIONS if name == "cnn 32x32x3" else PRECISIONS[:2]


def compile_one(which: str, device: str) -> int:
    name, precision, *number = which.split("/")
    shape, padding = NETWORKS[name]
    weights = [layer.weight for layer in network(name).convolutions]  # type: ignore[union-attr]
    layers = pooled_convolutions.layers_of(shape, weights, padding)
    with tried(precision, int(number[0]) if number else None):
        return 0 if pooled_convolutions.runs(layers, precision, torch.device(device)) else 1


# --- check


def check(name: str, precision: str, clients: int, batch: int, device: str) -> bool:
    """Compare a training step of a student and a teacher with float64, and print the errors."""
    torch.manual_seed(clients)
    use(precision)
    (channels, height, width), _ = NETWORKS[name]
    module = network(name).to(device)
    teacher = {k: v.detach() for k, v in module.named_parameters()}
    params = {k: v + 0.02 * torch.randn(clients, *v.shape).to(v) for k, v in teacher.items()}
    x = torch.randn(clients, batch, height, width, channels, device=device).movedim(-1, 2)
    x = F.avg_pool2d(x.flatten(0, 1), 3, 1, 1).view(x.shape).movedim(2, -1).contiguous()
    x = 3 * x.movedim(-1, 2)
    mask = (torch.rand(clients, batch, device=device) < 0.9).float()

    def step(params: Any, x: Tensor, mask: Tensor, teacher: Any, auto: bool, mode: bool) -> Any:
        def one(params: Any, x: Tensor, mask: Tensor) -> Any:
            def features(weights: Any) -> Tensor:
                with torch.autocast("cuda", torch.bfloat16, enabled=auto):
                    if not mode:
                        return functional_call(module, weights, (x,)).features.to(x.dtype)
                    with PerClientLayers():
                        return functional_call(module, weights, (x,)).features.to(x.dtype)

            def loss(params: Any) -> tuple[Tensor, Tensor]:
                before = features(teacher)
                mine = features(params)
                apart = ((mine - before + 1) ** 2).mean(1)
                again = features(teacher)  # a third call, which must not disturb the first two
                return ((apart + (mine * again).sum(1)) * mask).sum(), mine

            return grad(loss, has_aux=True)(params)

        return vmap(one)(params, x, mask)

    double = step(
        *({k: v.double() for k, v in params.items()}, x.double(), mask.double()),
        {k: v.double() for k, v in teacher.items()},
        False,
        False,
    )
    run = partial(step, params, x, mask, teacher, precision == "bf16", True)
    found = {}
    for triton in (False, True):
        with path(triton):
            found[triton] = run()
    errors = {triton: errors_of(each, double) for triton, each in found.items()}
    same = "" if device == "cpu" else recorded(run, found[True])
    worst = max(errors[True].values())
    good = worst <= max(LIMITS[precision], 1.2 * max(errors[False].values()))
    if device != "cpu" and torch.equal(found[True][1], found[False][1]):
        same += "| Triton was NOT USED"
    good = good and "DIFFER" not in same and "NOT" not in same
    text = " ".join(
        f"{key} {errors[True][key]:.1e} ({errors[False][key]:.1e})"
        for key in double[0]
        if "conv" in key
    )
    text += f" features {errors[True]['features']:.1e} ({errors[False]['features']:.1e})"
    verdict = "ok  " if good else "BAD "
    say(verdict, f"{precision} {name}, {clients} x {batch}: error (usual path): {text} {same}")
    return good


def errors_of(found: Any, expected: Any) -> dict[str, float]:
    """Return the relative errors of the gradients of the convolutions and of the features."""
    pairs = {k: (found[0][k], expected[0][k]) for k in found[0] if "conv" in k}
    pairs["features"] = found[1], expected[1]
    return {k: float((a.double() - b).norm() / b.norm()) for k, (a, b) in pairs.items()}


def recorded(run: Callable[[], Any], expected: Any) -> str:
    """Record the step as a CUDA graph, and compare the bits of three replays with `expected`."""
    graph = torch.cuda.CUDAGraph()
    with path(True):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            grads, features = run()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(features, expected[1]):
            return "| features DIFFER in a graph"
        if not all(torch.equal(grads[key], expected[0][key]) for key in grads):
            return "| gradients DIFFER in a graph"
    return "| same bits in a graph"


# --- time


# kernel and other options that are tried for it, by precision
TRIED: dict[str, list[tuple[str, dict[str, int]]]] = {
    "bf16": [
        ("first_convolution", {"BM": 64, "num_warps": 4}),
        ("convolution", {"BM": 128, "BK": 64, "STAGES": 4, "num_warps": 4}),
        ("convolution", {"BM": 256, "BK": 64, "STAGES": 3, "num_warps": 8}),
        ("gradient_of_input", {"BM": 256, "BK": 64, "STAGES": 3, "num_warps": 8}),
        ("gradient_of_input", {"BM": 128, "BK": 64, "STAGES": 4, "num_warps": 4}),
        ("gradient_of_weight", {"BK": 64, "STAGES": 4, "num_warps": 4}),
        ("gradient_of_weight", {"BK": 128, "STAGES": 3, "num_warps": 4}),
        ("gradient_of_first_weight", {"BK": 64, "STAGES": 1, "num_warps": 8}),
        ("gradient_of_first_weight", {"BK": 64, "STAGES": 2, "num_warps": 8}),
    ],
    "tf32": [
        ("first_convolution", {"BM": 128, "num_warps": 8}),
        ("convolution", {"BM": 128, "BK": 32, "STAGES": 3, "num_warps": 4}),
        ("gradient_of_input", {"BM": 256, "BK": 32, "STAGES": 3, "num_warps": 8}),
        ("gradient_of_weight", {"BK": 64, "STAGES": 1, "num_warps": 4}),
        ("gradient_of_weight", {"BK": 32, "STAGES": 1, "num_warps": 4}),
        ("gradient_of_weight", {"BK": 64, "STAGES": 2, "num_warps": 8}),
        ("gradient_of_first_weight", {"BK": 32, "STAGES": 1, "num_warps": 8}),
        ("gradient_of_first_weight", {"BK": 64, "STAGES": 1, "num_warps": 8}),
    ],
    "fp32": [
        ("first_convolution", {"BM": 128, "num_warps": 8}),
        ("convolution", {"BM": 128, "BK": 32, "STAGES": 3, "num_warps": 4}),
        ("gradient_of_input", {"BM": 128, "BK": 32, "STAGES": 3, "num_warps": 4}),
        ("gradient_of_weight", {"BK": 32, "STAGES": 2, "num_warps": 4}),
        ("gradient_of_first_weight", {"BK": 32, "STAGES": 2, "num_warps": 8}),
        ("gradient_of_first_weight", {"BK": 64, "STAGES": 1, "num_warps": 8}),
    ],
}


@contextmanager
def tried(precision: str, number: int | None) -> Any:
    """Use one of the other options of a kernel."""
    options = pooled_convolutions.CONFIGURATIONS[precision]
    before = dict(options)
    if number is not None:
        kernel, other = TRIED[precision][number]
        options[kernel] = other
    try:
        yield
    finally:
        options.update(before)


def time_recorded(run: Callable[[], Any]) -> str:
    """Return the milliseconds of a replay of the recorded function, or that it fails."""
    graph = torch.cuda.CUDAGraph()
    try:
        run()
        with torch.cuda.graph(graph):
            run()
    except Exception as error:  # for example, too little shared memory
        return reason_of(error)
    return f"{min(timed(graph.replay) for _ in range(3)):.3f}"


def time_options(precision: str, device: str) -> None:
    """Time outputs and gradients of the convolutions with each of the other options."""
    for clients in (1, 10):
        x = torch.randn(clients, 50, 32, 32, 3, device=device).movedim(-1, 2)
        tensors = []
        for layer in network("cnn 32x32x3").to(device).convolutions:  # type: ignore[union-attr]
            for value in (layer.weight.detach(), layer.bias.detach()):
                tensors.append(tree.empty_stack(value, clients).copy_(value))

        def run(x: Tensor = x, tensors: list[Tensor] = tensors) -> Any:
            y, *kept = pooled_convolutions.forward(x, tensors, 2, precision)
            return pooled_convolutions.backward(y, x, tensors[::2], kept, 2, precision)

        cells = []
        for number in (None, *range(len(TRIED[precision]))):
            what = "as now" if number is None else str(TRIED[precision][number])
            with tried(precision, number):
                cells.append(f"{what}: {time_recorded(run)}")
        say(f"options {precision}, ms of convolutions, {clients} clients:", "; ".join(cells))


class Steps:
    """The local steps of an algorithm on W1's network, with a batch of 50 for each client."""

    def __init__(self, precision: str, algorithm: str, device: str):
        from benchmarks.w1 import make_simulation

        engine = ["hardware.engine=vectorised", f"hardware.device={device}"]
        size = ["dataset=few_random_pixels", "partition=iid", "local.epochs=4"]
        size += ["local.epochs=1"] if device == "cpu" else []
        choices = [f"hardware.precision={precision}", f"algorithm={algorithm}"]
        self.simulation = make_simulation([*engine, *size, *choices])
        self.state = self.simulation.initial_state()

    def train(self, engine: Vectorised, clients: int, triton: bool) -> tree.Tree:
        """Return the clients' models after a round."""
        algorithm, server = self.simulation.algorithm, self.state.server
        cohort = Exchange(self.simulation, algorithm, server, {}, 1).assemble(range(clients))
        # a power of two, which is the same number in float32
        shared = Shared(algorithm, self.simulation.runtime, broadcast(algorithm, server), 2.0**-7)
        with path(triton):
            return engine.train(shared, cohort, False).messages["params"]

    def is_equal_without_graphs(self, clients: int) -> bool:
        """Return whether steps recorded as CUDA graphs and eager steps give the same bits."""
        recorded, eager = (
            self.train(Vectorised(cuda_graphs=graphs), clients, True) for graphs in (True, False)
        )
        return all(torch.equal(value, eager[name]) for name, value in recorded.items())

    def milliseconds(self, clients: int, triton: bool) -> list[float]:
        """Return the milliseconds of a step, from replays of its CUDA graph."""
        engine = Vectorised()
        self.train(engine, clients, triton)
        if self.simulation.runtime.device.type == "cpu":
            return [float("nan")]
        assert engine._graphs is not None
        assert not engine._graphs.failed
        (frame,) = engine._graphs._recorded.values()
        (replay,) = (frame.replays[size] for size in frame.replays if size == clients)
        return [timed(replay) for _ in range(3)]


def timed(call: Callable[[], Any], count: int = 60) -> float:
    """Return the milliseconds of a call on the device."""
    for _ in range(5):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


# W1 (benchmarks.w1): mean number of steps of a round with each number of active clients; graphs
# exist for 1 to 8 and 10 clients
ROUND = {1: 56.4, 2: 18.6, 3: 13.6, 4: 10.0, 5: 10.0, 6: 7.2, 7: 5.4, 8: 10.0, 10: 14.2}


def time_steps(precision: str, algorithm: str, counts: list[int], device: str) -> bool:
    """Time local steps, and return whether recorded steps equal eager steps."""
    steps = Steps(precision, algorithm, device)
    totals = {}
    for triton in (False, True):
        cells, found = [], {}
        for clients in counts:
            times = steps.milliseconds(clients, triton)
            found[clients] = sorted(times)[len(times) // 2]
            cells.append(f"{clients}: {found[clients]:.3f}")
        totals[triton] = sum(share * between(found, clients) for clients, share in ROUND.items())
        name = "Triton" if triton else "usual "
        say(
            f"{algorithm} {precision} {name} ms a step, clients",
            " ".join(cells),
            f"| steps of a round of W1 {totals[triton]:.1f} ms (interpolated)",
        )
    same = steps.is_equal_without_graphs(max(counts))
    say(f"{algorithm} {precision}: recorded and eager steps", "equal" if same else "DIFFER")
    steps.simulation.engine.close()
    return same


def between(found: dict[int, float], clients: int) -> float:
    """Return the milliseconds for a number of clients by linear interpolation."""
    below, above = max(k for k in found if k <= clients), min(k for k in found if k >= clients)
    if below == above:
        return found[below]
    return found[below] + (found[above] - found[below]) * (clients - below) / (above - below)


def measure(parts: list[str], device: str) -> int:
    """Run the parts, and return the number of checks that failed."""
    cuda, bad = device != "cpu", 0
    counts, batch = ([1, 2, 4, 10], 50) if cuda else ([1, 10], 2)
    if "w1" in parts:
        for precision, clients in product(PRECISIONS, counts):
            bad += not check("cnn 32x32x3", precision, clients, batch, device)
    if "time" in parts:
        known = PRECISIONS if cuda else ("bf16", "fp32")
        for precision, algorithm in product(known, ("fedntd", "fedavg")):
            bad += not time_steps(precision, algorithm, counts, device)
    if "shapes" in parts:
        for name, (clients, images) in product(NETWORKS, ((3, 37), (1, 1)) if cuda else ((1, 1),)):
            for precision in precisions(name):
                bad += not check(name, precision, clients, images, device)
    if "options" in parts and cuda:
        for precision in PRECISIONS:
            time_options(precision, device)
    return bad


def stop() -> None:
    say("the budget is used up")
    os._exit(3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convolutions", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=100, help="seconds")
    parser.add_argument("--parts", default="w1,time,shapes", help="also: options")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        return compile_one(options.compile, options.device)
    timer = threading.Timer(options.budget, stop)
    timer.daemon = True
    timer.start()
    cuda, parts = options.device != "cpu", options.parts.split(",")
    say(torch.cuda.get_device_name() if cuda else "cpu", f"| torch {torch.__version__}")
    if cuda:
        compile_all(options.device, "options" in parts)
    bad = measure(parts, options.device)
    say(f"done, {bad} bad")
    timer.cancel()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
