"""Stop a small experiment at every file operation, in every way, and resume it.

    python tests/e2e/stops.py [--only fedavg scaffold stream sweep again] [--share 1/1]

An undisturbed run is recorded (`journal`). For each of its operations, the files that a stop would
leave are restored: after a kill, with a file half written or empty, and with unsynced changes lost
in three ways. The command that a user would give then continues the run, which must equal the
undisturbed run to the last bit. No complete checkpoint may be lost. Equal disks are tried once. The
exit code is 1 if a check failed.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import journal
from forks import Forked, ForkServer
from helpers import SMALL
from kills import compare

from fedexp.rundir import checkpoint, files

TINY = (
    *SMALL,
    "model.channels=[2,2]",
    "model.hidden=[8]",
    "num_clients=4",
    "seed=3",
    "tracker=none",
)
EXPERIMENTS = {
    "fedavg": ("rounds=2", "hydra.run.dir=run"),
    "scaffold": ("algorithm=scaffold", "rounds=3", "forgetting_metric=all", "hydra.run.dir=run"),
    "stream": ("algorithm=fedlwf", "scenario=class_incremental", "rounds=2", "hydra.run.dir=run"),
    "sweep": ("--multirun", "algorithm=fedavg,scaffold", "rounds=1", "hydra.sweep.dir=run"),
    # a run that is resumed from a damaged checkpoint
    "again": ("algorithm=scaffold", "rounds=3", "hydra.run.dir=run"),
}
AT_ONCE = 2


@dataclass
class Tally:
    """Counts and problems of one experiment."""

    operations: int = 0
    disks: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Stops:
    def __init__(self, forks: ForkServer, folder: Path, experiment: str):
        self.forks, self.folder, self.experiment = forks, folder / experiment, experiment
        self.options = [*TINY, *EXPERIMENTS[experiment]]
        self.tally = Tally()
        self._kept: dict[bytes, dict[str, int]] = {}
        self.folder.mkdir()

    def record(self) -> list[journal.Moment]:
        """Record the undisturbed run; of the experiment `again`, its second half."""
        whole = self.folder / "whole"
        whole.mkdir()
        moments = self.recorded(whole, self.options)
        if self.experiment != "again":
            return moments
        cut = self.folder / "cut"
        journal.restore(self.before_the_last_round(moments), cut)
        latest = cut / "run" / files.CHECKPOINT
        latest.write_bytes(latest.read_bytes()[:-1000])
        moments = self.recorded(cut, self.command(cut))
        self.check(cut, "not stopped")
        return moments

    def before_the_last_round(self, moments: Sequence[journal.Moment]) -> journal.Disk:
        """Return the files just after the last round but one was saved."""
        names = [
            journal.build_disk(m.entries, m.contents)
            for m in moments
            if m.operation.startswith("replace")
        ]
        latest = [disk for disk in names if f"run/{files.CHECKPOINT}" in disk]
        contents = list(dict.fromkeys(disk[f"run/{files.CHECKPOINT}"] for disk in latest))
        return next(
            disk for disk in reversed(latest) if disk[f"run/{files.CHECKPOINT}"] == contents[-2]
        )

    def recorded(self, folder: Path, command: Sequence[str]) -> list[journal.Moment]:
        path = folder.with_suffix(".journal")
        process = self.forks.start(*command, folder=folder, JOURNAL=str(path))
        assert process.wait() == 0, process.read()
        return journal.read(path)

    def command(self, folder: Path) -> list[str]:
        """Return the command that continues the run."""
        run = folder / "run"
        begun = (run / ".hydra/overrides.yaml").exists() and (run / files.CONFIG).exists()
        return (
            ["resume=run", "tracker=none"] if begun and self.experiment != "sweep" else self.options
        )

    def run(self, share: tuple[int, int] = (1, 1)) -> Tally:
        """Try the disks. share: (i, n) for every n-th disk from the i-th on."""
        start, moments = time.monotonic(), self.record()
        self.tally.operations = len(moments) - 1
        running: list[tuple[Path, str, Forked]] = []
        for number, (what, disk) in enumerate(self.distinct_disks(moments)):
            if number % share[1] != share[0] - 1:
                continue
            if len(running) == AT_ONCE:
                self.end(*running.pop(0))
            folder = self.folder / str(number)
            journal.restore(disk, folder)
            self.tally.disks += 1
            running.append((folder, what, self.forks.start(*self.command(folder), folder=folder)))
        for each in running:
            self.end(*each)
        self.tally.seconds = time.monotonic() - start
        return self.tally

    def distinct_disks(
        self, moments: Sequence[journal.Moment]
    ) -> Iterator[tuple[str, journal.Disk]]:
        """Yield (description, disk) of each distinct disk. Note lost checkpoints as problems."""
        known: set[bytes] = set()
        for number, (before, now) in enumerate(itertools.pairwise(moments), 1):
            for kind, disk in journal.disks(before, now):
                what = f"{self.experiment}, operation {number} ({now.operation}), {kind}"
                self.check_saved(what, disk, now)
                if (key := journal.key_of(disk)) not in known:
                    known.add(key)
                    yield what, disk

    def check_saved(self, what: str, disk: journal.Disk, now: journal.Moment) -> None:
        """Only the checkpoint that was being written may be lost."""
        seen = self.saved_rounds(journal.build_disk(now.entries, now.contents))
        left = self.saved_rounds(disk)
        for job, after in seen.items():
            if left.get(job, -1) < after - 1:
                self.tally.problems.append(
                    f"{what}: {job} had saved round {after}, {left.get(job, 'nothing')} is left"
                )

    def saved_rounds(self, disk: journal.Disk) -> dict[str, int]:
        """Return job -> the round that it can be resumed after."""
        needed = {
            path: content
            for path, content in disk.items()
            if "checkpoint" in path or path.endswith(".csv")
        }
        if (key := journal.key_of(needed)) not in self._kept:
            folder = self.folder / "looked at"
            journal.restore(needed, folder)
            jobs = [path.parent for path in folder.rglob("checkpoint")]
            found = {str(job.relative_to(folder)): checkpoint.saved_round(job) for job in jobs}
            shutil.rmtree(folder)
            self._kept[key] = {job: after for job, after in found.items() if after is not None}
        return self._kept[key]

    def end(self, folder: Path, what: str, process: Forked) -> None:
        """Wait for a resumed run and compare it."""
        if process.wait():
            self.tally.problems.append(f"{what}: exit code {process.returncode}\n{process.read()}")
        else:
            self.check(folder, what)
        if not self.tally.problems:
            shutil.rmtree(folder)

    def check(self, folder: Path, what: str) -> None:
        try:
            # the experiment `again` keeps this file
            (folder / "run" / checkpoint.DAMAGED).unlink(missing_ok=True)
            compare(folder / "run", self.folder / "whole/run")
            compare_tables(folder / "run", self.folder / "whole/run")
        except Exception as error:
            self.tally.problems.append(f"{what}: {error}")


def compare_tables(directory: Path, whole: Path) -> None:
    """Assert that the tables of a sweep are equal."""
    for path in sorted(whole.glob("*.csv")) if (whole / "multirun.yaml").exists() else []:
        assert (directory / path.name).read_text() == path.read_text(), path.name


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--share", default="1/1", help="i/n: every n-th disk, from the i-th on")
    parser.add_argument("--keep", type=Path, help="a new folder for the failed cases")
    options = parser.parse_args()
    part, of = map(int, options.share.split("/"))
    forks, problems = ForkServer(), []
    print("experiment | operations | disks | failed | seconds")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        for name in options.only:
            tally = Stops(forks, folder, name).run((part, of))
            problems += tally.problems
            row = (name, tally.operations, tally.disks, len(tally.problems), f"{tally.seconds:.0f}")
            print(" | ".join(map(str, row)))
        forks.close()
    print("\n".join(problems) or "every run ended with the same result")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
