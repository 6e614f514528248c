"""Kill runs with SIGKILL on every engine, at random moments and while they write.

    python tests/e2e/kills.py [--kills 50] [--seed 0] [--engines sequential workers ...]

A run is started, killed and resumed several times by the command that a user would give. It must
then equal an undisturbed run to the last bit. During the run and after every kill, every visible
file in its directory must be complete. Prints a line for each engine; the exit code is 1 if a check
failed.
"""

import argparse
import csv
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml
from forks import Forked, ForkServer
from helpers import FEDERATION, assert_same_run
from PIL import Image

from fedexp.core import storage
from fedexp.rundir import csv_files

ROUNDS = 8
RUN = (
    f"rounds={ROUNDS}",
    "forgetting_metric=all",
    "seed=3",
    *FEDERATION,
    "figures=true",
    "tracker=none",
)
ENGINES = {  # options; which undisturbed run it must equal
    "sequential": (("hardware.engine=sequential",), "sequential"),
    "workers": (("hardware.engine=workers", "hardware.workers=2"), "sequential"),
    "vectorised": (("hardware.engine=vectorised",), "vectorised"),
    "sweep": (
        ("--multirun", "hydra.sweep.dir=run", "algorithm=fedavg,scaffold", "rounds=3"),
        "sweep",
    ),
}


@dataclass
class Tally:
    """Counts and problems of one engine."""

    runs: int = 0
    kills: int = 0
    while_writing: int = 0  # kills that left a temporary file
    parsed: int = 0  # files
    broken: list[str] = field(default_factory=list)  # incomplete files
    different: list[str] = field(default_factory=list)  # other results than the undisturbed run


HEADER = "engine | kills | runs | while writing | files parsed | broken | different"


# --- complete files


def check(path: Path) -> None:
    """Raise an error if a file is incomplete."""
    if path.suffix == ".csv":
        text = path.read_text()
        assert text.endswith("\n"), f"the last line is {text[text.rfind(chr(10)) + 1 :]!r}"
        assert len({len(row) for row in csv.reader(text.splitlines())}) == 1, (
            "lines of different lengths"
        )
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".yaml":
        assert yaml.safe_load(path.read_text()) is not None, "empty"
    elif path.suffix == ".npz":
        with np.load(path) as archive:
            assert all(archive[name] is not None for name in archive.files)
    elif path.suffix == ".pt":
        storage.check_tree(path)
    elif path.suffix == ".png":
        with Image.open(path) as picture:
            picture.load()


def check_all(
    directory: Path, tally: Tally, seen: set[tuple[Path, int, int]] | None = None
) -> None:
    """Check every file. seen: (path, time, size) of files that need no second check."""
    for path in sorted(directory.rglob("*")):
        # Hydra writes them, and fedexp does not read them
        if path.name.startswith(".") or path.name == "multirun.yaml":
            continue
        try:
            stat = path.stat()
            key = path, stat.st_mtime_ns, stat.st_size
            if path.is_dir() or (seen is not None and key in seen):
                continue
            check(path)
            tally.parsed += 1
            if seen is not None:
                seen.add(key)
        except Exception as error:
            if path.exists():  # otherwise it was removed meanwhile
                tally.broken.append(f"{path}: {error}")


class Watcher(threading.Thread):
    """Check new and changed files all the time."""

    def __init__(self, directory: Path, tally: Tally):
        super().__init__(daemon=True)
        self.directory, self.tally, self.done = directory, tally, threading.Event()

    def run(self) -> None:
        seen: set[tuple[Path, int, int]] = set()
        while not self.done.wait(0.1):
            check_all(self.directory, self.tally, seen)

    def __enter__(self) -> "Watcher":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.join()


# --- the campaign


