"""Write the finished runs of a sweep to the table `multirun/<sweep>/runs.jsonl.xz`.

    python tools/convert_evidence.py multirun/fedntd_table1
    python tools/convert_evidence.py multirun/fedntd_table1 ../other/multirun/fedntd_table1

Runs are read from the second directory (by default, the sweep's own) in the format of the commit in
tools/evidence_commit.txt, which stores when a run started. A run replaces the line of the same
name; all other lines stay. `fedexp_papers.evidence` describes a line. It leaves out clients'
tables, checkpoints, partition indices, and the times of a round's phases. Absolute paths are
shortened to their last part.
"""

import argparse
import csv
import json
import lzma
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fedexp.core.errors import ConfigError, say
from fedexp.core.storage import write_atomically
from fedexp.rundir.origin import read as read_origin
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.cells import reasons_not_to_judge
from fedexp_papers.evidence import TABLE, read_table
from fedexp_papers.sweeps import PaperSweep, all_paper_sweeps

COMMIT = Path(__file__).with_name("evidence_commit.txt")
TABLES = ("rounds.csv", "tasks.csv", "class_accuracy*.csv")
PHASES = re.compile(r".*(_seconds|_per_second)")
LOSSES = re.compile(r"(train|test|validation)_loss")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="directory of the table")
    parser.add_argument("source", type=Path, nargs="?", help="directory with run directories")
    options = parser.parse_args()
    try:
        count = convert(options.sweep, options.source or options.sweep)
    except ConfigError as error:
        return say(str(error))
    print(f"{options.sweep / TABLE}: {count} runs added or replaced")
    return 0 if count else 1


def convert(directory: Path, source: Path) -> int:
    """Add the finished runs below `source` to the table of a sweep; return their number."""
    sweep = {each.name: each for each in all_paper_sweeps()}.get(directory.absolute().name)
    jobs = sorted(path.parent.parent for path in source.glob("*/.hydra/overrides.yaml"))
    found = {}
    for job in jobs:
        try:
            line = read_run(job, sweep)
        except (OSError, ValueError, LookupError) as error:
            raise ConfigError(f"{job}: the run cannot be read ({error!r})") from error
        if line:
            found[job.name] = line
    if found:
        write_table(directory, read_table(directory) | found)
    commits = {str(line["summary"].get("commit")) for line in found.values()}
    if others := commits - {COMMIT.read_text(encoding="utf-8").strip()}:
        say(f"{directory}: made by {', '.join(sorted(others))}; later corrections are not noted")
    return len(found)


def write_table(directory: Path, lines: Mapping[str, Any]) -> None:
    texts = [
        json.dumps({"run": name} | lines[name], ensure_ascii=False, separators=(",", ":"))
        for name in sorted(lines)
    ]
    content = "".join(f"{text}\n" for text in texts).encode()
    content = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
    write_atomically(directory / TABLE, content)


def read_run(job: Path, sweep: PaperSweep | None) -> dict[str, Any] | None:
    """Return the line of a job, or None if its run is not finished.

    Raises ConfigError for a run of a version that did not store when a run started: the start shows
    that a prediction is older than its run.
    """
    run = RunDirectory(job)
    if not run.finished:
        return None
    origin = read_origin(job)
    if origin["started"] is None:
        raise ConfigError(f"{job}: the version that started the run did not store its start time")
    for key in ("directory", "commands", *(["parameters"] if origin["parameters"] is None else [])):
        del origin[key]  # paths of a machine; what an earlier version did not store
    reasons = reasons_not_to_judge(sweep, run.config, run.summary) if sweep else []
    return {
        "not_judged": reasons,
        "overrides": shorten_paths(run.overrides),
        "config": shorten_paths(run.config),
        "summary": shorten_paths(run.summary),
        "origin": shorten_paths(origin),
        "tables": {path.name: read_columns(path) for each in TABLES for path in job.glob(each)},
        "partitions": {path.name: read_partition(path) for path in job.glob("partition*.npz")},
    }


def read_columns(path: Path) -> dict[str, str]:
    """Return the columns of a csv file; times with three digits and losses with seven."""
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    for name, cells in columns.items():
        digits = 3 if name == "seconds" else 7 if LOSSES.fullmatch(name) else 0
        if digits:
            columns[name] = [cell and f"{float(cell):.{digits}g}" for cell in cells]
    return {name: ",".join(cells) for name, cells in columns.items() if not PHASES.fullmatch(name)}


def read_partition(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        return {
            "counts": arrays["counts"].tolist(),
            "classes": [str(name) for name in arrays["classes"]],
            "info": json.loads(str(arrays["info"])),
            "hash": str(arrays["hash"]),
        }


def shorten_paths(value: Any) -> Any:
    """Replace absolute paths, including paths in overrides, with their last parts."""
    if isinstance(value, Mapping):
        return {key: shorten_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shorten_paths(each) for each in value]
    if isinstance(value, str):
        key, equals, text = value.rpartition("=")
        if text.startswith("/"):
            return f"{key}{equals}{PurePosixPath(text).name}"
    return value


if __name__ == "__main__":
    sys.exit(main())
