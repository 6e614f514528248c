"""A sweep as the command line sees it: its preview, its report, and what its failed jobs mean for
the exit code."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedexp.cli.arguments import Asked
from fedexp.cli.callbacks import NOTES, SweepWatch, failures
from fedexp.core.errors import FAILED, StorageError, say
from fedexp.core.storage import regular, shorten


def show_preview(asked: Asked, extra: list[Path]) -> int:
    """List the jobs of a sweep and run none."""
    from fedexp.cli.budget import show_limit
    from fedexp.cli.preview import known_runs, plan, show

    jobs = plan(asked.launches, extra)
    seconds = show(jobs, known_runs(jobs))
    if asked.budget is not None:
        show_limit(seconds, asked.budget)
    return 0


def show_report(directory: Path, name: str | None, figures: bool) -> None:
    """Show the report at the end of a sweep: its tables and pictures; name: of a sweep of
    conf/sweep."""
    from fedexp.analysis.aggregate import mark, write_report
    from fedexp.cli.push import config_of_sweep, is_tracked, push_tables

    if name is not None:
        mark(directory, name)
    paths = write_report(directory, figures)
    if paths:
        print((directory / "table.md").read_text(encoding="utf-8"))
        print("\n".join(f"  {shorten(path)}" for path in paths))
        if is_tracked(config := config_of_sweep(directory)):
            push_tables(directory, config, {})


def finish_sweeps(watch: SweepWatch, asked: Asked, elsewhere: bool, figures: bool) -> list[int]:
    """Write the reports of the sweeps that have ended; return the exit codes of their failures, and
    of reports that cannot be written.

    elsewhere: as for `failed`.
    """
    codes = []
    for sweep in dict.fromkeys(watch.ended):
        if not sweep.is_dir():
            codes.append(say(f"{sweep}: was removed while the sweep ran", FAILED))
            continue
        codes += failed(sweep, watch.begun[sweep], elsewhere)
        try:
            show_report(sweep, asked.name_of(sweep), figures)
        except StorageError as error:
            codes.append(say(str(error), FAILED))
    return codes


def failed(sweep: Path, before: Mapping[Path, Any], elsewhere: bool = False) -> list[int]:
    """Return the exit codes of the jobs of a sweep that have failed anew. before:
    callbacks.failures as it began; elsewhere: the jobs ran in other processes, so that what is in
    no directory of a job is said here."""
    codes = []
    for path, mark in failures(sweep).items():
        if mark == before.get(path):
            continue
        is_note = path.parent.name == NOTES
        codes.append(failure_code(path if is_note else path.parent / "summary.json"))
        if is_note:
            if elsewhere:
                say(error_in(path))
            path.unlink(missing_ok=True)
    with suppress(OSError):
        (sweep / NOTES).rmdir()
    return codes


def error_in(note: Path) -> str:
    try:
        return str(json.loads(regular(note).read_text(encoding="utf-8"))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{note}: cannot be read"


def failure_code(path: Path) -> int:
    """Return the exit code of a failed job as `record_failure` has left it."""
    try:
        return int(json.loads(regular(path).read_text(encoding="utf-8"))["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        return FAILED


def broken(error: Exception, directory: Path, launcher: str) -> str:
    """Return the exit code for an error of the launcher itself; those of jobs end in `run_job`."""
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    return (
        f"hydra/launcher={launcher}: {type(error).__name__}: {reason}\nThe launcher cannot work, or"
        " the process of a job has ended before the job (killed, out of memory). The same command"
        f" with hydra.sweep.dir={shorten(directory)} goes on with what is not complete."
    )
