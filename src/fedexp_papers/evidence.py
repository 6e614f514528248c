"""Read the committed runs of a sweep from its table of runs, `multirun/<sweep>/runs.jsonl.xz`.

`tools/convert_evidence.py` writes the table. Each line describes a finished run as a JSON mapping:

run         name of the run's directory
made_by     name of the sweep that made the run, if it was another one
not_judged  reasons not to compare the run's values with published ones, as found when the line was
            written
overrides, config, summary   what the run's files of these names contain
origin      what its origin.json contains, such as the time at which it started (`started`), without
            the directory; older runs have other values, and no start
tables      csv file -> column -> its cells, joined by commas
partitions  npz file -> examples per client and class (counts), class names, how the partition was
            made (info), and its hash

Nothing is unpickled.
"""

import json
import lzma
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.storage import save_npz
from fedexp.data.partitioned import partition_hash
from fedexp.rundir import files
from fedexp.rundir import jobs as jobs_file
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import own_jobs

TABLE = "runs.jsonl.xz"
# exceptions that reading an invalid table may raise
DAMAGE = (OSError, EOFError, lzma.LZMAError, LookupError, ValueError, TypeError, AttributeError)


def read_table(sweep: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a sweep's table of runs by run name; {} if the sweep has no table.

    Raises ConfigError if the table is damaged.
    """
    path = sweep / TABLE
    if not path.exists():
        return {}
    try:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        return {Path(line["run"]).name: line for line in lines}
    except DAMAGE as error:
        raise ConfigError(f"{path}: not a valid table of runs ({error!r})") from error


@contextmanager
def all_jobs(sweep: Path) -> Iterator[dict[RunDirectory, Mapping[str, Any]]]:
    """Yield the jobs of a sweep itself (`own_jobs`) and the runs of its table of runs.

    Runs whose job another one has now are left out (`fedexp.rundir.jobs`). If a run has both a
    finished run directory and a line in the table, the directory is used. The directories of other
    runs are temporary. The result maps each job to its line, which is empty for a run directory,
    and is sorted by name. Raises ConfigError if the table is damaged.
    """
    replaced = jobs_file.read(sweep).replaced
    lines = {
        name: line
        for name, line in read_table(sweep).items()
        if name not in replaced and not RunDirectory(sweep / name).finished
    }
    with TemporaryDirectory(prefix="fedexp-") as temporary:
        jobs: dict[RunDirectory, Mapping[str, Any]] = {
            run: {} for run in own_jobs(sweep) if run.directory.name not in lines
        }
        for name, line in lines.items():
            directory = Path(temporary) / name
            try:
                write_files(line, directory)
            except DAMAGE as error:
                raise ConfigError(f"{sweep / TABLE}: {name}: invalid line ({error!r})") from error
            jobs[RunDirectory(directory)] = line
        yield dict(sorted(jobs.items(), key=lambda job: job[0].directory.name))


def write_files(line: Mapping[str, Any], directory: Path) -> None:
    """Write the files of a run from its line.

    A line has no partition indices, so the numbers 0, 1, ... replace them.
    """
    (directory / files.OVERRIDES).parent.mkdir(parents=True)
    (directory / files.OVERRIDES).write_text(storage.dump_yaml(line["overrides"]), encoding="utf-8")
    (directory / files.CONFIG).write_text(storage.dump_yaml(line["config"]), encoding="utf-8")
    (directory / files.SUMMARY).write_text(json.dumps(line["summary"]), encoding="utf-8")
    for name, columns in line["tables"].items():
        cells = [text.split(",") for text in columns.values()]
        rows = [list(columns), *zip(*cells, strict=True)]
        text = "".join(f"{','.join(row)}\n" for row in rows)
        (directory / Path(name).name).write_text(text, encoding="utf-8")
    for name, kept in line.get("partitions", {}).items():
        counts = np.array(kept["counts"], dtype=np.int64)
        sizes = counts.sum(1)
        indices = np.arange(counts.sum())
        parts = np.split(indices, np.cumsum(sizes)[:-1])
        save_npz(
            directory / Path(name).name,
            indices=indices,
            sizes=sizes,
            counts=counts,
            classes=np.array(kept["classes"], dtype=str),
            hash=np.array(partition_hash(parts)),
            info=np.array(json.dumps(kept["info"] | {"hash": kept["hash"]})),
        )
