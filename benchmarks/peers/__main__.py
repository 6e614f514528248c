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

QUANTITIES = {  # by their names in `measure.Rep`: the name in a table, the unit, and the format
    "rate": ("training", "examples/s", ",.0f"),
    "tests": ("test", "s", ".2f"),
    "untested": ("a round without the test", "s", ".2f"),
    "seconds": ("a round", "s", ".2f"),
}


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


def figures(contestants: Sequence[Contestant], reps: dict[str, list[Rep]]) -> str:
    """Return a Markdown table of all quantities."""
    rows = []
    for own in contestants:
        found, cells = reps[own.name], [own.name, str(len(reps[own.name]))]
        for quantity, (_, _, form) in QUANTITIES.items():
            cells.append(spread([getattr(rep, quantity) for rep in found], form))
        rows.append([*cells, f"{max(rep.pss for rep in found):.2f}"])
    columns = (f"{name}, {unit}" for name, unit, _ in QUANTITIES.values())
    return measure.markdown(("", "n", *columns, "peak PSS, GiB"), rows)


def shares(contestants: Sequence[Contestant], reps: dict[str, list[Rep]], limit: str) -> str:
    """Return a Markdown table of all speeds as shares of the speed of torch.mm."""
    rows = []
    for own in contestants:
        cells = [own.name]
        for quantity in QUANTITIES:
            pair = (own.name, limit) if quantity == "rate" else (limit, own.name)  # or of seconds
            cells.append(ratios(reps[pair[0]], reps[pair[1]], quantity))
        rows.append(cells)
    columns = (name for name, _, _ in QUANTITIES.values())
    return measure.markdown(("share of torch.mm", *columns), rows)


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
    finished = [c for c in (limit, *rivals, *own) if c.name in reps]
    text = [heading, figures(finished, reps)]
    if limit in finished:
        text.append(shares(finished[1:], reps, limit.name))
    text += left_out
    print("\n\n".join(text))
    if not options.no_results:
        measure.write_section("Against other simulators", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
