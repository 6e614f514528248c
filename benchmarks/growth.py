"""Measure how time and memory of a round grow with the cohort, all clients and the model size."""

import argparse
import csv
import sys
import tempfile
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Contestant, fedexp

SMALL = ("dataset=few_random_pixels", "partition=iid", "num_clients=100")
LARGE = ("dataset=random_pixels", "partition=iid")


def points(sampled: list[int], clients: list[int]) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """Return a dict that maps each table to its rows, as pairs (name of the row, overrides).

    In the first and third table, each client has one batch of 50 examples. In the second table, the
    clients share 50,000 examples, however many clients there are. This table shows the cost per
    client.
    """
    models: dict[str, tuple[str, ...]]
    models = {
        f"cnn, hidden {width}": ("model=cnn", f"model.hidden=[{width}]")
        for width in (128, 512, 2048)
    }
    models |= {name: (f"model={name}",) for name in ("t_cnn", "resnet10", "resnet18")}
    tenth = (*SMALL, "participation=0.1")
    of_round: list[tuple[str, tuple[str, ...]]] = [
        (str(n), (*SMALL, f"participation={n / 100}")) for n in sampled
    ]
    in_total: list[tuple[str, tuple[str, ...]]] = [
        (f"{n:,}", (*LARGE, f"num_clients={n}", f"participation={10 / n}")) for n in clients
    ]
    return {
        "clients of a round (of 100)": of_round,
        "clients in total (10 of them a round)": in_total,
        "model (10 clients a round)": [(name, (*tenth, *models[name])) for name in models],
    }


def measure_point(
    overrides: tuple[str, ...], hardware: list[str], rounds: int, work: Path
) -> list[str]:
    """Run one point and return its cells.

    The cells are the model in MB, examples per round, seconds of training, seconds of a round, and
    peak memory.
    """
    command = fedexp(
        "hardware=cpu", *hardware, *overrides, "local.epochs=1", f"rounds={rounds + 1}"
    )
    rep = measure.run_once(Contestant("point", command), work / "out", timeout=600, environment={})
    with (work / "out" / "rounds.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    with (work / "out" / "clients.csv").open(newline="") as file:
        sampled = sum(row["round"] == last["round"] for row in csv.DictReader(file))
    examples = sum(rep.examples) / rounds
    return [
        f"{int(last['bytes_down']) / sampled / 1e6:.1f}",
        f"{examples:,.0f}",
        f"{examples / rep.rate:.2f}",
        f"{rep.seconds:.2f}",
        f"{rep.pss:.2f} ({rep.rss:.2f})",
    ]


def main() -> int:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument(
        "--sampled",
        type=numbers,
        default=[1, 3, 10, 30, 100],
        help="comma-separated numbers of clients per round",
    )
    parser.add_argument(
        "--clients",
        type=numbers,
        default=[100, 1000, 10_000],
        help="comma-separated total numbers of clients",
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds, after one warm-up round")
    parser.add_argument("--no-results", action="store_true", help="do not change RESULTS.md")
    parser.add_argument(
        "hardware", nargs="*", default=["hardware.engine=sequential"], help="overrides of the runs"
    )
    options = parser.parse_args()
    head = ("", "model, MB", "examples a round", "s training", "s a round", "peak PSS (RSS), GiB")
    settings = (
        f"`{' '.join(options.hardware)}`, one epoch, mean of {options.rounds} rounds after one to"
        " warm up"
    )
    text = [
        f"{measure.machine()}. Random pixels of 32 x 32, {settings}. Peaks include loading and"
        " partitioning."
    ]
    with tempfile.TemporaryDirectory(prefix="fedexp-growth-") as scratch:
        for name, chosen in points(options.sampled, options.clients).items():
            rows = []
            for label, overrides in chosen:
                try:
                    cells = measure_point(
                        overrides, options.hardware, options.rounds, Path(scratch)
                    )
                except (measure.Rejected, RuntimeError) as error:
                    print(f"{name}: {label}: left out: {error}")
                    continue
                rows.append([label, *cells])
                print(f"{name}: {' | '.join(rows[-1])}", flush=True)
            text.append(measure.markdown((name, *head[1:]), rows))
    print("\n\n".join(text))
    if not options.no_results:
        measure.write_section("Growth", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
