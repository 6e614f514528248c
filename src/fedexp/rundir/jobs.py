"""jobs.json: the jobs that commands have launched in the directory of a sweep.

{"format": 1,
 "jobs": [{"options": [...],   the overrides of the job, see `job_options`
           "run": "...",       the name of its directory
           "command": 2,       the number of the last command that launched it, counted from 1
           "replaced": [...]}]}   directories that had the job before

A job gets another directory if its identity changes although its overrides do not, for example
because a file of options was edited or the version of a class was raised. The earlier directories
stay, but no longer belong to the sweep's results. All commands in the directory share the file, so
seeds and methods can be added later. A sweep of a version without this file has replaced no job.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.rundir import files
from fedexp.rundir.identity import is_free

NAME, LOCK, FORMAT = "jobs.json", ".jobs.lock", 1
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass
class Jobs:
    """The content of jobs.json."""

    runs: dict[tuple[str, ...], str] = field(default_factory=dict)  # options -> directory
    commands: dict[str, int] = field(default_factory=dict)  # directory -> number of the command
    earlier: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    @property
    def last_command(self) -> int:
        """The number of the last command, or 0 before the first one."""
        return max(self.commands.values(), default=0)

    @property
    def replaced(self) -> dict[str, str]:
        """The directories that no longer have a job, each with the directory that has it now."""
        current = set(self.runs.values())
        return {
            name: self.runs[options]
            for options, names in self.earlier.items()
            for name in names
            if name not in current
        }

    def add(
        self,
        launched: Mapping[tuple[str, ...], str],
        there: Mapping[str, tuple[str, ...]],
        command: int,
    ) -> None:
        """Add the jobs of a command.

        launched: options -> directory of each job. there: directory -> options of the runs that
        exist, which may be older than this file. command: the number of the command.
        """
        for options, name in launched.items():
            before = {*self.earlier.get(options, ()), self.runs.get(options, name)}
            before |= {each for each, own in there.items() if own == options}
            self.earlier[options] = sorted(before - {name})
            self.runs[options], self.commands[name] = name, command


def read(sweep: Path) -> Jobs:
    """Return the jobs of a sweep; none if the file is missing.

    Raises ConfigError if it cannot be read.
    """
    path, found = sweep / NAME, Jobs()
    if not path.exists():
        return found
    content = storage.read_mapping(path)
    with storage.reading(path):
        if content["format"] != FORMAT:
            raise ConfigError(f"{path}: has format {content['format']}, not {FORMAT}")
        for job in content["jobs"]:
            options, name = tuple(map(str, job["options"])), str(job["run"])
            found.runs[options] = name
            found.commands[name] = max(int(job["command"]), found.commands.get(name, 0))
            found.earlier[options] = list(map(str, job["replaced"]))
    return found


def write(sweep: Path, jobs: Jobs) -> None:
    content = [
        {
            "options": list(options),
            "run": name,
            "command": jobs.commands[name],
            "replaced": jobs.earlier[options],
        }
        for options, name in jobs.runs.items()
    ]
    storage.write_json(sweep / NAME, {"format": FORMAT, "jobs": content})


def record(
    sweep: Path, launched: Iterable[tuple[Sequence[str], str]], command: int | None = None
) -> int:
    """Add the jobs of a command to jobs.json, and return the command's number.

    Another command may do so at the same time. launched: the overrides and the name of the
    directory of each job. command: the number, if the command has recorded other jobs before.
    """
    with storage.storing(sweep / NAME), FileLock(sweep / LOCK):
        jobs = read(sweep)
        new = {job_options(overrides): name for overrides, name in launched}
        known = {*jobs.runs.values(), *new.values()}
        paths = sorted(sweep.glob(f"*/{files.OVERRIDES}"))
        others = {path.parent.parent.name: path for path in paths}
        there = {
            name: job_options(storage.read_overrides(path))
            for name, path in others.items()
            if name not in known
        }
        number = command or jobs.last_command + 1
        jobs.add(new, there, number)
        write(sweep, jobs)
    return number


def job_options(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides by which a command tells its jobs apart, in a fixed order.

    Options that never change a result are left out, so that a job stays the same with another
    tracker. Of several values for one key, the last one counts.
    """
    texts = (normalise(text.lstrip("+")) for text in overrides)
    last = {text.partition("=")[0]: text for text in texts}
    return tuple(
        sorted(
            text
            for key, text in last.items()
            # a callback may end runs
            if not key.startswith("hydra") and (key.startswith("callback") or not is_free(key))
        )
    )


def normalise(override: str) -> str:
    """Convert an override of a run to the form that is used in sweep files.

    Hydra's sweeper escapes braces, capitalises truth values and rewrites numbers. This function
    removes the backslashes, lowercases truth values and formats numbers as Python does.
    """
    key, equals, value = override.replace("\\{", "{").replace("\\}", "}").partition("=")
    return f"{key}{equals}{normalise_value(value)}"


def normalise_value(value: str) -> str:
    """Format a decimal number as Python and Hydra's sweeper do, such as 0.001 for 1e-3.

    Truth values are converted to lower case. Any other text is returned unchanged.
    """
    if value in ("True", "False"):
        return value.lower()
    is_decimal = NUMBER.fullmatch(value) and not value.lstrip("+-").isdecimal()
    return str(float(value)) if is_decimal else value
