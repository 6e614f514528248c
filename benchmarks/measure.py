"""Run contestants in turn, each in its own process, and make a table from their rounds.csv.

Every contestant writes this file with the columns `round, train_samples_per_second, train_seconds,
evaluation_seconds, seconds, test_accuracy`. Other columns are ignored. Round 1 is a warm-up and is
not counted.
"""

import csv
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "benchmarks" / "conf"  # our data sets, for machines without CIFAR-10
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
TIMES = ("train_seconds", "evaluation_seconds", "seconds")
COLUMNS = ("round", "train_samples_per_second", *TIMES, "test_accuracy")
MARK = "FEDEXP_BENCHMARK"  # environment variable that marks the processes of a contestant
BAD_INPUT = 2  # fedexp's exit code for bad input


@dataclass(frozen=True)
class Contestant:
    """A program to measure.

    `command` writes rounds.csv to a folder. The path of the folder replaces OUT in the command.
    """

    name: str
    command: tuple[str, ...]
    reference: str = ""  # name of the contestant that this one is compared with


@dataclass(frozen=True)
class Rep:
    """The results of one repetition of a contestant over its counted rounds."""

    rate: float  # examples per second of client training
    all_in: float  # examples per second of whole rounds
    seconds: float  # mean duration of a whole round
    accuracy: float  # of the global model after the last round
    pss: float  # GiB: peak of the process tree, shared pages counted once
    rss: float  # GiB: peak, with shared pages counted in each process
    examples: tuple[int, ...]  # examples of each counted round
    total: float  # seconds of all rounds, including the warm-up
    tests: float = 0.0  # mean duration of the tests of a round

    @property
    def untested(self) -> float:
        """Return the mean duration of a round without its tests."""
        return self.seconds - self.tests


class Rejected(Exception):
    """Raised if fedexp rejects the options of a contestant. The message is fedexp's."""


