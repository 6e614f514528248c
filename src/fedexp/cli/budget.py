"""`fedexp --multirun sweep=a,b budget=<minutes>`: the jobs of several sweeps, worth most first, for
a given time.

All jobs are handed to the launcher at once and in their order. The moment at which the budget is
spent travels with the overrides of each, so that every launcher knows it: a job that could not save
a round by then does not begin, the others save their state and end (fedexp.training.deadline).
"""

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedexp.cli.arguments import literal
from fedexp.cli.callbacks import SweepWatch, failures
from fedexp.cli.preview import (
    OVER,
    Measured,
    Planned,
    closest,
    estimate,
    known_runs,
    plan,
    runs_elsewhere,
    show,
    status,
)
from fedexp.config.options import conf_directory
from fedexp.core.private.of_hydra import sweeping
from fedexp.rundir import elsewhere
from fedexp.rundir.lock import Occupied, occupied
from fedexp.rundir.reader import finished_summary
from fedexp.trackers.progress import duration
from fedexp.training.deadline import VARIABLE


@dataclass(frozen=True)
class Slot:
    """A run that is to be made, and all jobs that it stands for."""

    job: Planned
    twins: tuple[Planned, ...]  # jobs of other sweeps that are the same run
    done: Path | None  # the directory of a run that is over and the same
    round_seconds: float | None  # from measured rounds; None where there are none
    seconds: float | None  # that are left
    repetition: int  # of its cell: 0 for the first seed
    kept: bool  # its values are in the tables already, from a file of --keep

    @property
    def worth(self) -> tuple[bool, int, int, float]:
        """Return the key by which jobs are ordered: what no table has yet; of this first seeds,
        then what many tables share, then what is cheap."""
        left = float("inf") if self.seconds is None else self.seconds
        return self.kept, self.repetition, -1 - len(self.twins), left


@dataclass(frozen=True)
class Queue:
    """The jobs of a command in the order of their worth."""

    jobs: tuple[Planned, ...]  # as the sweeps have them
    slots: tuple[Slot, ...]  # by worth, also those that are done
    measured: tuple[Measured, ...]
    minutes: float
    deadline: float  # seconds since the epoch

    @property
    def waiting(self) -> list[Slot]:
        """Return the runs that are not over, in their order."""
        return [slot for slot in self.slots if slot.done is None]

    @property
    def folders(self) -> list[Path]:
        """Return the directories of the sweeps."""
        return list(dict.fromkeys(job.directory.parent.absolute() for job in self.jobs))

    @property
    def launches(self) -> list[list[str]]:
        """Return the overrides of the one run of Hydra that has all jobs: what decides over the
        launcher; [] where there is nothing to run."""
        if not self.waiting:
            return []
        kept = [
            text
            for text in self.waiting[0].job.overrides
            if text.startswith("hardware") or is_hydras(text)
        ]
        kept = [text for text in kept if not text.startswith("hydra.sweep.dir=")]
        return [[*kept, f"hydra.sweep.dir={literal(str(self.folders[0]))}"]]

    def say_state(self) -> None:
        """Print the last line of the command: how much is done, and that it goes on."""
        states = [status(job) for job in self.jobs]
        done, failed = sum(state in OVER for state in states), states.count("failed")
        begun = sum(state.startswith(("interrupted", "running")) for state in states)
        parts = [f"{done} of {len(states)} done"]
        parts += [
            f"{number} {word}" for number, word in ((begun, "begun"), (failed, "failed")) if number
        ]
        print(", ".join(parts) + ("; the same command goes on" if done < len(states) else ""))


def make_queue(
    lists: Sequence[Sequence[str]], extra: Sequence[Path], minutes: float, began: float
) -> Queue:
    """The jobs of these multiruns by worth. extra: the user's own groups; began: when the command
    did."""
    jobs = plan(lists, conf_directory(), extra)
    measured, kept = known_runs(jobs)
    # stable: else as the sweeps have them
    slots = sorted(slots_of(jobs, measured, kept), key=lambda slot: slot.worth)
    return Queue(tuple(jobs), tuple(slots), tuple(measured), minutes, began + 60 * minutes)


