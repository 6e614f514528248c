"""Measure the speed of a GPU on W1, in parts whose results are written as soon as they are known.

- step: a local step of ten clients
- rounds: 200 rounds of FedNTD, compared with the bare loop
- algorithms: algorithms compared with FedAvg
- resnets: ResNets on the vectorised engine, compared with the sequential engine
- repeat: whether two equal runs give equal results
- jobs: whole runs side by side on one GPU, under CUDA MPS if the machine has it

Tables show the median, the smallest and the largest value.
"""

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from tools.gpu_day import Day, multi_process_service

from benchmarks import measure
from benchmarks.measure import (
    Contestant,
    Rep,
    fedexp,
    last_values,
    markdown,
    ratios,
    read_rounds,
    run_once,
    spread,
)
from benchmarks.w1 import (
    OVERRIDES,
    data_overrides,
    data_sentence,
    make_simulation,
    prepare_workload,
)
from fedexp.training.exchange import Exchange, broadcast, sample

ALGORITHMS = ("fedavg", "fedprox", "fedntd", "scaffold", "moon")
RESNETS = ("resnet10", "resnet18", "resnet50")

# part -> the goal on one H100
GOALS = {
    "step": "goal: 1.5 ms in tf32, 1 ms in bf16",
    "rounds": "goal: 15 s, the first round under 3 s",
    "algorithms": (
        "goals: fedprox and scaffold at most 1.2, fedntd and moon at most 1.5 times fedavg"
    ),
    "resnets": "goal: resnet18 at least 3 times the sequential engine",
    "repeat": "goal: the same files",
    "jobs": "goal: 200 runs an hour",
}