def write_rounds(folder: Path, rows: Sequence[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rounds.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def read_rounds(folder: Path, pss: float = 0.0, rss: float = 0.0, last: int | None = None) -> Rep:
    """Return the results in rounds.csv. last: the last round to count, or None for all rounds."""
    with (folder / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    counted = [row for row in rows if 1 < int(row["round"]) <= (last or len(rows))]
    train = sum(float(row["train_seconds"]) for row in counted)
    seconds = sum(float(row["seconds"]) for row in counted)
    examples = [
        round(float(r["train_samples_per_second"]) * float(r["train_seconds"])) for r in counted
    ]
    accuracy = float(rows[-1]["test_accuracy"] or "nan")
    rates = sum(examples) / train, sum(examples) / seconds
    everything = sum(float(r["seconds"] or 0) for r in rows)
    tests = sum(float(row.get("evaluation_seconds") or 0) for row in counted) / len(counted)
    mean = seconds / len(counted)
    return Rep(*rates, mean, accuracy, pss, rss, tuple(examples), everything, tests)


@dataclass
class Memory:
    """Peak memory of the processes that are marked by the environment variable MARK."""

    mark: str
    pss: float = 0.0
    rss: float = 0.0
    samples: list[float] = field(default_factory=list)  # PSS in GiB of each sample

    def pids(self) -> list[int]:
        """Return the marked processes.

        The processes are found by their environment, since daemons such as Ray's do not remain
        children of the process that started them.
        """
        needle, found = f"{MARK}={self.mark}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # the process has ended, or belongs to another user
        return found

    def sample(self) -> None:
        totals = {"Pss": 0, "Rss": 0}
        for pid in self.pids():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            for key in totals:
                match = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
                totals[key] += int(match[1]) if match else 0
        self.samples.append(totals["Pss"] / 2**20)
        self.pss, self.rss = (
            max(old, totals[k] / 2**20) for old, k in ((self.pss, "Pss"), (self.rss, "Rss"))
        )

    def end_all(self) -> None:
        for pid in self.pids():
            with suppress(OSError):
                os.kill(pid, 9)


def run_once(
    contestant: Contestant,
    out: Path,
    timeout: float,
    environment: dict[str, str],
    samples: list[float] | None = None,
) -> Rep:
    """Run one repetition of a contestant.

    samples: a list to which the PSS in GiB is added twice a second. Raises Rejected if fedexp
    rejects the options. Raises RuntimeError, with the end of the output, if the program fails.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    memory, log = (
        Memory(uuid.uuid4().hex, samples=[] if samples is None else samples),
        out.parent / f"{out.name}.log",
    )
    command = [part.replace("OUT", str(out)) for part in contestant.command]
    # Waiting threads sleep, as in fedexp. Spinning threads would take cores from other processes.
    variables = (
        os.environ
        | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
        | environment
        | {MARK: memory.mark}
    )
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + timeout
            while process.poll() is None:
                memory.sample()
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{contestant.name}: did not finish within {timeout:.0f} s; {tail(log)}"
                    )
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        finally:
            process.kill()  # no effect if it has ended
            memory.end_all()  # processes that it left behind
            process.wait()
    if process.returncode == BAD_INPUT and "fedexp" in command:
        raise Rejected(tail(log))
    if process.returncode:
        raise RuntimeError(f"{contestant.name}: exit code {process.returncode}; {tail(log)}")
    return read_rounds(out, memory.pss, memory.rss)


def tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-8:])


def measure(
    contestants: Sequence[Contestant],
    repeats: int,
    work: Path,
    environment: dict[str, str] | None = None,
    timeout: float = 1800,
) -> tuple[dict[str, list[Rep]], list[str]]:
    """Measure all contestants in turn (A B C A B C ...).

    Return the repetitions of each contestant, and a line for each contestant that is left out.
    Raises RuntimeError unless all contestants trained the same numbers of examples.
    """
    reps: dict[str, list[Rep]] = {}
    left_out: dict[str, str] = {}
    for number in range(repeats):
        for contestant in (c for c in contestants if c.name not in left_out):
            name = contestant.name
            try:
                rep = run_once(contestant, work / "out", timeout, environment or {})
            except (Rejected, RuntimeError) as error:
                rejected = isinstance(error, Rejected)
                left_out[name] = (
                    f"{name}: {'skipped, fedexp rejects it' if rejected else 'failed'}: {error}"
                )
                print(left_out[name], flush=True)
                continue
            reps.setdefault(name, []).append(rep)
            print(
                f"{number + 1}/{repeats} {name}: {rep.rate:,.0f} examples/s, {rep.seconds:.2f} s a"
                " round",
                flush=True,
            )
    complete = {name: own for name, own in reps.items() if name not in left_out}
    if len({rep.examples for own in complete.values() for rep in own}) > 1:
        raise RuntimeError(
            "the contestants trained different numbers of examples, so they cannot be compared"
        )
    return complete, list(left_out.values())


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Return the median of values and, if there are several, their range as text."""
    middle = format(statistics.median(values), form)
    return (
        middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"
    )


def ratios(reps: Sequence[Rep], reference: Sequence[Rep], quantity: str) -> str:
    """Return the median and range of the ratios between two contestants.

    Each ratio compares runs of the same repetition, since other load on the machine then affects
    both.
    """
    return spread(
        [getattr(a, quantity) / getattr(b, quantity) for a, b in zip(reps, reference, strict=True)],
        ".2f",
    )


def table(contestants: Sequence[Contestant], reps: dict[str, list[Rep]]) -> str:
    """Return a Markdown table: medians, ranges, and ratios to each contestant's reference."""
    head = (
        "contestant",
        "n",
        "training examples/s",
        "s a round, all in",
        "reference",
        "x reference (training)",
        "x reference (all in)",
        "peak PSS (RSS), GiB",
        "accuracy at the end",
    )
    rows = []
    for c in contestants:
        if c.name not in reps:
            continue
        own, reference = reps[c.name], reps.get(c.reference)
        pss = max(r.pss for r in own)
        rss = max(r.rss for r in own)
        cells = [
            c.name,
            str(len(own)),
            spread([r.rate for r in own]),
            spread([r.seconds for r in own], ".2f"),
            c.reference if reference else "",
            ratios(own, reference, "rate") if reference else "",
            ratios(own, reference, "all_in") if reference else "",
            f"{pss:.2f} ({rss:.2f})",
            f"{own[-1].accuracy:.3f}",
        ]
        rows.append(cells)
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def machine() -> str:
    """Describe what results depend on: CPU, GPU, cores, instruction set, versions and date."""
    import torch

    from fedexp.engine.hardware import cores
    from fedexp.engine.resolved import cpu_name

    device = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return (
        f"{cpu_name()}{device}; {cores()} cores; torch's instruction set"
        f" {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}, Python"
        f" {platform.python_version()}; {date.today().isoformat()}"
    )


def write_section(name: str, text: str, path: Path = RESULTS) -> None:
    """Replace or append the section of one command in RESULTS.md."""
    old = (
        path.read_text()
        if path.exists()
        else "# Measured speeds\n\nWritten by the commands of README.md.\n"
    )
    new = f"## {name}\n\n{text.strip()}"
    sections = [s.strip() for s in re.split(r"^(?=## )", old, flags=re.MULTILINE)]
    kept = [new if s.startswith(f"## {name}\n") else s for s in sections]
    path.write_text("\n\n".join(kept if new in kept else [*kept, new]) + "\n")


def fedexp(*overrides: str) -> tuple[str, ...]:
    """Return the command line of a run without a tracker."""
    program = (sys.executable, "-m", "fedexp", "--config-dir", str(CONF))
    return (*program, "tracker=none", *last_values(overrides), "hydra.run.dir=OUT")


def last_values(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without those that a later one replaces.

    A later value replaces an earlier value of its key, and a later option of a group replaces the
    values of the group's keys. fedexp would refuse several values of a swept key, and keys that
    the option does not have.
    """
    kept: dict[str, str] = {}
    for text in overrides:
        key = text.partition("=")[0]
        replaced = [each for each in kept if each == key or each.startswith(f"{key}.")]
        for each in replaced:
            del kept[each]
        kept[key] = text
    return [*kept.values()]
