"""Track a command's sweeps: Hydra's callback, the reports, and the exit codes of failed jobs.

Hydra's launchers may run the jobs in other processes or on other machines.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from fedexp.cli import launchers
from fedexp.cli.arguments import Plan
from fedexp.core import interrupts
from fedexp.core.errors import FAILED, StorageError, say
from fedexp.core.storage import display_path, read_json, remove_if_empty, write_json
from fedexp.rundir import files

if TYPE_CHECKING:
    from fedexp.trackers.wandb_tracker import Wandb

TABLES = ("table.csv", "rounds_to_target.csv")  # of a report
NOTES = ".failed"  # folder in a sweep where each failed job leaves a note for the launching process


@dataclass
class SweepWatch:
    """The state of the sweeps that a command runs."""

    command: str = field(default_factory=lambda: uuid4().hex)  # id of the command
    begun: list[Path] = field(default_factory=list)
    made: set[Path] = field(default_factory=set)  # sweep directories that the command created
    # directory of each running sweep -> launcher
    running: dict[Path, str] = field(default_factory=dict)
    # names of the jobs' directories; None if they are not known in advance
    jobs: set[str] | None = None
    said: set[str] = field(default_factory=set)  # messages about jobs that have been printed

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make Hydra's callback report to this object while the block runs.

        Hydra creates the callback from a class name and plain values in conf/config.yaml, so the
        callback cannot receive an object. Instead, the callback reads this object from a context
        variable.
        """
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def remove_rejected(self, here: Path) -> None:
        """Remove the directories of sweeps that were rejected before their first job.

        Empty parents inside `here` are removed too.
        """
        for directory in self.made:
            if directory.is_dir() and [*directory.iterdir()] == [directory / files.MULTIRUN]:
                (directory / files.MULTIRUN).unlink()
                remove_if_empty(directory, here)


_current: ContextVar[SweepWatch | None] = ContextVar("sweep_watch", default=None)


def is_repeated(message: str) -> bool:
    """Return whether a message was already printed for another job, and store the message."""
    watch = _current.get()
    if watch is None:
        return False
    known = message in watch.said
    watch.said.add(message)
    return known


class Sweeps(Callback):
    """Hydra's callback for sweeps, named in conf/config.yaml."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Prevent Hydra from writing its files.

        Hydra would overwrite the files of an existing run before fedexp can reject the new run.
        """
        with read_write(config), open_dict(config):
            config.hydra.output_subdir = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Record that the sweep has begun, and print which launcher runs the jobs."""
        directory = Path(config.hydra.sweep.dir).absolute()
        launcher = config.hydra.runtime.choices["hydra/launcher"]
        watch = _current.get() or SweepWatch()
        jobs = launchers.complete_overrides(config, watch.command)
        if not directory.exists():
            watch.made.add(directory)
        watch.begun.append(directory)
        watch.running[directory] = launcher
        if launcher != "basic":
            interrupts.release()  # this process only waits
            print(
                launchers.describe_launch(launcher, config.hydra.launcher, jobs, directory),
                flush=True,
            )

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Record that the sweep has ended."""
        if watch := _current.get():
            watch.running.pop(Path(config.hydra.sweep.dir).absolute(), None)


def note_failure(sweep: Path, message: str | None, code: int) -> None:
    """Write a failed job's exit code to a file for the process that launched the sweep.

    message: the error, if it could not be written to the job's directory.
    """
    folder = sweep / NOTES / os.environ.get(launchers.COMMAND, "")
    with suppress(OSError):
        write_json(folder / f"{uuid4().hex}.json", {"error": message, "exit_code": code})


def collect_exit_codes(sweep: Path, command: str, elsewhere: bool = False) -> list[int]:
    """Return the exit codes of the sweep's jobs that failed in this command.

    elsewhere: whether the jobs ran in other processes. If so, this function prints the errors that
    could not be written to a job's directory.
    """
    codes = []
    folder = sweep / NOTES / command
    for path in sorted(folder.glob("*.json")):
        try:
            note = read_json(path)
            code, error = int(note["exit_code"]), note["error"]
        except (OSError, ValueError, KeyError, TypeError):
            code, error = FAILED, f"{path}: cannot be read"
        codes.append(code)
        if error and elsewhere:
            say(str(error))
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        (sweep / NOTES).rmdir()
    return codes