class Gpu:
    """Runs contestants one by one. `left_out` has messages about the ones that failed."""

    def __init__(self, options: argparse.Namespace, work: Path):
        self.options, self.work, self.data = options, work, [*data_overrides(), *options.overrides]
        self.left_out: list[str] = []
        prepare_workload(options.bare_rounds, self.data).save(work / "w1")

    def fedexp(self, engine: str, precision: str, rounds: int, *overrides: str) -> list[Rep]:
        """Run fedexp several times and return the results, or an empty list if a run fails."""
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
        """Run the bare loop once, with a test of the global model in every round as in fedexp."""
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
            except (measure.Rejected, RuntimeError) as error:
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
        """Time the local training of ten clients with ten batches each."""
        rows = []
        for precision, algorithm in product(self.options.precisions, ("fedavg", "fedntd")):
            times = self._steps(precision, algorithm)
            rows.append((f"{algorithm} {precision}", str(len(times)), spread(times, ".3f")))
            print(*rows[-1], flush=True)
        return markdown(("a step of ten clients, batches of 50", "n (rounds)", "ms"), rows)

    def _steps(self, precision: str, algorithm: str) -> list[float]:
        """Return the milliseconds per step of each round, after three warm-up rounds."""
        size = (
            "num_clients=100",
            "participation=0.1",
            "partition=iid",
            "local.epochs=1",
            "local.batch_size=50",
        )
        hardware = [f"hardware.device={self.options.device}", "hardware.engine=vectorised"]
        hardware += [f"hardware.precision={precision}"]
        choices = (*size, *hardware, f"algorithm={algorithm}")
        simulation = make_simulation([*self.data, *choices])
        state, times = simulation.initial_state(), []
        for number in range(1, 4 + self.options.rounds_of_steps):
            clients = sample(simulation, number)
            exchange = Exchange(simulation, simulation.algorithm, state.server, {}, number)
            cohort = exchange.assemble(clients)
            sent = broadcast(simulation.algorithm, state.server)
            self._wait()
            start = time.perf_counter()
            exchange.train(sent, cohort, evaluate_local=False)
            self._wait()
            times.append(
                1000 * (time.perf_counter() - start) / max(each.steps for each in cohort.schedules)
            )
        simulation.engine.close()
        return times[3:]

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def rounds(self) -> str:
        """Time all rounds of FedNTD, without the start of the program.

        The speed is compared with the bare loop over the rounds that the bare loop runs.
        """
        o, rows = self.options, []
        for precision in o.precisions:
            bare = self.bare(precision)
            reps = self.fedexp("vectorised", precision, o.rounds, "algorithm=fedntd")
            if not reps:
                continue
            multiple, rate = "", ""
            if bare:
                same = read_rounds(self.work / "out", last=o.bare_rounds)
                if same.examples != bare[0].examples:
                    raise RuntimeError("fedexp and the bare loop trained different cohorts")
                multiple = f"{bare[0].seconds / same.seconds:.1f}"
                rate = f"{bare[0].rate:,.0f}"
            totals = [rep.total for rep in reps]
            rates = [rep.rate for rep in reps]
            cells = (spread(totals, ".1f"), first_round(self.work / "out"), spread(rates))
            accuracy = f"{reps[-1].accuracy:.3f}"
            rows.append((precision, str(len(reps)), *cells, rate, multiple, accuracy))
        head = ("FedNTD", "n", f"s for {o.rounds} rounds", "s of the first round", "examples/s")
        more = ("bare loop, examples/s (n = 1)", "x bare loop (all in)", "accuracy")
        return markdown((*head, *more), rows)

    def algorithms(self) -> str:
        """Compare the seconds per round of each algorithm with FedAvg's."""
        o, rows = self.options, []
        precision = o.precisions[0]
        reference: list[Rep] = []
        for name in ALGORITHMS:
            reps = self.fedexp("vectorised", precision, o.bare_rounds, f"algorithm={name}")
            reference = reps if name == "fedavg" else reference
            if reps:
                rows.append(row(f"{name} {precision}", reps, reference, "seconds"))
        return markdown(("", "n", "s a round, all in", "examples/s", "x FedAvg"), rows)

    def resnets(self) -> str:
        """Compare the vectorised engine with the sequential engine for each ResNet."""
        rows = []
        for model in self.options.models:
            sequential = self.fedexp("sequential", "bf16", 3, f"model={model}")
            vectorised = self.fedexp("vectorised", "bf16", 3, f"model={model}")
            for engine, reps in (("vectorised", vectorised), ("sequential", sequential)):
                if reps:
                    rows.append(row(f"{model} {engine}", reps, sequential, "rate"))
        head = ("FedAvg, bf16", "n", "s a round, all in", "examples/s", "x sequential")
        return markdown(head, rows)

    def repeat(self) -> str:
        """Run FedNTD twice in each precision, and compare the files with class accuracies."""
        rows = []
        for precision in self.options.precisions:
            found = set()
            for _ in range(2):
                self._ntd(precision, self.options.bare_rounds)
                found.add((self.work / "out" / "class_accuracy.csv").read_bytes())
            rows.append((precision, "yes" if len(found) == 1 else "no"))
        return markdown(("FedNTD, twice", "same class_accuracy.csv"), rows)

    def jobs(self) -> str:
        """Time whole runs that share the GPU, one for each job, with the start of the program."""
        o, rows = self.options, []
        hardware = (f"hardware.device={o.device}", f"hardware.precision={o.precisions[-1]}")
        settings = [*OVERRIDES, *self.data, *hardware, "hardware.engine=vectorised"]
        settings += [f"rounds={o.rounds}"]
        folder = self.work / "jobs"
        day = Day(argparse.Namespace(work=folder, minutes=o.job_minutes, overrides=[]))
        with multi_process_service():
            for algorithm, together in product(("fedntd", "fedavg"), o.jobs):
                seeds = ",".join(str(seed) for seed in range(together))
                parts = last_values([*settings, f"algorithm={algorithm}", f"seed={seeds}"])
                parts = ["--config-dir", str(measure.CONF), *parts]
                start, before = time.perf_counter(), len(day.known)
                day.run(f"{algorithm}{together}", parts, together)
                seconds, ended = time.perf_counter() - start, len(day.known) - before
                if ended < together:
                    log = measure.tail(folder / f"{algorithm}{together}" / "log.txt")
                    what = f"{ended} of {together} runs ended in {seconds:.0f} s; {log}"
                    self.left_out.append(f"{algorithm}, {together} jobs: not measured: {what}")
                    print(self.left_out[-1], flush=True)
                    continue
                cells = (f"{seconds:.1f}", f"{3600 * ended / seconds:.0f}", f"{day.memory:.1f}")
                rows.append((algorithm, str(together), *cells))
                print(*rows[-1], flush=True)
        head = (f"{o.precisions[-1]}, {o.rounds} rounds", "jobs at a time", "s for all (n = 1)")
        return markdown((*head, "runs an hour", "GiB of the GPU"), rows)

    def _ntd(self, precision: str, rounds: int) -> None:
        """Run FedNTD on the vectorised engine, and keep all files of the run."""
        settings = (
            *OVERRIDES,
            *self.data,
            "algorithm=fedntd",
            f"rounds={rounds}",
            f"hardware.device={self.options.device}",
            "hardware.engine=vectorised",
            f"hardware.precision={precision}",
        )
        out = str(self.work / "out")
        shutil.rmtree(out, ignore_errors=True)
        command = [part.replace("OUT", out) for part in fedexp(*settings)]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, cwd=measure.ROOT, timeout=7200
        )


