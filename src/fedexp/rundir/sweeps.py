"""A sweep directory contains a directory for each job, and the name of the sweep (sweep.json).

See `fedexp.rundir.jobs` for the jobs that its commands have launched.
"""

import logging
import os
import re
from collections import Counter
from pathlib import Path

from fedexp.core import storage
from fedexp.core.console import plural
from fedexp.rundir import files, jobs
from fedexp.rundir.reader import MARKS, RunDirectory

log = logging.getLogger("fedexp")
MARKER = files.SWEEP[0]  # in the directory of a named sweep
JOB = re.compile("_[0-9a-f]{8}$")  # end of the name of a job's directory, from its identity


def find_runs(directory: Path) -> list[Path]:
    """Return the run directories at or inside a directory, sorted by name.

    These are also links to run directories; other links are not followed. A run that is there by
    several names is returned once. The directories of W&B are left out.
    """
    found = []
    for folder, folders, names in os.walk(directory):
        if not {*names, *folders}.isdisjoint(MARKS):
            found.append(Path(folder))
            folders.clear()
        folders[:] = [name for name in folders if not Path(folder, name).match(files.WANDB)]
        links = [path for name in folders if (path := Path(folder, name)).is_symlink()]
        found += [path for path in links if any((path / name).exists() for name in MARKS)]
    return sorted({path.resolve(): path for path in sorted(found, reverse=True)}.values())


def job_directories(sweep: Path) -> list[Path]:
    """Return the directories of a sweep's jobs, also of failed and unfinished ones, by name."""
    found = {path.parent for name in MARKS for path in sweep.glob(f"*/{name}")}
    found |= {path.parent.parent for path in sweep.glob(f"*/{files.OVERRIDES}")}
    return sorted(found)


def own_jobs(sweep: Path) -> list[RunDirectory]:
    """Return the jobs of a sweep, sorted by directory name, without `replaced_jobs` and runs that
    are not part of it, see `all_jobs`."""
    replaced = jobs.read(sweep).replaced
    return [run for run in all_jobs(sweep) if run.directory.name not in replaced]


def replaced_jobs(sweep: Path) -> dict[RunDirectory, RunDirectory]:
    """Return the jobs whose overrides another job has now, each with this job.

    Their identities differ, for example because a file of options was edited between two commands.
    """
    replaced = jobs.read(sweep).replaced
    return {
        run: RunDirectory(sweep / replaced[run.directory.name])
        for run in map(RunDirectory, job_directories(sweep))
        if run.directory.name in replaced
    }


def all_jobs(sweep: Path) -> list[RunDirectory]:
    """Return all jobs of a sweep, sorted by directory name, without `other_runs` and `deeper_runs`.

    The log names those.
    """
    others = other_runs(sweep)
    for run, reason in others.items():
        log.warning("%s: left out: %s %s", storage.display_path(sweep), run.directory.name, reason)
    for folder, count in deeper_runs(sweep).items():
        runs = plural(count, "run")
        log.warning("%s: left out: %s in %s", storage.display_path(sweep), runs, folder)
    return [run for run in map(RunDirectory, job_directories(sweep)) if run not in others]


def other_runs(sweep: Path) -> dict[RunDirectory, str]:
    """Return the runs in a sweep's directory that are not part of it, each with the reason.

    These are runs that no sweep made, or that another sweep made, unless their directories have the
    name of a job, and runs with the configuration of another one, such as a copy. Of those, the
    longest counts, since `stop.minutes` may have ended others, and a replaced one never does.
    """
    made_in, replaced = sweep_directory_name(sweep), jobs.read(sweep).replaced
    found: dict[RunDirectory, str] = {}
    known: dict[object, str] = {}
    every = map(RunDirectory, job_directories(sweep))
    for run in sorted(every, key=lambda run: -run.summary.get("rounds", 0)):
        name = run.directory.name
        maker = run.summary.get("sweep", made_in)
        identity = run.summary.get("identity") or name
        # a sweep can be renamed, and a job that is extended gets another identity
        is_job = maker == made_in or (maker is not None and JOB.search(name))
        if made_in is not None and not is_job:
            found[run] = f"was not made by the sweep {made_in}"
        elif name not in replaced and known.setdefault(identity, name) != name:
            found[run] = f"has the configuration of {known[identity]}"
    return found


def deeper_runs(sweep: Path) -> dict[str, int]:
    """Return the numbers of the runs in directories inside a sweep's, such as another sweep there.

    They are not part of the sweep. The keys are the paths of these directories in the sweep's.
    """
    own = {path.resolve() for path in job_directories(sweep)}
    runs = [run for run in find_runs(sweep) if run != sweep and run.resolve() not in own]
    return Counter(run.parent.relative_to(sweep).as_posix() for run in runs)


def sweep_directory_name(sweep: Path) -> str | None:
    """Return the name that a sweep's directory had when the sweep ran, or None if it is unknown."""
    path = sweep / files.MULTIRUN
    if not path.exists():
        return None
    with storage.reading(path):
        return Path(storage.read_mapping(path)["hydra"]["sweep"]["dir"]).name


def config_folders(sweep: Path) -> list[Path]:
    """Return the directories with config groups that the command of a sweep used."""
    path = sweep / files.MULTIRUN
    if not path.exists():
        return []
    with storage.reading(path):
        hydra = storage.read_mapping(path)["hydra"]
        sources = hydra.get("runtime", {}).get("config_sources", [])
        return [Path(each["path"]) for each in sources if each["schema"] == "file"]


def sweep_name(directory: Path) -> str | None:
    """Return the name of the sweep in a directory, or None for a sweep without a name.

    The name is read from sweep.json or multirun.yaml. Committed tables have neither of them; their
    directory has the name.
    """
    if (path := directory / MARKER).exists():
        with storage.reading(path):
            return str(storage.read_mapping(path)["sweep"])
    if not (path := directory / files.MULTIRUN).exists():
        return directory.name
    with storage.reading(path):
        name = storage.read_mapping(path)["hydra"]["sweeper"].get("sweep")
        return None if name is None else str(name)


def write_sweep_name(directory: Path, name: str) -> None:
    """Write a sweep's name to sweep.json."""
    directory.mkdir(parents=True, exist_ok=True)
    storage.write_json(directory / MARKER, {"sweep": name})
