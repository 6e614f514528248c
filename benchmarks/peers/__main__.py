"""Compare fedexp with other simulators on W1 (see ../README.md), on a CPU or a GPU.

On a CPU, the limit is `torch.mm` with as many multiply-adds, and fedexp trains in worker processes.
On a GPU, fedexp uses the vectorised engine, and a plain PyTorch loop takes part. All contestants
train the same cohorts and test the global model on all test images in every round. With
--model=resnet18, pfl-research is left out, since it does not send running statistics. BlazeFL needs
Python 3.14, so an environment of its own, with fedexp for the workload:

    python3.14 -m venv .blazefl && .blazefl/bin/pip install -e . blazefl
    python -m benchmarks.peers --blazefl .blazefl/bin/python
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from benchmarks import __main__ as bench
from benchmarks import measure
from benchmarks.measure import Contestant, Rep, fedexp, ratios, spread
from benchmarks.w1 import OVERRIDES, data_overrides, prepare_workload

QUANTITIES = {  # by their names in `measure.Rep`: the name in a table, the unit, and the format
    "rate": ("training", "examples/s", ",.0f"),
    "tests": ("test", "s", ".2f"),
    "untested": ("a round without the test", "s", ".2f"),
    "seconds": ("a round", "s", ".2f"),
}


VERSIONS = (
    "import sys, importlib.metadata as m; print('BlazeFL', m.version('blazefl'), '(Python',"
    " sys.version.split()[0], 'with the GIL)' if getattr(sys, '_is_gil_enabled', lambda: 1)() else"
    " 'without the GIL)')"
)


def blazefl_of(python: str) -> str:
    """Return the versions of BlazeFL and Python of an interpreter."""
    asked = (python, "-c", VERSIONS)
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def peers(options: argparse.Namespace, workload: Path) -> list[Contestant]:
    """Return the contestants for the other simulators that are installed."""
    workers, settings = options.workers, f"{options.device} {options.precision}"
    arguments = [str(workload), "OUT", f"--rounds={options.rounds + 1}", f"--workers={workers}"]
    arguments += [f"--device={options.device}", f"--precision={options.precision}"]
    arguments += [f"--model={options.model}"]
    start: tuple[str, ...] = (sys.executable,)
    processes = 1  # on one GPU, as NCCL refuses several
    if options.device == "cpu":
        start += ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")
        processes = workers
    found = []
    if find_spec("flwr") and find_spec("ray"):
        name = f"Flower {version('flwr')} (Ray {version('ray')}), {workers} actors, {settings}"
        command = (sys.executable, "-m", "benchmarks.peers.flower", *arguments)
        found.append(Contestant(name, command))
    if find_spec("pfl") and options.model == "cnn":
        name = f"pfl-research {version('pfl')}, {processes} processes, {settings}"
        found.append(Contestant(name, (*start, "-m", "benchmarks.peers.pfl_research", *arguments)))
    if options.blazefl:
        name = f"{blazefl_of(options.blazefl)}, {workers} threads, {settings}"
        found.append(
            Contestant(name, (options.blazefl, "-m", "benchmarks.peers.blazefl", *arguments))
        )
    return found


def others(
    options: argparse.Namespace, workload: Path, data: list[str]
) -> tuple[list[Contestant], list[Contestant]]:
    """Return the plain references, the limit first, and fedexp."""
    if options.device == "cpu":
        product = (sys.executable, "-m", "benchmarks.peers.product", str(workload), "OUT")
        sizes = (f"--rounds={options.rounds + 1}", f"--workers={options.workers}")
        limit = Contestant(f"torch.mm, {options.workers} processes, fp32", (*product, *sizes))
        every = bench.contestants(options, workload, data)
        return [limit], [each for each in every if each.name.startswith("fedexp")]
    bare = bench.by_hand_of("plain PyTorch", options, workload, "fedavg", options.precision, 0)
    more = (f"--device={options.device}", "--global-evaluation", f"--model={options.model}")
    hardware = (f"hardware.device={options.device}", f"hardware.precision={options.precision}")
    settings = (*OVERRIDES, *data, *hardware, "hardware.engine=vectorised", "algorithm=fedavg")
    own = fedexp(*settings, f"rounds={options.rounds + 1}")
    return (
        [replace(bare, command=(*bare.command, *more))],
        [Contestant(f"fedexp vectorised, {options.device} {options.precision}", own)],
    )


def figures(contestants: Sequence[Contestant], reps: dict[str, list[Rep]]) -> str:
    """Return a Markdown table of all quantities."""
    rows = []
    for own in contestants:
        found, cells = reps[own.name], [own.name, str(len(reps[own.name]))]
        for quantity, (_, _, form) in QUANTITIES.items():
            cells.append(spread([getattr(rep, quantity) for rep in found], form))
        accuracy = spread([rep.accuracy for rep in found], ".3f")
        rows.append([*cells, f"{max(rep.pss for rep in found):.2f}", accuracy])
    columns = (f"{name}, {unit}" for name, unit, _ in QUANTITIES.values())
    return measure.markdown(("", "n", *columns, "peak PSS, GiB", "accuracy at the end"), rows)


def shares(contestants: Sequence[Contestant], reps: dict[str, list[Rep]], limit: str) -> str:
    """Return a Markdown table of all speeds as shares of the speed of one contestant, the limit."""
    rows = []
    for own in contestants:
        cells = [own.name]
        for quantity in QUANTITIES:
            pair = (own.name, limit) if quantity == "rate" else (limit, own.name)  # or of seconds
            cells.append(ratios(reps[pair[0]], reps[pair[1]], quantity))
        rows.append(cells)
    columns = (name for name, _, _ in QUANTITIES.values())
    return measure.markdown((f"share of {limit}", *columns), rows)


def main() -> int:
    parser = bench.make_parser()
    parser.description = __doc__
    parser.add_argument("--device", default="cpu", help="device of all contestants: cpu or cuda")
    parser.add_argument("--precision", choices=("fp32", "tf32"), default="fp32")
    parser.add_argument("--model", choices=("cnn", "resnet18"), default="cnn")
    parser.add_argument("--blazefl", metavar="PYTHON", help="interpreter that has BlazeFL")
    options = bench.parse(parser)
    data = [*data_overrides(), *bench.changed_overrides(options)]
    options.algorithms = ["fedavg"]
    if options.model != "cnn" and options.device == "cpu":
        parser.error(f"--model={options.model}: needs a GPU (--device=cuda)")
    data += [] if options.model == "cnn" else [f"model={options.model}"]
    with tempfile.TemporaryDirectory(prefix="fedexp-bench-") as scratch:
        work = Path(scratch)
        rivals = peers(options, work / "w1")
        plain, own = others(options, work / "w1", data)
        if not rivals:
            print("no other simulator is installed: pip install -e '.[bench]'", file=sys.stderr)
            return 2
        prepare_workload(options.rounds + 1, data).save(work / "w1")
        reps, left_out = measure.measure(
            [*plain, *rivals, *own], options.repeats, work, {"OMP_NUM_THREADS": "1"}
        )
    settings = "FedAvg; each tests the global model on all test images in every round"
    heading = bench.heading(options, data, settings)
    finished = [c for c in (*plain, *rivals, *own) if c.name in reps]
    text = [heading, figures(finished, reps)]
    limit = plain[0] if options.device == "cpu" else own[0]
    if limit in finished:
        text.append(shares([c for c in finished if c is not limit], reps, limit.name))
    text += left_out
    print("\n\n".join(text))
    if not options.no_results:
        on = "" if options.device == "cpu" else f", GPU, {options.model}"
        measure.write_section(f"Against other simulators{on}", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
