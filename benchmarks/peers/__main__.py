"""`make bench-peers`: compare fedexp with Flower and pfl-research on W1 (see ../README.md)."""

import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks import __main__ as bench
from benchmarks import measure
from benchmarks.measure import Contestant
from benchmarks.w1 import EPOCHS, data_overrides, prepare_workload


def peers(workload: Path, rounds: int, workers: int) -> list[Contestant]:
    """Return the contestants for the other simulators that are installed."""
    arguments = (str(workload), "OUT", f"--rounds={rounds}")
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={workers}",
    )
    flower = (sys.executable, "-m", "benchmarks.peers.flower", *arguments, f"--workers={workers}")
    pfl = (*torchrun, "-m", "benchmarks.peers.pfl_research", *arguments)
    found = []
    if find_spec("flwr") and find_spec("ray"):
        found.append(
            Contestant(
                f"Flower {version('flwr')} (Ray {version('ray')}), {workers} actors, fp32", flower
            )
        )
    if find_spec("pfl"):
        found.append(Contestant(f"pfl-research {version('pfl')}, {workers} processes, fp32", pfl))
    return found


def main() -> int:
    options, data = bench.parse(), data_overrides()
    data += [] if options.epochs == EPOCHS else [f"local.epochs={options.epochs}"]
    options.algorithms = ["fedavg"]
    with tempfile.TemporaryDirectory(prefix="fedexp-bench-") as scratch:
        work = Path(scratch)
        rivals = peers(work / "w1", options.rounds + 1, options.workers)
        if not rivals:
            print(
                "neither Flower nor pfl-research is installed: pip install -e '.[bench]'",
                file=sys.stderr,
            )
            return 2
        prepare_workload(options.rounds + 1, data).save(work / "w1")
        own = [
            c for c in bench.contestants(options, work / "w1", data) if c.name.startswith("fedexp")
        ]
        reps, left_out = measure.measure(
            [*rivals, *own], options.repeats, work, {"OMP_NUM_THREADS": "1"}
        )
    there = [c.name for c in rivals if c.name in reps]
    fastest = max(there, key=lambda name: median(r.rate for r in reps[name]), default="")
    chosen = [*rivals, *(replace(c, reference=fastest) for c in own)]
    settings = (
        "FedAvg, as each has it: fedexp tests the global model in every round, the peers test"
        " nothing"
    )
    heading = bench.heading(options, data, settings)
    text = [heading, measure.table(chosen, reps), *left_out]
    print("\n\n".join(text))
    if not options.no_results:
        measure.write_section("Against other simulators", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
