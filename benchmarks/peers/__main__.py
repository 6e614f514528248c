"""`make bench-peers`: compare fedexp with Flower and pfl-research on W1 (see ../README.md)."""

import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from benchmarks import __main__ as bench
from benchmarks import measure
from benchmarks.measure import Contestant, Rep, ratios, spread
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


def table(contestants: Sequence[Contestant], reps: dict[str, list[Rep]], limit: str) -> str:
    """Return a Markdown table. In each cell, the share of torch.mm's speed follows the figure."""
    rounds = ("a round without the test, s", "a round, s")
    head = ("", "n", "training, examples/s", "test, s", *rounds, "peak PSS, GiB")
    rows = []
    for own in (c for c in contestants if c.name in reps):
        found, cells = reps[own.name], [own.name, str(len(reps[own.name]))]
        fastest = reps.get(limit)
        for quantity in ("rate", "tests", "untested", "seconds"):
            form = ",.0f" if quantity == "rate" else ".2f"
            cell = spread([getattr(rep, quantity) for rep in found], form)
            if fastest and quantity == "rate":
                cell += f"; {ratios(found, fastest, quantity)}"
            elif fastest:
                cell += f"; {ratios(fastest, found, quantity)}"
            cells.append(cell)
        rows.append([*cells, f"{max(rep.pss for rep in found):.2f}"])
    return measure.markdown(head, rows)


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
        product = (sys.executable, "-m", "benchmarks.peers.product", str(work / "w1"), "OUT")
        sizes = (f"--rounds={options.rounds + 1}", f"--workers={options.workers}")
        limit = Contestant(f"torch.mm, {options.workers} processes, fp32", (*product, *sizes))
        own = [
            c for c in bench.contestants(options, work / "w1", data) if c.name.startswith("fedexp")
        ]
        reps, left_out = measure.measure(
            [limit, *rivals, *own], options.repeats, work, {"OMP_NUM_THREADS": "1"}
        )
    settings = "FedAvg; each tests the global model on all test images in every round"
    heading = bench.heading(options, data, settings)
    text = [heading, table([limit, *rivals, *own], reps, limit.name), *left_out]
    print("\n\n".join(text))
    if not options.no_results:
        measure.write_section("Against other simulators", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
