"""Compare the cost of algorithms with the passes that they need.

An example costs FedAvg one forward and backward pass in each local epoch. The expected cost of
another algorithm adds the passes that the algorithm declares (`Needs`) and the work of
`additional_passes`. It does not contain arithmetic on the weights, such as SCAFFOLD's correction.

The workload is W1 of README.md with four clients per round, on the sequential engine in one process
with one thread. The algorithms take turns. The time is the processor time of the process, and the
models are not tested.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks import measure, w1
from benchmarks.pairs import QUICK, simulation, take_turns
from fedexp.algorithms.fedcurv import FedCurv
from fedexp.algorithms.fedka import FedKA
from fedexp.training.exchange import sample
from fedexp.training.simulation import Simulation

DEFAULT = ("fedntd", "moon", "scaffold", "fedcurv", "fedka", "flashback")
OPTIONS = {"flashback": ("public.fraction=0.02",)}  # 1,000 of CIFAR-10's images, for the server
FIXED = ("participation=0.04", "rounds=1000", "eval_interval=1000")
HEAD = ("algorithm", "n", "expected x FedAvg", "measured x FedAvg", "measured / expected")


def client_sizes(of: Simulation, number: int) -> list[int]:
    """Return the number of examples of each client in the cohort of a round."""
    parts = of.stages[0].federation.parts
    return [len(parts[client]) for client in sample(of, number)]


def forward_seconds(of: Simulation, calls: int = 50) -> float:
    """Return the processor seconds of a forward pass, per example."""
    runtime = of.runtime
    size = runtime.local.batch_size
    x, _ = runtime.load_test(torch.arange(size))
    params = runtime.net.parameters()
    with torch.no_grad():
        runtime.net(params, x)
        start = time.process_time()
        for _ in range(calls):
            runtime.net(params, x)
    return (time.process_time() - start) / (calls * size)


def expected_cost(of: Simulation, share: float, number: int) -> float:
    """Return the expected cost of a round relative to FedAvg.

    share: the cost of a forward pass relative to a forward and a backward pass.
    """
    needs, epochs = of.algorithm.needs, of.runtime.local.epochs
    step = needs.gradients + share * needs.teachers
    passes = step * epochs + needs.gradient_passes + share * needs.forward_passes
    return (passes + additional_passes(of, share, number)) / epochs


def additional_passes(of: Simulation, share: float, number: int) -> float:
    """Return the work that the declared passes of the clients do not contain, in their unit.

    These are the anchors in FedKA's batches, the gradients of FedCurv's Fisher information, and
    the server's training.
    """
    local, sizes, algorithm = of.runtime.local, client_sizes(of, number), of.algorithm
    if isinstance(algorithm, FedKA):
        slots = min(algorithm.max_anchors, of.stages[0].federation.num_classes)
        steps = sum(-(-size // local.batch_size) for size in sizes)
        return slots * steps * local.epochs / sum(sizes)
    if isinstance(algorithm, FedCurv):
        used = (algorithm.samples // local.batch_size + 1) * local.batch_size
        return sum(min(size, used) for size in sizes) / sum(sizes)
    needs, public = algorithm.needs, of.stages[0].public
    if public is None:
        return 0.0
    per_client, others = needs.server_teachers
    passes = needs.server_passes + share * (per_client * len(sizes) + others)
    return passes * len(public) / sum(sizes)


def report(
    named: dict[str, Simulation], seconds: dict[str, list[float]], share: float
) -> list[tuple[str, ...]]:
    """Return a row of the table for each algorithm. `seconds` does not contain the first round."""

    def relative(name: str, number: int) -> float:
        spent = seconds[name][number - 2] / sum(client_sizes(named[name], number))
        return spent * sum(client_sizes(named["fedavg"], number)) / seconds["fedavg"][number - 2]

    rows = []
    numbers = range(2, len(seconds["fedavg"]) + 2)
    for name, of in named.items():
        expected = [expected_cost(of, share, number) for number in numbers]
        measured = [relative(name, number) for number in numbers]
        ratios = [a / b for a, b in zip(measured, expected, strict=True)]
        shown = [measure.spread(values, ".2f") for values in (expected, measured, ratios)]
        rows.append((name, str(len(ratios)), *shown))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__)
    parser.add_argument(
        "algorithms", nargs="*", default=DEFAULT, help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds after a warm-up round")
    parser.add_argument("--quick", action="store_true", help="only show that the command works")
    parser.add_argument("--no-results", action="store_true", help="do not change RESULTS.md")
    options = parser.parse_args(arguments)
    data = QUICK if options.quick else (*w1.OVERRIDES, *w1.data_overrides())
    fixed = (*data, *FIXED)
    named = {}
    for name in ("fedavg", *options.algorithms):
        named[name] = simulation(*fixed, f"algorithm={name}", *OPTIONS.get(name, ()))
    seconds, _ = take_turns(named, options.rounds)
    example = seconds["fedavg"][-1] / sum(client_sizes(named["fedavg"], options.rounds + 1))
    pixels = "digits" if options.quick else w1.data_sentence(list(data))
    share = forward_seconds(named["fedavg"]) * named["fedavg"].runtime.local.epochs / example
    text = (
        f"{measure.machine()}. W1 with four clients per round, {pixels}, fp32, one thread. A"
        f" forward pass costs {share:.2f} of a step of FedAvg. Median (smallest to largest).\n\n"
        + measure.markdown(HEAD, report(named, seconds, share))
    )
    print(text)
    if not (options.quick or options.no_results):
        measure.write_section("Costs of algorithms", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
