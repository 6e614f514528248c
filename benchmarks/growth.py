"""Measure how time and memory of a round grow: one table, and one picture beside RESULTS.md.

- clients a round: of 1,000 clients with a batch of 50 images each, in one process and in two ranks
- clients in all: ten of them a round, who share 600,000 small images
- ResNet-18: ten clients a round with a batch of 50 images each, in one process and in two ranks

The model is W1's CNN unless it is named. --quick uses few clients and only shows that the command
works.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Contestant, fedexp

ENGINES = {
    "sequential": ("hardware.engine=sequential",),
    "2 ranks": ("hardware.engine=workers", "hardware.workers=2"),
}
SAMPLED, CLIENTS, TOTAL = [10, 50, 100, 500], [1000, 100_000], 1000
QUICK = [1, 2], [100], 100  # the same for --quick
PICTURE = measure.RESULTS.with_name("growth.svg")


@dataclass(frozen=True)
class Point:
    """A run: a row of the table."""

    sampled: int  # clients of a round
    clients: int  # in all
    model: str
    engine: str
    images: str  # the data set

    def overrides(self) -> tuple[str, ...]:
        size = (f"num_clients={self.clients}", f"participation={self.sampled / self.clients}")
        chosen = (f"dataset={self.images}", f"model={self.model}", "partition=iid")
        return (*chosen, *size, *ENGINES[self.engine])

    @property
    def name(self) -> str:
        return f"{self.sampled} of {self.clients:,}, {self.model}, {self.engine}"


@dataclass(frozen=True)
class Measured:
    """The figures of a run."""

    megabytes: float  # of the model that a client receives
    examples: float  # of a round
    training: float  # s a round
    round: float  # s
    pss: float  # GiB, peak

    def cells(self) -> list[str]:
        numbers = (self.training, self.round, self.pss)
        return [f"{self.megabytes:.1f}", f"{self.examples:,.0f}", *(f"{n:.2f}" for n in numbers)]


def points(
    sampled: Sequence[int], clients: Sequence[int], total: int, quick: bool = False
) -> list[Point]:
    """Return the runs in the order of the table."""
    large, small = ("few_random_pixels",) * 2 if quick else ("random_pixels", "small_random_pixels")
    found = [Point(n, total, "cnn", engine, large) for engine in ENGINES for n in sampled]
    found += [Point(min(10, n // 2), n, "cnn", "sequential", small) for n in clients]
    ten = min(10, max(sampled))
    return found + [Point(ten, total, "resnet18", engine, large) for engine in ENGINES]


def measure_point(point: Point, rounds: int, work: Path) -> Measured:
    """Run one point, with one round to warm up."""
    settings = ("hardware=cpu", "local.epochs=1", f"rounds={rounds + 1}")
    command = fedexp(*settings, *point.overrides())
    contestant = Contestant(point.name, command)
    rep = measure.run_once(contestant, work / "out", timeout=1800, environment={})
    with (work / "out" / "rounds.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    with (work / "out" / "clients.csv").open(newline="") as file:
        sampled = sum(row["round"] == last["round"] for row in csv.DictReader(file))
    examples = sum(rep.examples) / rounds
    megabytes = int(last["bytes_down"]) / sampled / 1e6
    return Measured(megabytes, examples, examples / rep.rate, rep.seconds, rep.pss)


def draw(found: dict[Point, Measured], path: Path) -> None:
    """Draw seconds and memory by clients of a round; the dashed line grows with the clients."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "growth"  # the same file for the same numbers
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    quantities = (("round", "seconds of a round"), ("pss", "peak memory (PSS), GiB"))
    for panel, (name, label) in zip(panels, quantities, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for point, values in found.items():
            line = f"{point.model} of {point.clients:,}, {point.engine}"
            lines.setdefault(line, []).append((point.sampled, getattr(values, name)))
        for line, pairs in lines.items():
            panel.plot(*zip(*sorted(pairs), strict=True), "o-", label=line, markersize=4)
        most = max(lines.values(), key=len)
        longest = sorted(most)
        (first, value), (last, _) = longest[0], longest[-1]
        panel.plot([first, last], [value, value * last / first], "k--", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="clients of a round", ylabel=label)
    panels[0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    add = parser.add_argument
    add("--sampled", type=numbers, default=SAMPLED, help="numbers of clients of a round")
    add("--clients", type=numbers, default=CLIENTS, help="numbers of clients in all")
    add("--rounds", type=int, default=2, help="rounds, after one warm-up round")
    add("--quick", action="store_true", help="only show that the command works")
    add("--no-results", action="store_true", help="do not change RESULTS.md")
    add("--picture", type=Path, help=f"file of the picture (default: {PICTURE.name}, with results)")
    options = parser.parse_args()
    total = TOTAL
    if options.quick:
        options.sampled, options.clients, total = QUICK
        options.rounds = 1
    found: dict[Point, Measured] = {}
    left_out = []
    with tempfile.TemporaryDirectory(prefix="fedexp-growth-") as scratch:
        for point in points(options.sampled, options.clients, total, options.quick):
            try:
                found[point] = measure_point(point, options.rounds, Path(scratch))
            except (measure.Rejected, RuntimeError) as error:
                left_out.append(f"{point.name}: left out: {error}")
                print(left_out[-1], flush=True)
                continue
            print(f"{point.name}: {' | '.join(found[point].cells())}", flush=True)
    head = ("clients of a round", "model, MB", "examples", "training, s", "a round, s", "PSS, GiB")
    rows = [[point.name, *values.cells()] for point, values in found.items()]
    settings = f"one epoch, mean of {options.rounds} rounds after one to warm up"
    text = [
        f"{measure.machine()}. Random images, {settings}. Peaks include loading and partitioning.",
        measure.markdown(head, rows),
        *left_out,
    ]
    picture = options.picture or (None if options.no_results else PICTURE)
    if picture is not None and found:
        draw(found, picture)
        text.insert(1, f"![Time and memory by clients of a round]({picture.name})")
    print("\n\n".join(text))
    if not options.no_results:
        measure.write_section("Growth", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
