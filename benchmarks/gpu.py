"""The figures of a GPU on W1: a step of ten clients, FedNTD for 200 rounds against the bare loop,
algorithms against FedAvg, ResNets on the vectorised engine against the sequential one; medians with
smallest and largest."""

import argparse
import csv
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.measure import (
    Contestant,
    Rep,
    fedexp,
    markdown,
    ratios,
    read_rounds,
    run_once,
    spread,
)
from benchmarks.w1 import (
    OVERRIDES,
    ROOT,
    data_overrides,
    data_sentence,
    make_simulation,
    prepare_workload,
)
from fedexp.training.exchange import assemble, broadcast, sample, train

ALGORITHMS = ("fedavg", "fedprox", "fedntd", "scaffold", "moon")
RESNETS = ("resnet10", "resnet18", "resnet50")


# What is wanted of one H100, beside what it is.
GOALS = {
    "step": "goal: 1.5 ms in tf32, 1 ms in bf16",
    "rounds": "goal: 15 s, the first round under 3 s",
    "algorithms": (
        "goals: fedprox and scaffold at most 1.2, fedntd and moon at most 1.5 times fedavg"
    ),
    "resnets": "goal: resnet18 at least 3 times the sequential engine",
}


class Gpu:
    """Runner of contestants one by one, which keeps what could not be measured."""

    def __init__(self, options: argparse.Namespace, work: Path):
        self.options, self.work, self.data = options, work, [*data_overrides(), *options.overrides]
        self.left_out: list[str] = []
        prepare_workload(options.bare_rounds, self.data).save(work / "w1")

    def fedexp(self, engine: str, precision: str, rounds: int, *overrides: str) -> list[Rep]:
        """Run fedexp a few times, each from its start; an empty list where it fails."""
        hardware = (f"hardware.device={self.options.device}", f"hardware.engine={engine}")
        settings = (
            *OVERRIDES,
            *self.data,
            *hardware,
            f"hardware.precision={precision}",
            f"rounds={rounds}",
        )
        name = f"fedexp {engine} {precision} {' '.join(overrides)}"
        return self._run(name, fedexp(*settings, *overrides), self.options.repeats)

    def bare(self, precision: str) -> list[Rep]:
        """Return the sequential eager loop, testing the global model in every round like fedexp;
        once."""
        flags = (
            "--algorithm=fedntd",
            f"--precision={precision}",
            f"--device={self.options.device}",
        )
        command = (sys.executable, "-m", "benchmarks.bare", str(self.work / "w1"), "OUT", *flags)
        more = (f"--rounds={self.options.bare_rounds}", "--global-evaluation")
        return self._run(f"bare loop {precision}", (*command, *more), 1)

    def _run(self, name: str, command: tuple[str, ...], repeats: int) -> list[Rep]:
        reps = []
        for number in range(repeats):
            try:
                reps.append(
                    run_once(
                        Contestant(name, command), self.work / "out", timeout=7200, environment={}
                    )
                )
            except (measure.Refused, RuntimeError) as error:
                self.left_out.append(f"{name}: not measured: {error}")
                print(self.left_out[-1], flush=True)
                return []
            rep = reps[-1]
            print(
                f"{number + 1} {name}: {rep.rate:,.0f} examples/s, {rep.seconds:.3f} s a round",
                flush=True,
            )
        return reps

    def step(self) -> str:
        """Time rounds of ten clients of ten batches each, with nothing but local steps in them."""
        rows = []
        o = self.options
        for precision, algorithm, way in product(
            o.precisions, ("fedavg", "fedntd"), o.convolutions
        ):
            times = self._steps(precision, algorithm, way)
            rows.append(
                (
                    f"{algorithm} {precision}, convolutions by {way}",
                    str(len(times)),
                    spread(times, ".3f"),
                )
            )
            print(*rows[-1], flush=True)
        return f"{GOALS['step']}\n\n" + markdown(
            ("a step of ten clients, batches of 50", "n (rounds)", "ms"), rows
        )

    def _steps(self, precision: str, algorithm: str, way: str) -> list[float]:
        """Return the milliseconds of a step in each of some rounds, after three that record it."""
        size = (
            "num_clients=100",
            "participation=0.1",
            "partition=iid",
            "local.epochs=1",
            "local.batch_size=50",
        )
        hardware = [f"hardware.device={self.options.device}", "hardware.engine=vectorised"]
        hardware += [f"hardware.convolution={way}", f"hardware.precision={precision}"]
        choices = (*size, *hardware, f"algorithm={algorithm}")
        simulation = make_simulation([*self.data, *choices])
        state, times = simulation.initial_state(), []
        for number in range(1, 4 + self.options.rounds_of_steps):
            clients = sample(simulation, number)
            cohort = assemble(simulation, simulation.algorithm, state.server, {}, number, clients)
            sent = broadcast(simulation.algorithm, state.server)
            self._wait()
            start = time.perf_counter()
            train(simulation, sent, cohort, evaluate_local=False)
            self._wait()
            times.append(
                1000 * (time.perf_counter() - start) / max(each.steps for each in cohort.schedules)
            )
        simulation.engine.close()
        return times[3:]

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def headline(self) -> str:
        """Run FedNTD for all rounds, the first too but not the start; compare its speed over the
        rounds of the bare loop."""
        o, rows = self.options, []
        for precision in o.precisions:
            bare = self.bare(precision)
            for engine, way in product(o.engines, o.convolutions):
                reps = self.fedexp(
                    engine, precision, o.rounds, "algorithm=fedntd", f"hardware.convolution={way}"
                )
                if not reps:
                    continue
                multiple = ""
                if bare:
                    same = read_rounds(self.work / "out", last=o.bare_rounds)
                    if same.examples != bare[0].examples:
                        raise RuntimeError("fedexp and the bare loop trained different cohorts")
                    multiple = f"{bare[0].seconds / same.seconds:.1f}"
                cells = (
                    *(spread([rep.total for rep in reps], ".1f"), first_round(self.work / "out")),
                    *(
                        spread([rep.rate for rep in reps]),
                        f"{bare[0].rate:,.0f}" if bare else "",
                        multiple,
                    ),
                )
                name = f"{engine} {precision}, convolutions by {way}"
                rows.append((name, str(len(reps)), *cells, f"{reps[-1].accuracy:.3f}"))
        head = ("FedNTD", "n", f"s for {o.rounds} rounds", "s of the first round", "examples/s")
        more = ("bare loop, examples/s (n = 1)", "x bare loop (all in)", "accuracy")
        return f"{GOALS['rounds']}\n\n" + markdown((*head, *more), rows)

    def algorithms(self) -> str:
        """Return the seconds of a round of each algorithm that there is, as a multiple of
        FedAvg's."""
        o, rows = self.options, []
        there = {path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml")}
        for precision in o.precisions[:1]:
            reference: list[Rep] = []
            for name in [a for a in ALGORITHMS if a in there]:
                if not (
                    reps := self.fedexp(o.engines[0], precision, o.bare_rounds, f"algorithm={name}")
                ):
                    continue
                reference = reps if name == "fedavg" else reference
                cells = (
                    spread([rep.seconds for rep in reps], ".3f"),
                    spread([rep.rate for rep in reps]),
                )
                multiple = ratios(reps, reference, "seconds") if reference else ""
                rows.append((f"{name} {precision}", str(len(reps)), *cells, multiple))
        head = (f"{o.engines[0]} engine", "n", "s a round, all in", "examples/s", "x FedAvg")
        return f"{GOALS['algorithms']}\n\n" + markdown(head, rows)

    def resnets(self) -> str:
        """Compare the vectorised engine with the sequential one."""
        rows = []
        for model in self.options.models:
            found = {
                engine: self.fedexp(engine, "bf16", 3, f"model={model}")
                for engine in ("vectorised", "sequential")
            }
            for engine, reps in found.items():
                if reps:
                    cells = (
                        spread([rep.seconds for rep in reps], ".2f"),
                        spread([rep.rate for rep in reps]),
                    )
                    multiple = (
                        ratios(reps, found["sequential"], "rate") if found["sequential"] else ""
                    )
                    rows.append((f"{model} {engine}", str(len(reps)), *cells, multiple))
        head = ("FedAvg, bf16", "n", "s a round, all in", "examples/s", "x sequential")
        return f"{GOALS['resnets']}\n\n" + markdown(head, rows)


def first_round(folder: Path) -> str:
    """Return the seconds of the first round of a run, with all that is made once."""
    with (folder / "rounds.csv").open(newline="") as file:
        return next(
            f"{float(row['seconds']):.2f}" for row in csv.DictReader(file) if row["round"] == "1"
        )


def main(arguments: list[str] | None = None) -> int:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--bare-rounds", type=int, default=10, help="of the bare loop and of the algorithms' table"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each contestant but the bare loop"
    )
    parser.add_argument(
        "--rounds-of-steps", type=int, default=10, help="counted rounds that time a step"
    )
    parser.add_argument("--precisions", type=words, default=["tf32", "bf16"])
    parser.add_argument("--engines", type=words, default=["vectorised"])
    parser.add_argument(
        "--convolutions", type=words, default=["streams"], help="hardware.convolution"
    )
    parser.add_argument("--models", type=words, default=list(RESNETS))
    parser.add_argument("overrides", nargs="*", help="of fedexp, for a smaller workload")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("benchmarks.gpu: torch finds no CUDA device on this machine", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fedexp-gpu-") as scratch:
        gpu = Gpu(options, Path(scratch))
        text = [
            f"{measure.machine()}. W1, {data_sentence(gpu.data)}, {' '.join(options.overrides)}".strip(
                ", "
            )
        ]
        text += [
            gpu.step(),
            gpu.headline(),
            gpu.algorithms(),
            gpu.resnets(),
            *gpu.left_out,
        ]
    print("\n\n".join(text))
    if options.device.startswith("cuda"):
        measure.write_section("GPU", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