def show_report(directory: Path, name: str | None, figures: bool) -> None:
    """Write a sweep's tables and figures, and print the table.

    name: the name of the sweep in conf/sweep, or None for a sweep without a name. figures: whether
    to draw figures.
    """
    from fedexp.papers.aggregate import print_table, write_report
    from fedexp.rundir.sweeps import write_sweep_name

    if name is not None:
        write_sweep_name(directory, name)
    paths = write_report(directory, figures)
    if paths:
        print_table(directory, paths)
        log_tables(directory, paths)


def log_tables(directory: Path, paths: Sequence[Path]) -> None:
    """Log a sweep's tables as a separate W&B run if the jobs of the sweep are logged there.

    paths: the files of the report.
    """
    import pandas as pd

    from fedexp.rundir.reader import RunDirectory
    from fedexp.trackers.base import RunInfo
    from fedexp.trackers.several import TrackerGroup

    jobs = (RunDirectory(path.parent) for path in sorted(directory.glob(f"*/{files.CONFIG}")))
    tracker = tracker_of(next((job.config for job in jobs if job.config), {}))
    if tracker is None:
        return
    name = directory.absolute().name
    info = RunInfo(
        directory=directory,
        config={"sweep": name},
        name=f"{name} table",
        group=name,
        job_type="table",
        tags=(name,),
        total_rounds=0,
        first_round=0,
        classes=(),
        wandb_id=last_wandb_id(directory),
    )
    guarded = TrackerGroup([tracker.create()])
    guarded.start(info)
    tables = {path.stem: pd.read_csv(path) for path in paths if path.name in TABLES}
    guarded.finish({}, [], tables)


def tracker_of(config: Mapping[str, Any]) -> "Wandb | None":
    """Return the W&B tracker of a configuration, alone or one of several, or None without W&B.

    The tracker has no name, since the configured name is that of a single run.
    """
    from fedexp.trackers.wandb_tracker import Wandb

    node = config.get("tracker") or {}
    target, names = f"{Wandb.__module__}.{Wandb.__qualname__}", {f.name for f in fields(Wandb)}
    for each in (node, *(node.get("members") or ())):
        is_tracked = each.get("_target_") == target and each.get("mode") != "disabled"
        if is_tracked and names <= each.keys():  # an older version had other keys
            known = {name: each[name] for name in names}
            return Wandb(**known | {"tags": tuple(known["tags"]), "name": None})
    return None


def last_wandb_id(directory: Path) -> str | None:
    """Return the id of the newest W&B run in a directory, or None if there is none.

    The id is read from the folder's name, `run-<time>-<id>` or `offline-run-<time>-<id>`.
    """
    folders = (directory / "wandb").glob("*run-*-*")
    parts = [path.name.removeprefix("offline-").split("-") for path in folders]
    newest = max(parts, default=None, key=lambda each: each[1])
    return "-".join(newest[2:]) if newest else None


def write_reports(watch: SweepWatch, plan: Plan, elsewhere: bool) -> list[int]:
    """Write the reports of the sweeps.

    Return the exit codes of failed jobs, and one exit code for each report that cannot be written.
    elsewhere: see `collect_exit_codes`.
    """
    codes = []
    for sweep in dict.fromkeys(watch.begun):  # a sweep may consist of several multiruns
        if not sweep.is_dir():
            codes.append(say(f"{sweep}: was removed while the sweep was running", FAILED))
            continue
        codes += collect_exit_codes(sweep, watch.command, elsewhere)
        try:
            show_report(sweep, plan.sweep_in(sweep), plan.draws)
        except StorageError as error:
            codes.append(say(str(error), FAILED))
    return codes


def explain_launcher_error(error: Exception, directory: Path, launcher: str) -> str:
    """Return the message for an error that the launcher raised outside of jobs."""
    reason = (str(error).strip() or "no reason was given").splitlines()[0]
    return (
        f"hydra/launcher={launcher}: {type(error).__name__}: {reason}\nThe launcher does not work,"
        " or a job's process was killed (for example, out of memory). To continue the sweep, run"
        f" the same command with hydra.sweep.dir={display_path(directory)}"
    )