def slots_of(
    jobs: Sequence[Planned], measured: Sequence[Measured], kept: Collection[Path] = ()
) -> Iterator[Slot]:
    """Jobs that are the same run, put together. kept: of `kept_jobs`."""
    same: dict[str, list[Planned]] = {}
    seeds: dict[str, list[str]] = {}  # of each cell, in their order
    cells: dict[str, str] = {}
    for job in jobs:
        run, cell = identities(job)
        same.setdefault(run, []).append(job)
        cells[run] = cell
        seeds.setdefault(cell, []).extend([] if run in seeds.get(cell, ()) else [run])
    finished = runs_elsewhere(jobs)
    for run, members in same.items():
        states = {job.directory: status(job) for job in members}
        job = max(members, key=lambda each: progress(states[each.directory]))
        done = job.directory if states[job.directory] in OVER else finished.get(job.directory)
        like, _ = closest(job, measured)
        left = estimate(job, states[job.directory], measured)
        yield Slot(
            job=job,
            twins=tuple(each for each in members if each is not job),
            done=done,
            round_seconds=None if like is None else like.seconds,
            seconds=None if left is None else left.seconds,
            repetition=seeds[cells[run]].index(run),
            kept=any(each.directory in kept for each in members),
        )


def identities(job: Planned) -> tuple[str, str]:
    """(equal for jobs that are the same run, equal for those that differ in the seed alone)."""
    if job.resolved is None:
        return str(job.directory), str(job.directory)
    return elsewhere.exact(job.resolved), elsewhere.alike(job.resolved)


def progress(state: str) -> tuple[int, int]:
    """Orders the states of a job: over, then the number of rounds, then not begun."""
    if state in OVER:
        return 2, 0
    return (1, int(state.split()[-1])) if state.startswith("interrupted") else (0, 0)


def show_queue(queue: Queue) -> None:
    """Print what `preview=true` shows: the jobs in their order, the estimate, and how far the
    budget goes."""
    twins = [twin for slot in queue.slots for twin in slot.twins]
    shared = {twin.directory for twin in twins if status(twin) not in OVER}
    finished = {slot.job.directory: slot.done for slot in queue.slots if slot.done is not None}
    kept = {job.directory for slot in queue.slots if slot.kept for job in (slot.job, *slot.twins)}
    show([*(slot.job for slot in queue.slots), *twins], queue.measured, shared, finished, kept)
    left, whole, begun = 60 * queue.minutes, 0, 0
    for slot in (slot for slot in queue.waiting if slot.seconds is not None):
        assert slot.seconds is not None
        whole, begun = (
            whole + (slot.seconds <= left),
            begun + ((slot.round_seconds or 0) < left < slot.seconds),
        )
        left -= slot.seconds
    unknown = sum(slot.seconds is None for slot in queue.waiting)
    more = f", {unknown} not measured" if unknown else ""
    print(
        f"budget {duration(60 * queue.minutes)}, one job at a time in this order: {whole} of"
        f" {len(queue.waiting)} that are left would be complete, {begun} begun{more}"
    )


def overrides_of(slot: Slot, queue: Queue) -> list[str]:
    """Return the overrides of one job as the launcher gets it: its own, where it lies, and until
    when it may work."""
    own = [text for text in slot.job.overrides if not is_hydras(text)]
    moment = f"{queue.deadline:.3f} {slot.round_seconds or 0.0:.3f}"
    place = literal(str(slot.job.directory.parent.absolute()))
    return [*own, f"hydra.sweep.dir={place}", f"+hydra.job.env_set.{VARIABLE}='{moment}'"]


def is_hydras(override: str) -> bool:
    return override.lstrip("+~").startswith(("hydra.", "hydra/"))


@contextmanager
def handed_over(queue: Queue, watch: SweepWatch) -> Iterator[None]:
    """Give the launch of Hydra the jobs of the queue while the block runs, and have all its sweeps
    watched."""
    note_shared(queue.slots)
    jobs = [overrides_of(slot, queue) for slot in queue.waiting]
    for folder in queue.folders:
        folder.mkdir(parents=True, exist_ok=True)
        watch.begun.setdefault(folder, failures(folder))
    watch.queued[queue.folders[0]] = len(jobs)
    try:
        with sweeping(jobs):
            yield
    finally:
        copy_notes(queue.folders)
    watch.ended.extend(queue.folders)
    note_shared([*slots_of(queue.jobs, ())])


def copy_notes(folders: Sequence[Path]) -> None:
    """Copy what Hydra writes into the directory of a sweep into those of the others."""
    for folder in folders[1:]:
        with suppress(OSError):
            shutil.copyfile(folders[0] / "multirun.yaml", folder / "multirun.yaml")


def note_shared(slots: Sequence[Slot]) -> None:
    """Writes, of every run that is over, into the directories of the jobs that it stands for that
    it does."""
    for slot in slots:
        for job in (slot.job, *slot.twins) if slot.done is not None else ():
            done, directory = slot.done, job.directory
            if done is None or done.absolute() == directory.absolute() or status(job) in OVER:
                continue
            directory.mkdir(parents=True, exist_ok=True)
            with suppress(Occupied), occupied(directory):
                if finished_summary(directory) is None:
                    own = [text for text in job.overrides if not is_hydras(text)]
                    elsewhere.note(directory, done.absolute(), own)
