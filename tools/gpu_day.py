"""Fill the papers' tables with runs on a GPU that is lent for half an hour.

    python tools/gpu_day.py --out OUT --minutes 25

First, 1, 2, 4 and 8 jobs of the first block run side by side for half a minute each, under CUDA MPS
if the machine has it; the number with the most rounds per second is used from then on. The blocks
follow in the order of what convinces most per second. Every job writes checkpoints, so the next
call with the same --work continues. When time is up, jobs are ended, and the finished runs of each
sweep are in OUT/<sweep>/runs.jsonl.xz, ready for `multirun/`. Each line is printed as soon as it is
known. Needs the extra `joblib`, and CIFAR-10 in FEDEXP_DATA.

A try on a CPU, with tiny jobs:

    python tools/gpu_day.py --out OUT --minutes 2 --seconds 20 --sizes 1,2 --blocks 1 -- \\
        hardware=cpu hardware.precision=fp32 dataset=digits num_clients=5 participation=0.4 \\
        rounds=40 local.epochs=1 model.channels=[4,4] model.hidden=[8] algorithm=fedavg,fedntd \\
        test_views=[plain]
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    *("hydra/launcher=joblib", "hardware=gpu", "hardware.precision=tf32", "tracker=none"),
    *("figures.draw=false", "checkpoint_interval=20"),
)
# (sweep, its overrides), the most convincing first
BLOCKS = (
    # the cells of Table 1 that were tested on plain images only, and the columns that lack methods
    ("fedntd_table1", "experiment=fedntd/cifar10_s2,fedntd/cifar10_lda0.1 seed=0"),
    ("fedntd_table8", "local.epochs=1,3 seed=0"),
    ("fedntd_table9", "local.epochs=1,3 seed=0"),
    ("fedntd_table1", "experiment=fedntd/cifar10_s3,fedntd/cifar10_s5,fedntd/cifar10_s10 seed=0"),
    ("fedntd_table1", "experiment=fedntd/cifar10_lda0.3,fedntd/cifar10_lda0.5 seed=0"),
    ("fedntd_table1", "experiment=fedntd/cifar10_s2,fedntd/cifar10_lda0.1 seed=1,2"),
    ("fedka_table1", "experiment=fedka/cifar10 seed=0"),
    ("fedka_table8", "experiment=fedka/cifar10 seed=0"),
    ("fedntd_table1", "experiment=fedntd/cifar10_s3,fedntd/cifar10_s5,fedntd/cifar10_s10 seed=1,2"),
    ("fedntd_table1", "experiment=fedntd/cifar10_lda0.3,fedntd/cifar10_lda0.5 seed=1,2"),
)
BAD_INPUT = 2  # exit code of fedexp
PATIENCE = 120  # seconds in which all jobs of a measurement must have a round


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--work", type=Path, help="folder of the runs (default: a new one)")
    parser.add_argument("--minutes", type=float, default=25, help="time for everything")
    parser.add_argument("--seconds", type=float, default=30, help="time of a measurement")
    parser.add_argument("--sizes", default="1,2,4,8", help="numbers of jobs to measure")
    parser.add_argument("--blocks", type=int, default=len(BLOCKS), help="run the first N blocks")
    parser.add_argument("overrides", nargs="*", help="further overrides of all jobs")
    options = parser.parse_args(arguments)
    day = Day(options)
    with multi_process_service():
        jobs = day.measure([int(size) for size in options.sizes.split(",")])
        for sweep, overrides in BLOCKS[: options.blocks]:
            if day.left() > 0:
                day.run(sweep, (f"sweep={sweep}", *overrides.split()), jobs)
        day.collect()
    return 0


@contextlib.contextmanager
def multi_process_service() -> Iterator[None]:
    """Run CUDA MPS, so that the kernels of several processes share the GPU, and end it afterwards.

    Without the program, as on a CPU, processes take turns. Nothing of the GPU's settings changes.
    """
    program = shutil.which("nvidia-cuda-mps-control")
    print(f"CUDA MPS: {'on' if program else 'not on this machine'}", flush=True)
    if not program:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([program, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([program], input="quit\n", text=True, check=False, timeout=60)


def memory_in_use() -> float:
    """Return the GiB in use on the first GPU, or 0 without one."""
    program = shutil.which("nvidia-smi")
    if not program:
        return 0.0
    command = [program, "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, check=True).stdout) / 1024


def end_group(program: subprocess.Popen[bytes]) -> None:
    """End a launcher and its workers, which would outlive it. Runs go on from their checkpoints."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(20)


