"""`make bench`: compare fedexp's engines on W1 with the bare loop and the floor (see README.md)."""

import argparse
import re
import sys
import tempfile
from itertools import product
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Contestant, fedexp
from benchmarks.w1 import ALPHA, EPOCHS, OVERRIDES, data_overrides, data_sentence, prepare_workload
from fedexp.engine.hardware import cores


def has_bf16() -> bool:
    """Return whether this CPU has instructions for bf16; Linux lists them in /proc/cpuinfo."""
    listed = Path("/proc/cpuinfo")
    flags = set(listed.read_text(encoding="utf-8").split()) if listed.exists() else set()
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def contestants(options: argparse.Namespace, workload: Path, data: list[str]) -> list[Contestant]:
    """Return the contestants: for each algorithm and precision, bare loop, floor and engines.

    A reference comes before the contestants that are compared with it.
    """
    there = {path.stem for path in (measure.ROOT / "conf" / "algorithm").glob("*.yaml")}
    found = []
    for algorithm, precision in product(
        [a for a in options.algorithms if a in there], options.precisions
    ):
        by_hand = algorithm if algorithm in ("fedavg", "fedntd") else "fedavg"
        name = f"{by_hand} {precision}"
        bare = f"bare loop, {name}, {options.threads} threads"
        floor = f"floor, {name}, {options.workers} processes"
        found += [by_hand_of(bare, options, workload, by_hand, precision, 0)]
        found += [by_hand_of(floor, options, workload, by_hand, precision, options.workers)]
        for engine in options.engines:
            found.append(
                Contestant(
                    f"fedexp {engine}, {algorithm} {precision}",
                    engine_command(options, engine, algorithm, precision, data),
                    bare if engine == "sequential" else floor,
                )
            )
    unique = list(dict.fromkeys(found))
    wanted = unique
    if options.only:
        named = re.compile("|".join(map(re.escape, options.only)))
        wanted = [c for c in unique if named.search(c.name)]
    references = {c.reference for c in wanted}
    return [c for c in unique if c in wanted or c.name in references]


def by_hand_of(
    name: str,
    options: argparse.Namespace,
    workload: Path,
    algorithm: str,
    precision: str,
    workers: int,
) -> Contestant:
    flags = [
        f"--algorithm={algorithm}",
        f"--precision={precision}",
        f"--rounds={options.rounds + 1}",
    ]
    flags += [f"--workers={workers}", f"--threads={1 if workers else options.threads}"]
    flags += ["--local-evaluation"] if options.local_evaluation else []
    return Contestant(name, (sys.executable, "-m", "benchmarks.bare", str(workload), "OUT", *flags))


def engine_command(
    options: argparse.Namespace, engine: str, algorithm: str, precision: str, data: list[str]
) -> tuple[str, ...]:
    settings = [
        *OVERRIDES,
        *data,
        f"algorithm={algorithm}",
        f"rounds={options.rounds + 1}",
        "hardware=cpu",
    ]
    settings += [f"hardware.engine={engine}", f"hardware.precision={precision}"]
    settings += ["forgetting_metric=in_out_local"] if options.local_evaluation else []
    if engine == "workers":
        settings += [f"hardware.workers={options.workers}"]
    else:
        settings += [f"hardware.threads={options.threads}"]
    return fedexp(*settings)


def make_parser() -> argparse.ArgumentParser:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    engines, algorithms = ["sequential", "workers", "vectorised"], ["fedavg", "fedntd", "scaffold"]
    add("--engines", type=words, default=engines, help="comma-separated engines")
    add("--algorithms", type=words, default=algorithms, help="comma-separated algorithms")
    add(
        "--precisions",
        type=words,
        help="default: fp32, and bf16 where the CPU has bf16 instructions",
    )
    add("--repeats", type=int, default=5, help="repetitions of each contestant")
    add("--rounds", type=int, default=2, help="rounds per repetition, after one warm-up round")
    add("--epochs", type=int, default=EPOCHS, help="local epochs")
    add("--alpha", type=float, default=ALPHA, help="alpha of the Dirichlet partition")
    add(
        "--workers",
        type=int,
        default=cores(),
        help="worker processes of the bare loop and of fedexp",
    )
    add("--threads", type=int, default=cores(), help="threads of contestants with one process")
    add("--local-evaluation", action="store_true", help="test every local model class by class")
    add(
        "--only",
        type=str,
        action="append",
        default=[],
        help="measure only contestants whose name contains this text; may be repeated",
    )
    add("--quick", action="store_true", help="FedAvg, one epoch, one repetition, one counted round")
    add("--no-results", action="store_true", help="do not change RESULTS.md")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.precisions is None:
        options.precisions = ["fp32", "bf16"]
        if not has_bf16():
            options.precisions = ["fp32"]
            print(
                "bf16 is left out because this CPU emulates it; use --precisions=fp32,bf16 to"
                " measure it"
            )
    if options.quick:
        options.algorithms, options.epochs, options.repeats, options.rounds = ["fedavg"], 1, 1, 1
    return options


def changed_overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides of the flags that change W1."""
    found = [] if options.epochs == EPOCHS else [f"local.epochs={options.epochs}"]
    return found if options.alpha == ALPHA else [*found, f"alpha={options.alpha:g}"]


def heading(options: argparse.Namespace, data: list[str], what: str) -> str:
    return (
        f"{measure.machine()}. W1, {data_sentence(data)}, {what}; alpha={options.alpha:g},"
        f" E={options.epochs};"
        f" {options.repeats} repetitions in turn, each of {options.rounds} rounds after one to warm"
        " up. Median (smallest to largest)."
    )


def main() -> int:
    options = parse(make_parser())
    data = [*data_overrides(), *changed_overrides(options)]
    with tempfile.TemporaryDirectory(prefix="fedexp-bench-") as scratch:
        work = Path(scratch)
        prepare_workload(options.rounds + 1, data).save(work / "w1")
        chosen = contestants(options, work / "w1", data)
        reps, left_out = measure.measure(
            chosen, options.repeats, work, {"OMP_NUM_THREADS": str(options.threads)}
        )
    result = measure.table(chosen, reps)
    what = (
        "with class accuracy of every local model"
        if options.local_evaluation
        else "global evaluation only"
    )
    text = [
        heading(options, data, what),
        result,
        *left_out,
    ]
    print("\n\n".join(text))
    if not options.no_results:
        name = "W1 with evaluation of every local model" if options.local_evaluation else "W1"
        measure.write_section(name, "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
