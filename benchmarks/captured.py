"""Decide whether clients that train alone, with their steps as CUDA graphs, are fast enough.

For each network, three ways to train a round of ten clients take turns (A B C A B C):

- vectorised: the vectorised engine
- sequential: the sequential engine, without graphs
- captured: the sequential engine's clients, each on a CUDA stream of its own. A step is recorded
  once for each stream, with the loading and augmentation of its batch, and replayed. A second graph
  with a mask runs the smaller last batches of an epoch.
- captured, exact: the same with a graph for each size of a batch, which needs no mask

All steps call fedexp's hooks. The bits of recorded steps are compared with those of the same steps
without graphs, and the models with the sequential engine's. The first rounds, in which kernels are
compiled and graphs recorded, are not counted; every engine has trained the counted rounds before.
Each line is printed as soon as it is known. The last line is the decision, by the rule in
RESULTS.md. On a CPU, the same code runs without graphs and streams: --quick shows that it works.
"""

import argparse
import ast
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

# streams that share a hardware queue would wait for each other; CUDA reads this when it starts
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from torch import Tensor

from benchmarks import pairs, w1
from benchmarks.measure import ROOT, spread
from fedexp.algorithms import optimizers
from fedexp.algorithms.base import Batch, Context, overrides
from fedexp.core import tree
from fedexp.core.errors import describe
from fedexp.core.private.torch_internals import copy_each
from fedexp.core.rng import seeded, torch_seed
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Gather, Shared, Trained
from fedexp.engine.network import LiveNetwork
from fedexp.engine.sequential import ClientTraining, Sequential
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.engine.vectorised.graphs import CudaCapture, copy_into
from fedexp.models import Output
from fedexp.training.exchange import Exchange, broadcast, sample
from fedexp.training.prepare import prepare
from fedexp.training.simulation import Simulation

START = time.perf_counter()
LR = 2.0**-7  # the same number in float32, as recorded steps read it from a tensor
CONTROL = "cnn"  # has kernels of its own in the vectorised engine
ONE = ("local.epochs=1",)
TEXTS = (
    *("model=textcnn", "dataset=random_texts", "partition=iid", "num_clients=100", "seed=0"),
    *("participation=0.1", "local.batch_size=50", "local.epochs=5", "weighting=examples"),
)
# name -> its options, the most telling first; an option of W1 is replaced by one given here
NETWORKS: dict[str, tuple[str, ...]] = {
    "resnet18": (*w1.OVERRIDES, "model=resnet18", *ONE),
    "resnet10": (*w1.OVERRIDES, "model=resnet10", *ONE),
    "vit": (*pairs.VIT, *pairs.ADAPTED),
    "textcnn": TEXTS,
    CONTROL: w1.OVERRIDES,
}
IMAGES = ("resnet18", "resnet10", CONTROL, "vit")  # read the images of W1
# a few clients of a tenth of the images, and smaller networks
EVEN = ("alpha=100", "partition.min_size=1", "participation=0.02", "local.batch_size=20")
QUICK: dict[str, tuple[str, ...]] = dict.fromkeys(("resnet18", "resnet10"), EVEN)
QUICK |= {CONTROL: (*EVEN, "local.epochs=2", "model.channels=[4,8]", "model.hidden=[16]")}
QUICK |= {"textcnn": ("participation=0.02", "model.filters=8", "local.batch_size=40")}
QUICK |= {"vit": ("model.name=test_vit", "num_clients=300", "participation=0.007")}

# what a vectorised engine without its general part lacks: file -> definitions, or () for all
ENGINE = "src/fedexp/engine/vectorised"
DELETED: dict[str, tuple[str, ...]] = {
    f"{ENGINE}/convolution.py": (
        *("convolve", "_pair", "_Convolution", "_Gradients", "gradients", "gradient_of_weights"),
        *("apply_per_client", "_streams"),
    ),
    f"{ENGINE}/support.py": (),
    "src/fedexp/engine/hardware.py": ("Hardware.without_vmap",),
}


def say(*words: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f}s]", *words, flush=True)


# --- the engine


class Eager:
    """Stands for `CudaCapture` where steps run without graphs, as on a CPU."""

    stream = None

    def warm_up(self, step: Callable[[], None]) -> None:
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