class Campaign:
    def __init__(self, forks: ForkServer, folder: Path, seed: int):
        self.forks, self.folder, self.rng = forks, folder, random.Random(seed)
        self.tallies: dict[str, Tally] = {}
        self._whole: dict[str, tuple[Path, float]] = {}

    def arguments(self, engine: str) -> list[str]:
        options, _ = ENGINES[engine]
        if engine == "sweep":  # its own number of rounds
            return [*options, *[option for option in RUN if not option.startswith("rounds=")]]
        return ["algorithm=scaffold", *RUN, *options, "hydra.run.dir=run"]

    def resume_command(self, engine: str, directory: Path) -> list[str]:
        """Return the command that continues the run."""
        if engine != "sweep" and (directory / "config.yaml").exists():
            return ["resume=run", "tracker=none"]
        return self.arguments(engine)

    def undisturbed(self, engine: str) -> tuple[Path, float]:
        """Return (directory, seconds) of the undisturbed run, computed once."""
        if engine not in self._whole:
            folder = self.folder / f"whole_{engine}"
            folder.mkdir()
            start = time.monotonic()
            process = self.forks.start(*self.arguments(engine), folder=folder)
            finish(process)
            self._whole[engine] = folder / "run", time.monotonic() - start
        return self._whole[engine]

    def kill_one(self, engine: str, kills: int) -> None:
        """Kill a run up to `kills` times; it must then equal the undisturbed run."""
        whole, _ = self.undisturbed(ENGINES[engine][1])
        seconds = self.undisturbed(engine)[1]
        tally = self.tallies.setdefault(engine, Tally())
        folder = self.folder / f"{engine}{tally.runs}"
        folder.mkdir()
        tally.runs += 1
        directory, wanted = folder / "run", tally.kills + kills
        with Watcher(directory, tally):
            while tally.kills < wanted:
                process = self.forks.start(*self.resume_command(engine, directory), folder=folder)
                if not self.wait_at_random(process, directory, seconds):
                    break
                process.kill()  # workers end by themselves
                process.wait()
                tally.kills += 1
                tally.while_writing += any(temporaries(directory))
                check_all(directory, tally)
                shown = rounds_done(directory)
                print(
                    f"  {engine} {tally.runs}: kill {tally.kills}, {shown} rounds in its files",
                    flush=True,
                )
            process = self.forks.start(*self.resume_command(engine, directory), folder=folder)
            finish(process)
        check_all(directory, tally)
        try:
            compare(directory, whole)
        except AssertionError as error:
            tally.different.append(f"{directory}: {error}")

    def wait_at_random(self, process: Forked, directory: Path, seconds: float) -> bool:
        """Wait for a random time, or for a file that is being written after it.

        Return False if the process has ended before.
        """
        in_writing, after = self.rng.random() < 0.5, self.rng.uniform(0, 1.1) * seconds
        deadline = time.monotonic() + after
        while process.poll() is None:
            if (
                in_writing
                and time.monotonic() > deadline - seconds / 2
                and next(temporaries(directory), None)
            ):
                time.sleep(self.rng.uniform(0, 0.002))
                return process.poll() is None
            if not in_writing and time.monotonic() > deadline:
                return True
            time.sleep(0.0005)
        return False

    def run(self, kills: Mapping[str, int], at_once: int = 5) -> None:
        """Kill runs of each engine. kills: engine -> number of kills, `at_once` of them a run."""
        for engine, count in kills.items():
            while (done := self.tallies.setdefault(engine, Tally()).kills) < count:
                self.kill_one(engine, min(at_once, count - done))


def temporaries(directory: Path) -> Iterator[Path]:
    for folder in (directory, *directory.glob("*/"), *directory.glob("*/*/")):  # also of a sweep
        yield from folder.glob(".*.tmp")


def finish(process: Forked) -> None:
    while process.poll() is None:
        time.sleep(0.02)
    assert process.poll() == 0, process.read()


def rounds_done(directory: Path) -> int:
    return sum(csv_files.last_round(path.parent) or 0 for path in directory.rglob("rounds.csv"))


def compare(directory: Path, whole: Path) -> None:
    """Assert that files, states and results are equal."""
    jobs = sorted(path.parent for path in whole.rglob("rounds.csv"))
    assert [job.relative_to(whole) for job in jobs] == sorted(
        path.parent.relative_to(directory) for path in directory.rglob("rounds.csv")
    )
    for job in jobs:
        ours = directory / job.relative_to(whole)
        assert_same_run(ours, job)
        summaries = [json.loads((each / "summary.json").read_text()) for each in (ours, job)]
        for key in (
            "seconds",
            "train_samples_per_second",
            "hardware",
            "determinism",
            "peak_memory",
        ):
            for summary in summaries:
                summary.pop(key)
        assert summaries[0] == summaries[1], f"{summaries[0]} instead of {summaries[1]}"
        names = [
            {str(p.relative_to(each)) for p in each.rglob("*") if "clients/" not in str(p)}
            for each in (ours, job)
        ]
        assert names[0] == names[1], names[0] ^ names[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="number of kills on all engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=list(ENGINES))
    options = parser.parse_args()
    share, rest = divmod(options.kills, len(options.engines))
    kills = {engine: share + (i < rest) for i, engine in enumerate(options.engines)}
    forks, start = ForkServer(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(forks, Path(folder), options.seed)
        try:
            campaign.run(kills)
        except KeyboardInterrupt:
            print("stopped; results so far:")
        finally:
            forks.close()
    problems, total = [], 0
    print(f"\n{HEADER}")
    for name, tally in campaign.tallies.items():
        counts = (tally.kills, tally.runs, tally.while_writing, tally.parsed)
        failed = (len(tally.broken), len(tally.different))
        print(" | ".join(map(str, (name, *counts, *failed))))
        problems += tally.broken + tally.different
        total += tally.kills
    print(f"{total} kills in {time.monotonic() - start:.0f} s (seed {options.seed})")
    print("\n".join(problems) or "all files were complete and all results equal")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