class Day:
    """The runs of a day, and its clock."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.clock = time.monotonic
        self.end = self.clock() + 60 * options.minutes
        self.work = (options.work or Path(tempfile.mkdtemp(prefix="gpu-day-"))).resolve()
        self.known = {path.parent for path in self.work.glob("*/*/summary.json")}
        self.memory = 0.0  # GiB, the most in use during the last call of `run`
        print(f"runs: {self.work}", flush=True)

    def left(self) -> float:
        """Return the seconds left."""
        return self.end - self.clock()

    def measure(self, sizes: Sequence[int]) -> int:
        """Run jobs of the first block side by side, and return the best number of jobs."""
        sweep, overrides = BLOCKS[0]
        rates = {}
        for size in sizes:
            parts = (f"sweep={sweep}", *overrides.split())
            rates[size] = self.run(sweep, parts, size, self.options.seconds)
            print(f"{size} jobs: {rates[size]:.2f} rounds/s, {self.memory:.1f} GiB", flush=True)
        best = max(rates, key=lambda size: rates[size])
        print(f"used from now on: {best} jobs", flush=True)
        return best

    def command(self, folder: str, overrides: Sequence[str], jobs: int) -> list[str]:
        """Return the command of a sweep whose jobs run side by side."""
        command = [sys.executable, "-m", "fedexp", "--multirun", *SETTINGS, *overrides]
        command += [f"hydra.sweep.dir={self.work / folder}", f"hydra.launcher.n_jobs={jobs}"]
        return [*command, *self.options.overrides]

    def run(
        self, name: str, overrides: Sequence[str], jobs: int, seconds: float | None = None
    ) -> float:
        """Run a part of a sweep to its end, or until time is up. Return the rounds per second.

        Jobs that have not ended go on in the next call. name: the folder of the sweep. seconds:
        the time after which jobs are ended. It starts when all jobs have a round, since they need
        some time to begin.
        """
        folder = self.work / name
        folder.mkdir(parents=True, exist_ok=True)
        command, self.memory = self.command(name, overrides, jobs), 0.0
        start, limit = time.time(), self.end if seconds is None else self.clock() + PATIENCE
        counted, before = self.clock(), self.count_rounds()
        is_counting = False
        with (folder / "log.txt").open("a") as log:
            program = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )
            try:
                while program.poll() is None and self.clock() < min(limit, self.end):
                    time.sleep(0.2)
                    self.print_finished()
                    self.memory = max(self.memory, memory_in_use())
                    if not is_counting and self.count_tables(start) >= jobs:
                        is_counting = True
                        counted, before = self.clock(), self.count_rounds()
                        limit = self.end if seconds is None else counted + seconds
            finally:
                end_group(program)
        rate = (self.count_rounds() - before) / (self.clock() - counted)
        self.print_finished()
        if program.returncode == BAD_INPUT:
            lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
            sys.exit("\n".join(lines[-3:]))
        return rate if is_counting else 0.0

    def count_tables(self, start: float) -> int:
        """Return the number of runs that have written a round since a time."""
        tables = [path.stat() for path in self.work.glob("*/*/rounds.csv")]
        return sum(table.st_mtime > start for table in tables)

    def count_rounds(self) -> int:
        """Return the number of rounds of all runs."""
        tables = self.work.glob("*/*/rounds.csv")
        return sum(max(path.read_bytes().count(b"\n") - 2, 0) for path in tables)

    def print_finished(self) -> None:
        """Print a line for each run that has ended since the last call."""
        for path in sorted(self.work.glob("*/*/summary.json")):
            if path.parent in self.known:
                continue
            self.known.add(path.parent)
            found = json.loads(path.read_text(encoding="utf-8"))
            numbers = [
                f"{name} {found[name]:.4f}"
                for name in ("accuracy", "forgetting", "accuracy_augmented", "forgetting_augmented")
                if isinstance(found.get(name), float)
            ]
            end = f"{found['rounds']} rounds, {found['seconds']:.0f} s, {self.left():.0f} s left"
            name = f"{path.parents[1].name}/{path.parent.name}"
            print(f"{name}: {found['status']}, {', '.join([*numbers, end])}", flush=True)

    def collect(self) -> None:
        """Write the table of runs of each sweep to the folder `out`."""
        for folder in sorted(path for path in self.work.iterdir() if path.is_dir()):
            target = self.options.out / folder.name
            target.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "tools.convert_evidence", str(target), str(folder)]
            subprocess.run(command, cwd=ROOT, check=False)


if __name__ == "__main__":
    sys.exit(main())
