"""Measure the cost of 100,000 clients (10 per round), of 3,000 rounds, and of 3 GB of images.

The overhead of a round is the time that is spent neither on training nor on testing: sampling the
cohort and its batches, aggregation, metrics and files. The time to start is the time before the
first round: imports, data, partition and model.
"""

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from benchmarks import measure
from benchmarks.measure import Contestant, fedexp, spread

LIMITS = {"seconds to start": 20.0, "overhead of a round, ms": 50.0, "peak PSS, GiB": 4.0}
PARTITIONS = ("iid", "sharding")


def many_clients(partition: str, clients: int, rounds: int, work: Path) -> dict[str, list[float]]:
    """Return a dict that maps each measure in LIMITS to its values.

    The overhead has one value for each round after the first.
    """
    size = (
        f"num_clients={clients}",
        f"participation={10 / clients}",
        f"rounds={rounds}",
        f"partition={partition}",
    )
    settings = (
        "dataset=small_random_pixels",
        "model.hidden=[64]",
        "local.epochs=1",
        "local.batch_size=10",
    )
    quiet = ("hardware=cpu", "hardware.engine=sequential", "figures=false")
    start = time.monotonic()
    rep = measure.run_once(
        Contestant("clients", fedexp(*size, *settings, *quiet)), work / "out", 1800, {}
    )
    whole = time.monotonic() - start
    rounds_of = read(work / "out")
    overhead = [1000 * without_work(row) for row in rounds_of[1:]]
    return dict(zip(LIMITS, ([whole - rep.total], overhead, [rep.pss]), strict=True))


def many_rounds(rounds: int, work: Path) -> tuple[list[float], list[float], float]:
    """Measure the times and the memory of a run on scikit-learn's digits.

    Return the seconds of each round, the memory in GiB (measured twice a second), and the total
    seconds.
    """
    settings = (
        "dataset=digits",
        "num_clients=20",
        "participation=0.25",
        "local.epochs=1",
        f"rounds={rounds}",
    )
    quiet = ("hardware=cpu", "hardware.engine=sequential", "figures=false")
    memory: list[float] = []
    start = time.monotonic()
    measure.run_once(
        Contestant("rounds", fedexp(*settings, *quiet)), work / "out", 3600, {}, memory
    )
    return [float(row["seconds"]) for row in read(work / "out")], memory, time.monotonic() - start


def many_images(count: int, work: Path) -> tuple[float, float]:
    """Return the peak PSS in GiB of a run on images of 224 x 224 pixels, and their size in GiB.

    The run decodes the images and stores them in its cache.
    """
    for split, share in (("train", count), ("test", 200)):
        for number in range(2):
            folder = work / "photos" / split / f"{number}"
            folder.mkdir(parents=True)
            for i in range(share // 2):
                Image.new("RGB", (1, 1), (i % 256, 100 * number, 0)).save(folder / f"{i}.bmp")
    settings = (
        *("dataset=image_folder", f"dataset.root={work / 'photos'}", "dataset.size=224"),
        *(f"data_dir={work}", "model.channels=[4]", "model.hidden=[8]", "local.epochs=1"),
        *("num_clients=100", "participation=0.01", "partition=iid", "rounds=2"),
    )
    quiet = ("hardware=cpu", "hardware.engine=sequential", "figures=false")
    command = Contestant("images", fedexp(*settings, *quiet))
    rep = measure.run_once(command, work / "out", 3600, {})
    return rep.pss, count * 224 * 224 * 3 / 2**30


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "rounds.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["round"]) > 0]


def without_work(row: dict[str, str]) -> float:
    """Return the seconds of a round that went neither into training nor into testing models."""
    return float(row["seconds"]) - float(row["train_seconds"]) - float(row["evaluation_seconds"])


def parts(values: Sequence[float], count: int = 3) -> list[str]:
    """Return the median of each part of a sequence, in order."""
    size = len(values) // count
    return [f"{statistics.median(values[i * size : (i + 1) * size]):.3g}" for i in range(count)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    add = parser.add_argument
    add("--clients", type=int, default=100_000, help="number of clients")
    add(
        "--partitions",
        type=lambda text: text.split(","),
        default=list(PARTITIONS),
        help="comma-separated partitions of the runs with many clients",
    )
    add("--client-rounds", type=int, default=20, help="rounds of the runs with many clients")
    add("--rounds", type=int, default=3000, help="rounds of the long run on few clients")
    add("--images", type=int, default=20_000, help="number of images of 224 x 224 pixels")
    add("--no-results", action="store_true", help="do not change RESULTS.md")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options, rows = parse(arguments), []
    with tempfile.TemporaryDirectory(prefix="fedexp-scale-") as scratch:
        for partition in options.partitions:
            found = many_clients(partition, options.clients, options.client_rounds, Path(scratch))
            cells = [spread(values, ".1f") for values in found.values()]
            rows.append([partition, f"{options.client_rounds - 1}", *cells])
            print(f"{options.clients:,} clients, {' | '.join(rows[-1])}", flush=True)
        seconds, memory, whole = many_rounds(options.rounds, Path(scratch))
        pss, size = many_images(options.images, Path(scratch, "images"))
    goals = ["goal", "", *(f"at most {limit:g}" for limit in LIMITS.values())]
    head = ("partition", "n (rounds)", *LIMITS)
    settled = memory[len(memory) // 10 :]  # after the imports
    long = [
        ["ms a round", *parts([1000 * value for value in seconds[1:]])],
        ["PSS, GiB", *parts(settled)],
    ]
    text = [
        (
            f"{measure.machine()}. {options.clients:,} clients, 10 a round, 6 random images of 16 x"
            " 16 pixels each, `hardware.engine=sequential`; one run of each partition, median"
            " (smallest to largest) of its rounds but the first."
        ),
        measure.markdown(head, [*rows, goals]),
        (
            f"{options.rounds:,} rounds on scikit-learn's digits (20 clients, 5 a round), one run,"
            f" {whole:.0f} s in all: medians of the first, the second and the last third."
        ),
        measure.markdown(("", "first", "second", "last"), long),
        (
            f"A run that decodes and trains on {size:.1f} GiB of images of 224 x 224 pixels, which"
            f" stay on disk: at most {pss:.1f} GiB of memory (PSS)."
        ),
    ]
    print("\n\n".join(text))
    if not options.no_results:
        measure.write_section("Scale", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