def row(name: str, reps: list[Rep], reference: list[Rep], quantity: str) -> tuple[str, ...]:
    """Return a row of a table. Its last cell is the ratio of a quantity to the reference's."""
    seconds = [rep.seconds for rep in reps]
    rates = [rep.rate for rep in reps]
    multiple = ratios(reps, reference, quantity) if reference else ""
    return name, str(len(reps)), spread(seconds, ".3f"), spread(rates), multiple


def first_round(folder: Path) -> str:
    """Return the seconds of the first round of a run, which includes one-time preparation."""
    with (folder / "rounds.csv").open(newline="") as file:
        return next(
            f"{float(row['seconds']):.2f}" for row in csv.DictReader(file) if row["round"] == "1"
        )


def main(arguments: list[str] | None = None) -> int:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="device of all runs (default: cuda)")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of the part `rounds`")
    parser.add_argument(
        "--bare-rounds",
        type=int,
        default=10,
        help="rounds of the bare loop and of the other comparisons",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each contestant, except for the bare loop"
    )
    parser.add_argument(
        "--rounds-of-steps", type=int, default=10, help="number of rounds in which steps are timed"
    )
    parser.add_argument(
        "--precisions",
        type=words,
        default=["fp32", "tf32", "bf16"],
        help="comma-separated precisions",
    )
    parser.add_argument(
        "--models", type=words, default=list(RESNETS), help="models of the part `resnets`"
    )
    parser.add_argument(
        "--parts", type=words, default=list(GOALS), help=f"comma-separated: {', '.join(GOALS)}"
    )
    parser.add_argument(
        "--jobs",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[1, 2, 4, 8],
        help="numbers of jobs of the part `jobs`",
    )
    parser.add_argument(
        "--job-minutes", type=float, default=8, help="time for all runs of the part `jobs`"
    )
    parser.add_argument("overrides", nargs="*", help="options of fedexp, for a smaller workload")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(GOALS):
        parser.error(f"--parts={','.join(unknown)}: must be one of {', '.join(GOALS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("benchmarks.gpu: torch finds no CUDA device on this machine", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fedexp-gpu-") as scratch:
        gpu = Gpu(options, Path(scratch))
        workload = f"{measure.machine()}. W1, {data_sentence(gpu.data)}"
        for part in options.parts:
            table = getattr(gpu, part)()
            text = "\n\n".join([workload, GOALS[part], table, *gpu.left_out])
            print(f"{part}\n\n{text}\n", flush=True)
            if options.device.startswith("cuda"):
                measure.write_section(f"GPU: {part}", text)
            gpu.left_out.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main())