class PaddedNetwork(LiveNetwork):
    """A model in training whose calls with the inputs of a batch use the mask of the batch."""

    batch: Batch | None = None

    def __call__(self, params: Params, x: Tensor, mask: Tensor | None = None) -> Output:
        if mask is None and self.batch is not None and x is self.batch.x:
            mask = self.batch.mask
        return super().__call__(params, x, mask)

    def load(self, params: Params, buffers: Any) -> None:
        assert params.keys() <= self._own.keys(), "the model's own parameters alone"
        with torch.no_grad():
            copy_each([*self._own.values()], [params[name] for name in self._own])
            for name, buffer in self.module.named_buffers():
                buffer.copy_(buffers[name])


@dataclass
class Slot:
    """A client's model and batches in fixed memory, and the graphs that read and change them.

    Clients use a slot one after another.
    """

    recorder: Any  # CudaCapture or Eager
    live: PaddedNetwork
    ctx: Context
    memory: Tree  # the optimizer's state
    index: Tensor  # int64 [S, B]
    lengths: Tensor  # int64 [S]
    draws: Tensor | None  # int64 [S, B, D]
    step: Tensor  # int64 []: number of the next step
    loss: Tensor  # []: sum of the objective over the steps so far
    replays: dict[int, Callable[[], Any]] = field(default_factory=dict)  # by size of the batch
    warm: set[int] = field(default_factory=set)

    @classmethod
    def like(cls, training: ClientTraining, steps: int, recorder: Any) -> "Slot":
        """Return a slot for clients like that of `training`, with at most `steps` steps."""
        data, ctx, device = training.data, training.ctx, training.runtime.device
        live = PaddedNetwork(training.runtime.net)
        lr: Any = torch.zeros((), dtype=training.runtime.dtype, device=device)
        fixed = {name: tree.map(empty_like, getattr(ctx, name)) for name in OWN}

        def room(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.new_zeros(steps, *values.shape[1:])

        return cls(
            recorder,
            live,
            replace(ctx, lr=lr, **fixed),
            optimizers.memory_of(live.params, ctx.local),
            data.index.new_zeros(steps, *data.index.shape[1:]),
            torch.zeros(steps, dtype=torch.int64, device=device),
            room(data.draws),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros_like(ctx.steps),
        )

    def beside(self) -> AbstractContextManager[Any]:
        """Return a context in which work runs on the slot's stream, if it has one."""
        stream = self.recorder.stream
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def load(self, training: ClientTraining) -> None:
        """Copy the values of a client into the slot."""
        data, ctx = training.data, training.ctx
        for name in OWN:
            tree.map(copy_into, getattr(self.ctx, name), getattr(ctx, name))
        self.ctx.lr.fill_(ctx.lr)  # type: ignore[attr-defined]
        if training.kept is None:
            torch._foreach_zero_(tree.leaves(self.memory))
        else:
            tree.map(copy_into, self.memory, training.kept)
        self.index[: data.steps] = data.index
        self.lengths[: data.steps] = torch.as_tensor(data.lengths, device=self.lengths.device)
        if self.draws is not None:
            self.draws[: data.steps] = data.draws  # type: ignore[assignment]
        self.step.zero_()
        self.loss.zero_()

    def batch(self, runtime: ClientRuntime, size: int, masked: bool) -> Batch:
        """Load the batch of the current step, by indices that are on the device."""
        at = self.step[None]
        index = self.index.index_select(0, at)[0, :size]
        draws = None if self.draws is None else self.draws.index_select(0, at)[0, :size]
        x, y = runtime.load_train(index, draws)
        mask = None
        if masked:
            rows = torch.arange(size, device=index.device)
            mask = (rows < self.lengths.index_select(0, at)).to(runtime.dtype)
        number: Any = self.step
        self.live.batch = Batch(x, y, mask, number)
        return self.live.batch

    def run(self, key: int, step: Callable[[], None]) -> None:
        """Run a step. Its second call with a key records it, and later calls replay the graph."""
        if key not in self.warm:
            self.warm.add(key)
            return self.recorder.warm_up(step)
        if key not in self.replays:
            self.replays[key] = self.recorder.record(step)
        self.replays[key]()


OWN = ("personal", "client", "plan", "setup", "steps")  # parts of Context that clients differ in


def empty_like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf


class SlotTraining(ClientTraining):
    """The training of one client, whose steps run in a slot."""

    def __init__(self, shared: Shared, live: LiveNetwork, alone: Cohort, exact: bool):
        super().__init__(shared, live, alone)
        self.exact, self.slot = exact, None

    def train(self) -> Tensor:
        slot: Any = self.slot
        full = slot.index.shape[1]
        slot.load(self)
        self.ctx = slot.ctx
        for length in self.data.lengths:
            # key 0: any smaller batch, with a mask
            key = length if self.exact or length == full else 0
            slot.run(key, lambda key=key: self.one_step(slot, key or full, masked=not key))
        if self.kept is not None:
            self.kept = tree.map(torch.clone, slot.memory)
        return slot.loss / slot.ctx.steps.clamp(min=1)

    def one_step(self, slot: Slot, size: int, masked: bool) -> None:
        loss = self.step(slot.memory, slot.batch(self.runtime, size, masked))
        slot.loss += loss.detach()
        slot.step += 1

    @torch.no_grad()
    def finish(self, trained: Params) -> tuple[Tree, Tree]:
        # without the model's running statistics, which other clients' teachers use at this time
        message, state = self.algorithm.finish(self.live, trained, self.data, self.ctx)
        return message, tree.map(torch.clone, state)


class Captured(Engine):
    """Trains the clients of a cohort on streams of their own, with their steps as CUDA graphs.

    All rounds must have the same algorithm and model. Algorithms with an own `local_step`, `finish`
    or `initial_params`, plain clients and marks are not supported.
    """

    def __init__(self, streams: int = 10, graphs: bool = True, exact: bool = False):
        """streams: clients that train at the same time. graphs: whether to use CUDA graphs.
        exact: whether each size of a batch has a graph, instead of one graph with a mask."""
        self.streams, self.graphs, self.exact = streams, graphs, exact
        self.slots: list[Slot] = []
        self.server: Tree = None  # the received values, in fixed memory

    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        for hook in ("local_step", "finish", "initial_params"):
            assert not overrides(shared.algorithm, hook), hook
        runtime, order, gather = shared.runtime, cohort.longest_first(), Gather(cohort)
        if self.server is None:
            self.server = tree.map(torch.clone, shared.server)
        tree.map(copy_into, self.server, shared.server)
        fixed = replace(shared, server=self.server)
        runtime.net.set_buffers(self.server["buffers"])
        steps = cohort.schedules[order[0]].steps
        if self.slots and steps > len(self.slots[0].index):
            self.slots.clear()
        here = torch.cuda.current_stream() if runtime.device.type == "cuda" else None
        found = []
        for number, position in enumerate(order):
            alone = cohort.take([position])
            if len(self.slots) <= number < self.streams:
                self.slots.append(self._slot(fixed, alone, 1 << max(steps - 1, 0).bit_length()))
            slot = self.slots[number % len(self.slots)]
            if slot.recorder.stream is not None:
                slot.recorder.stream.wait_stream(here)
            with slot.beside():
                training = SlotTraining(fixed, slot.live, alone, self.exact)
                training.slot = slot  # type: ignore[assignment]
                seed = torch_seed(runtime.seed, "layers", cohort.round, cohort.clients[position])
                with seeded(seed):
                    found.append(training.run(evaluate_local))
        for slot in self.slots:
            if slot.recorder.stream is not None:
                here.wait_stream(slot.recorder.stream)  # type: ignore[union-attr]
        for position, part in zip(order, found, strict=True):
            gather.add([position], part)
        return gather.result()

    def _slot(self, shared: Shared, alone: Cohort, steps: int) -> Slot:
        device = shared.runtime.device
        on_device = self.graphs and device.type == "cuda"
        recorder = CudaCapture(device) if on_device else Eager()
        training = ClientTraining(shared, LiveNetwork(shared.runtime.net), alone)
        with torch.no_grad():
            setup = shared.algorithm.client_setup(training.live, training.data, training.ctx)
        training.ctx = replace(training.ctx, setup=setup)
        return Slot.like(training, steps, recorder)

    @property
    def recorded(self) -> int:
        """Return the number of graphs."""
        return sum(len(slot.replays) for slot in self.slots)


# --- measurement


class Workload:
    """Rounds of a network and an algorithm, each from the initial model."""

    def __init__(self, settings: Sequence[str], rounds: int):
        simulation: Simulation = prepare(w1.built(settings))
        state, algorithm = simulation.initial_state(), simulation.algorithm
        self.device = simulation.runtime.device
        self.shared = Shared(algorithm, simulation.runtime, broadcast(algorithm, state.server), LR)
        # not round 1, in which hooks are checked with copies of the models
        self.cohorts = [
            Exchange(simulation, algorithm, state.server, {}, number).assemble(
                sample(simulation, number)
            )
            for number in range(2, rounds + 2)
        ]

    def train(self, engine: Engine, number: int) -> tuple[float, Params]:
        """Train a round, and return its seconds and the clients' models."""
        self.wait()
        start = time.perf_counter()
        trained = engine.train(self.shared, self.cohorts[number], False)
        self.wait()
        return time.perf_counter() - start, trained.messages["params"] | trained.buffers

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def memory(self) -> tuple[int, int]:
        """Return the bytes that torch holds on the device now, and at most so far."""
        if self.device.type != "cuda":
            return 0, 0
        return torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()

    def warm_up(self, engine: Engine) -> str:
        """Train all rounds once, and describe what that took."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before, _ = self.memory()
        seconds = [self.train(engine, number)[0] for number in range(len(self.cohorts))]
        _, peak = self.memory()
        graphs = f", {engine.recorded} graphs" if isinstance(engine, Captured) else ""
        held = f", {(peak - before) / 2**30:.2f} GiB" if peak else ""
        return f"first pass {sum(seconds):.2f} s{graphs}{held}"


def difference(found: Params, expected: Params) -> str:
    """Describe the largest difference between two models relative to the largest value."""
    if all(torch.equal(found[name], value) for name, value in expected.items()):
        return "equal bits"
    floats = [(found[k].double(), v.double()) for k, v in expected.items()]
    apart = max(float((one - other).abs().max()) for one, other in floats)
    largest = max(float(v.abs().max()) for _, v in floats)
    return f"{apart / largest:.1e} of the largest weight"


def measure(name: str, work: Workload, options: argparse.Namespace) -> float | None:
    """Measure the engines on a workload, and return captured / vectorised of the medians."""
    engines: dict[str, Engine] = {"vectorised": Vectorised(), "sequential": Sequential()}
    engines |= {"captured": Captured(options.streams)}
    engines |= {"captured, exact": Captured(options.streams, exact=True)} if options.exact else {}
    first: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    models: dict[str, Params] = {}
    for engine in [*engines]:
        try:
            first[engine] = work.warm_up(engines[engine])
        except Exception as error:
            say(f"{name} {engine}: not measured: {describe(error)}")
            del engines[engine]
    for number in range(len(work.cohorts)):
        for engine, each in engines.items():
            took, models[engine] = work.train(each, number)
            seconds.setdefault(engine, []).append(took)
    middle = {engine: statistics.median(found) for engine, found in seconds.items()}
    for engine, found in seconds.items():
        others = [other for other in ("vectorised", "sequential") if other in middle]
        times = [f"{middle[engine] / middle[other]:.2f} x {other}" for other in others]
        text = f"{name} {engine}: {spread(found, '.4f')} s a round, n={len(found)}"
        say(", ".join([text, *times, first[engine]]))
    say_bits(name, work, models)
    wanted = {"vectorised", "captured"}
    return middle["captured"] / middle["vectorised"] if wanted <= middle.keys() else None


def say_bits(name: str, work: Workload, models: dict[str, Params]) -> None:
    """Compare the models of the last round with those of steps without graphs."""
    for engine, found in models.items():
        cells = []
        if engine.startswith("captured"):
            eager = Captured(1, graphs=False, exact=engine.endswith("exact"))
            _, expected = work.train(eager, len(work.cohorts) - 1)
            cells.append(f"to its steps without graphs {difference(found, expected)}")
        if engine != "sequential" and "sequential" in models:
            cells.append(f"to sequential {difference(found, models['sequential'])}")
        if cells:
            say(f"{name} {engine}: models compared: {', '.join(cells)}")


def decide(found: dict[str, float | None], measured: Sequence[str]) -> str:
    """Return the decision by the rule: captured at least as fast on all networks but the control.

    found: captured / vectorised of each network and algorithm, or None if it was not measured.
    """
    others = {name: ratio for name, ratio in found.items() if name.split()[0] != CONTROL}
    slower = [f"{name} {ratio:.2f}" for name, ratio in others.items() if ratio and ratio > 1]
    missing = [name for name, ratio in others.items() if ratio is None]
    missing += [name for name in NETWORKS if name not in (*measured, CONTROL)]
    if slower:
        return f"decision: the general part stays: captured is slower on {', '.join(slower)}"
    if missing:
        return f"decision: none: not measured: {', '.join(missing)}"
    worst = max(ratio for ratio in others.values() if ratio)
    lines = {path: count_lines(path, names) for path, names in DELETED.items()}
    listed = ", ".join(f"{path} {count}" for path, count in lines.items())
    return (
        f"decision: the general part can go: captured takes at most {worst:.2f} of vectorised;"
        f" {sum(lines.values())} lines: {listed}"
    )


def count_lines(path: str, names: Sequence[str]) -> int:
    """Return the number of lines of definitions in a file, or of the whole file without names."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not names:
        return len(text.splitlines())
    sizes: dict[str, int] = {}
    for node in ast.parse(text).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for each, prefix in [(node, ""), *((part, f"{node.name}.") for part in inner)]:  # type: ignore[attr-defined]
            if isinstance(each, ast.ClassDef | ast.FunctionDef):
                decorators = [mark.lineno for mark in each.decorator_list]
                start = min([each.lineno, *decorators])
                sizes[prefix + each.name] = (each.end_lineno or start) - start + 1
    return sum(sizes[name] for name in names)


def settings_of(network: str, algorithm: str, options: argparse.Namespace) -> list[str]:
    data = w1.data_overrides() if network in IMAGES else []
    if options.quick and network in IMAGES:
        data = ["dataset=few_random_pixels"]
    hardware = [f"hardware.device={options.device}", f"hardware.precision={options.precision}"]
    few = QUICK[network] if options.quick else ()
    return [
        *NETWORKS[network],
        *data,
        *few,
        *hardware,
        "hardware.engine=sequential",
        f"algorithm={algorithm}",
        *options.overrides,
    ]


def ratio_of(name: str, settings: Sequence[str], options: argparse.Namespace) -> float | None:
    """Measure a network with an algorithm, unless there is no time left, and return the ratio."""
    if time.perf_counter() - START > options.budget:
        say(f"{name}: not measured: the budget of {options.budget:.0f} s is used up")
        return None
    try:
        return measure(name, Workload(settings, options.rounds), options)
    except Exception as error:
        say(f"{name}: not measured: {describe(error)}")
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m benchmarks.captured", description=__doc__)
    parser.add_argument("--device", default="cuda", help="device of all runs (default: cuda)")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--networks", type=words, default=list(NETWORKS))
    parser.add_argument("--algorithms", type=words, default=["fedavg", "fedntd"])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each engine")
    parser.add_argument("--streams", type=int, default=10, help="clients at the same time")
    parser.add_argument("--exact", action="store_true", help="also with a graph for each size")
    parser.add_argument(
        "--budget", type=float, default=300, help="no network starts after these seconds"
    )
    parser.add_argument("--quick", action="store_true", help="only show that the command works")
    parser.add_argument("overrides", nargs="*", help="options of fedexp, for a smaller workload")
    options = parser.parse_args(arguments)
    if unknown := set(options.networks) - NETWORKS.keys():
        parser.error(f"--networks={','.join(unknown)}: must be of {', '.join(NETWORKS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("benchmarks.captured: torch finds no CUDA device on this machine", file=sys.stderr)
        return 2
    found: dict[str, float | None] = {}
    for network in options.networks:
        for algorithm in options.algorithms:
            name = f"{network} {algorithm} {options.precision}"
            found[name] = ratio_of(name, settings_of(network, algorithm, options), options)
    say(decide(found, options.networks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
