"""Stops a small experiment at every operation on a file, in every way, and lets it go on.

    python tests/e2e/stops.py [--only fedavg scaffold stream sweep again] [--share 1/1]

An undisturbed run is recorded (`journal`). For each of its operations, what a stop there may leave
behind is put on the disk: killed, a file half written or just opened, what was not synced gone in
three ways. The command that a user would give then goes on from it, and must end as the undisturbed
run, to the last bit. No checkpoint that was complete may be lost. Disks that are equal are tried
once. Exits with 1 where anything was not as it must be.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
    # a run that goes on from a damaged checkpoint
    "again": ("algorithm=scaffold", "rounds=3", "hydra.run.dir=run"),
}
AT_ONCE = 2


@dataclass
class Tally:
    """What happened to one experiment."""

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
        """The undisturbed run and what it did; of `again`, what its second half did."""
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
        """As the run was killed when it had just saved its last round but one."""
        names = [
            journal.built(m.entries, m.contents)
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
        """What a user would give to go on."""
        run = folder / "run"
        begun = (run / ".hydra/overrides.yaml").exists() and (run / files.CONFIG).exists()
        return (
            ["resume=run", "tracker=none"] if begun and self.experiment != "sweep" else self.options
        )

    def tried(self, share: tuple[int, int] = (1, 1)) -> Tally:
        """share: (i, n): every n-th disk, from the i-th on."""
        start, moments = time.monotonic(), self.record()
        self.tally.operations = len(moments) - 1
        running: list[tuple[Path, str, Forked]] = []
        for number, (what, disk) in enumerate(self.different(moments)):
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

    def different(self, moments: Sequence[journal.Moment]) -> Iterator[tuple[str, journal.Disk]]:
        """(what was done, disk) of each disk that is like no other. Complains where a checkpoint is
        lost."""
        known: set[bytes] = set()
        for number, (before, now) in enumerate(itertools.pairwise(moments), 1):
            for kind, disk in journal.disks(before, now):
                what = f"{self.experiment}, operation {number} ({now.operation}), {kind}"
                self.check_kept(what, disk, now)
                if (key := journal.key_of(disk)) not in known:
                    known.add(key)
                    yield what, disk

    def check_kept(self, what: str, disk: journal.Disk, now: journal.Moment) -> None:
        """At most the checkpoint that was being written is lost."""
        seen = self.rounds_kept(journal.built(now.entries, now.contents))
        left = self.rounds_kept(disk)
        for job, after in seen.items():
            if left.get(job, -1) < after - 1:
                self.tally.problems.append(
                    f"{what}: {job} had saved round {after}, {left.get(job, 'nothing')} is left"
                )

    def rounds_kept(self, disk: journal.Disk) -> dict[str, int]:
        """Job -> the round after which it can go on."""
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
        """Waits for a run that goes on, and compares it."""
        if process.wait():
            self.tally.problems.append(f"{what}: exit code {process.returncode}\n{process.read()}")
        else:
            self.check(folder, what)
        if not self.tally.problems:
            shutil.rmtree(folder)

    def check(self, folder: Path, what: str) -> None:
        try:
            # of `again`, which keeps it
            (folder / "run" / checkpoint.DAMAGED).unlink(missing_ok=True)
            compare(folder / "run", self.folder / "whole/run")
            compare_tables(folder / "run", self.folder / "whole/run")
        except Exception as error:
            self.tally.problems.append(f"{what}: {error}")


def compare_tables(directory: Path, whole: Path) -> None:
    """What the report of a sweep has written."""
    for path in sorted(whole.glob("*.csv")) if (whole / "multirun.yaml").exists() else []:
        assert (directory / path.name).read_text() == path.read_text(), path.name


def main(say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--share", default="1/1", help="i/n: every n-th disk, from the i-th on")
    parser.add_argument("--keep", type=Path, help="a new folder for what was tried and went wrong")
    options = parser.parse_args()
    part, of = map(int, options.share.split("/"))
    forks, problems = ForkServer(), []
    say("experiment | operations | disks | not as they must be | seconds")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        for name in options.only:
            tally = Stops(forks, folder, name).tried((part, of))
            problems += tally.problems
            row = (name, tally.operations, tally.disks, len(tally.problems), f"{tally.seconds:.0f}")
            say(" | ".join(map(str, row)))
        forks.close()
    say("\n".join(problems) or "every run went on to the same end")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
