"""Compare two variants of a run: processor seconds per round, and their ratio.

- views: test_views=[plain] and test_views=[plain,augmented]
- fedreg: FedReg's two ascents one after the other, or in one batch that shares the first gradient;
  also the distance between the final models of the two variants
- vit: ten clients of 16 images that train adapters of rank 8 in timm's ViT-Tiny for four epochs, on
  the sequential or the vectorised engine
- head: training of this network's head, with features computed in every step, or once before the
  first round (not included in the time)

The variants take turns (A B A B) in one process with one thread. By default, the time is the
process's CPU time, so other programs on the machine have little effect. --wall measures elapsed
time instead. The workload is W1 of README.md, with CIFAR-10 from FEDEXP_DATA. `vit` and `head` need
timm, and do not test the model. --quick uses digits and only shows that the command works.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch.func import grad
from torch.nn import functional

from benchmarks import w1
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedreg import FedReg
from fedexp.algorithms.interfaces import Batch, Network
from fedexp.core.tree import Params
from fedexp.training.prepare import prepare
from fedexp.training.rounds import play_round
from fedexp.training.simulation import Simulation
from fedexp.training.state import State

HERE = ("hardware=cpu", "hardware.engine=sequential", "hardware.threads=1")
QUICK = (
    "dataset=digits",
    "local.epochs=1",
    "dataset.augmentation.crop_padding=1",
    "partition.min_size=1",
)


# after the option `model=`, which would replace them
TINY = ("model.name=vit_tiny_patch16_224", "model.image_size=32")
ADAPTED = ("model=timm_lora", *TINY, "model.lora.rank=8", "model.lora.targets=[qkv,proj]")
VIT = (
    *("partition=iid", "num_clients=3125", "participation=0.0032", "local.epochs=4"),
    *("local.batch_size=16", "augment=false", "rounds=1000", "eval_interval=1000"),
)
# for digits
FEW = ("num_clients=80", "participation=0.05", "model.name=test_vit", "local.epochs=1")


@dataclass(frozen=True, kw_only=True)
class OneByOne(FedReg):
    """FedReg in its earlier form, with two ascents one after the other."""

    def ascend(
        self, net: Network, model: Params, batch: Batch, mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(net(model, x, mask).logits, batch.y, reduction="sum")

        found = []
        for eta in (self.eta_s, self.eta_s * self.eta_ratio):
            x = batch.x
            for _ in range(self.ascent):
                x = x + eta * grad(loss)(x).sign()
            found.append(x)
        return tuple(found)


def simulation(*overrides: str) -> Simulation:
    return prepare(w1.built([*HERE, *overrides]))


def views(data: Sequence[str]) -> dict[str, Simulation]:
    both = ("[plain]", "[plain,augmented]")
    return {text: simulation(*data, "algorithm=fedavg", f"test_views={text}") for text in both}


def fedreg(data: Sequence[str]) -> dict[str, Simulation]:
    ours = simulation(*data, "algorithm=fedreg")
    return {"one after the other": otherwise(ours, OneByOne), "in one batch": ours}


def transformer(data: Sequence[str], *overrides: str) -> Simulation:
    kept = [each for each in data if each.startswith(("data", "hardware", "model.image_size"))]
    few = FEW if "dataset=digits" in data else ()
    return simulation(*VIT, *overrides, *kept, *few)


def vit(data: Sequence[str]) -> dict[str, Simulation]:
    return {
        engine: transformer(data, *ADAPTED, f"hardware.engine={engine}")
        for engine in ("sequential", "vectorised")
    }


def head(data: Sequence[str]) -> dict[str, Simulation]:
    ours = transformer(data, "model=timm", *TINY, "model.freeze=[backbone]")
    images = replace(ours.runtime.data, train_features=None, test_features=None)
    theirs = replace(ours, runtime=replace(ours.runtime, data=images))
    return {"in every step": theirs, "once": ours}


def otherwise(ours: Simulation, kind: type[FedAvg]) -> Simulation:
    """Return a copy of a simulation with a subclass of its algorithm."""
    values = {field.name: getattr(ours.algorithm, field.name) for field in fields(ours.algorithm)}
    return replace(ours, algorithm=kind(**values))


PAIRS: dict[str, Callable[[Sequence[str]], dict[str, Simulation]]] = {
    "views": views,
    "fedreg": fedreg,
    "vit": vit,
    "head": head,
}


def take_turns(
    simulations: dict[str, Simulation],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> tuple[dict[str, list[float]], dict[str, State]]:
    """Play the rounds of all simulations in turn, after a warm-up round.

    Return (name -> seconds of each round, name -> last state).
    """
    states = {name: each.initial_state() for name, each in simulations.items()}
    seconds: dict[str, list[float]] = {name: [] for name in simulations}
    for number in range(rounds + 1):
        for name, each in simulations.items():
            start = clock()
            states[name].advance(play_round(each, states[name]))
            if number:
                seconds[name].append(clock() - start)
    return seconds, states


def compare(
    pair: dict[str, Simulation], rounds: int, clock: Callable[[], float] = time.process_time
) -> tuple[dict[str, list[float]], float]:
    """Run the rounds of both variants in turn, after one warm-up round.

    Return the seconds of each round by variant, and the largest difference between weights of the
    two models, divided by the largest weight.
    """
    seconds, states = take_turns(pair, rounds, clock)
    one, other = (state.server["params"] for state in states.values())
    apart = max(float((one[k] - other[k]).abs().max()) for k in one)
    return seconds, apart / max(float(value.abs().max()) for value in one.values())


def report(name: str, seconds: dict[str, list[float]], apart: float) -> str:
    """Return the result of a comparison as a sentence."""
    (one, first), (other, second) = seconds.items()
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    return (
        f"{name}: {one} {statistics.median(first):.3f} s a round, {other}"
        f" {statistics.median(second):.3f} s; ratio {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds in turn); largest"
        f" difference of a weight {apart:.1e} of the largest weight"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__)
    parser.add_argument("pairs", nargs="*", choices=[[], *PAIRS], help="default: all")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds per variant, after one warm-up round"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option, such as local.epochs=1",
    )
    parser.add_argument("--quick", action="store_true", help="only show that the command works")
    parser.add_argument("--wall", action="store_true", help="measure elapsed, not CPU time")
    options = parser.parse_args(arguments)
    data = [*(QUICK if options.quick else (*w1.OVERRIDES, *w1.data_overrides())), *options.set]
    clock = time.perf_counter if options.wall else time.process_time
    for name in options.pairs or PAIRS:
        print(report(name, *compare(PAIRS[name](data), options.rounds, clock)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
