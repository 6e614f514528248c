"""Keep finished runs as small files that can be committed: `multirun/<sweep>/runs/<run>.json.xz`.

A run file has everything that tables, figures and documents read from a run directory: rounds,
class accuracies in all test views, task accuracies, configuration, overrides, fingerprint, and the
summary, which includes commit and hardware. `pack` makes the run file of a run. `unpack` makes a
run directory from a run file, so code that reads run directories can use both.

A run file leaves out the clients' tables, the checkpoints, the times of a round's phases, and the
indices of the partition. Round times are rounded to three digits and losses to seven, since no
table shows more. All other cells are copied from the csv files as text. Nothing is unpickled.
"""

import csv
import io
import json
import lzma
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from fedexp.core import storage, yaml_files
from fedexp.core.errors import ConfigError
from fedexp.core.npz import load_npz, save_npz
from fedexp.data.partitioned import (
    NOT_KEPT,
    changed_partition_name,
    find_changed_partitions,
    find_task_partitions,
    partition_hash,
    task_partition_name,
)
from fedexp.data.views import VIEWS, file_in_view
from fedexp.rundir import files, origin
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.run_reuse import NOTE
from fedexp.rundir.sweeps import find_jobs, resolve_reuse

FORMAT = 1
FOLDER, SUFFIX = "runs", ".json.xz"
LIMIT, MEMORY = 2**26, 2**27  # maximum bytes of an unpacked file, and of memory to unpack it
MOST_EXAMPLES = 2**26  # maximum number of examples in all partitions of a run together
LONGEST_NAME = 1000  # maximum length of a class name
KINDS = {  # types of the parts of a run file
    "overrides": list,
    "config": dict,
    "origin": dict,
    "summary": dict,
    "tables": dict,
    "partitions": list,
}
# exceptions that reading an invalid file may raise
DAMAGE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
TABLES = (files.ROUNDS, files.TASKS, *(file_in_view(files.CLASSES, view) for view in VIEWS))
PHASES, LOSSES = (
    re.compile(r".*(_seconds|_per_second)"),
    re.compile(r"(train|test|validation)_loss"),
)
NOTED = re.compile(r"\.\./\.\./[^/]+/[^/]+")  # a run in another sweep: ../../<sweep>/<run>
LEFT_OUT = ("checkpoint", "figures", "wandb", "*.log", ".lock", ".owner.json", "*.tmp")


def keep_runs(sweep: Path) -> list[Path]:
    """Write a run file for each finished run of a sweep and return the paths.

    A job that uses a run from another sweep gets a file too.
    """
    paths = []
    for job in sorted({path.parent.parent for path in sweep.glob("*/.hydra/overrides.yaml")}):
        content = pack(job)
        if content is not None:
            paths.append(sweep / FOLDER / f"{job.name}{SUFFIX}")
            storage.write_atomically(paths[-1], content, sync_folder=False)
    return paths


def pack(directory: Path) -> bytes | None:
    """Return the run file of a run as bytes, or None if the run is not finished.

    The bytes are equal for equal runs.
    """
    text = (directory / files.OVERRIDES).read_text(encoding="utf-8")
    value: dict[str, Any] = {"format": FORMAT, "overrides": portable(yaml.safe_load(text))}
    run = RunDirectory(directory)
    if not run.finished and run.has(NOTE):
        note = str(json.loads((directory / NOTE).read_text(encoding="utf-8"))["run"])
        run = RunDirectory(directory / note)
        if NOTED.fullmatch(note):
            return compress(value | {"elsewhere": note})
        # The run is in the same sweep or outside `multirun`, so its content is copied.
    return compress(value | content_of(run)) if run.finished else None


def content_of(run: RunDirectory) -> dict[str, Any]:
    """Return the parts of a run that its run file contains."""
    directory = run.directory
    started = origin.read(directory)
    started.pop("directory", None)
    partitions = [
        directory / files.PARTITION,
        *find_task_partitions(directory),
        *find_changed_partitions(directory).values(),
    ]
    return {
        "config": portable(run.config),
        "origin": started,
        "summary": portable(run.summary),
        "tables": {name: read_columns(directory / name) for name in TABLES if run.has(name)},
        "partitions": [partition(path) for path in partitions if path.exists()],
    }


def compress(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def portable(value: Any) -> Any:
    """Replace absolute paths, including paths in overrides, with their last parts.

    The run file then contains no directories of the current machine.
    """
    if isinstance(value, Mapping):
        return {key: portable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [portable(each) for each in value]
    if isinstance(value, str):
        key, equals, text = value.rpartition("=")
        if text.startswith("/"):
            return f"{key}{equals}{PurePosixPath(text).name}"
    return value


def read_columns(path: Path) -> dict[str, str]:
    """Read a csv file of numbers as a dict from each column to its cells, joined by commas."""
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    table = {}
    for i, name in enumerate(names):
        if not PHASES.fullmatch(name):
            table[name] = ",".join(round_cell(name, row[i]) for row in rows)
    return table


def as_accuracies(table: Mapping[str, str]) -> dict[str, str]:
    """Convert the counts of correct examples in older run files to class accuracies.

    The key `of` in the table gives the number of examples in each class.
    """
    classes, sizes = table["class"].split(","), map(int, table["of"].split(","))
    of = dict(zip(dict.fromkeys(classes), sizes, strict=True))
    correct = zip(classes, table["accuracy"].split(","), strict=True)
    cells = [repr(int(k) / of[label]) for label, k in correct]
    return {"round": table["round"], "class": table["class"], "accuracy": ",".join(cells)}


def round_cell(name: str, cell: str) -> str:
    """Round a cell to the digits that its column keeps."""
    if cell and name == "seconds":
        return f"{float(cell):.3g}"
    return f"{float(cell):.7g}" if cell and LOSSES.match(name) else cell


def partition(path: Path) -> dict[str, Any]:
    """Return the parts of a partition that the run file contains.

    The parts are the number of examples per client and class, the class names, a description of how
    the partition was made (`info`), and its hash.
    """
    arrays = load_npz(path)
    return {
        "counts": arrays["counts"].tolist(),
        "classes": [str(name) for name in arrays["classes"]],
        "info": json.loads(str(arrays["info"])),
        "hash": str(arrays["hash"]),
    }


def read(path: Path) -> dict[str, Any]:
    """Return the content of a run file.

    Raises ConfigError if the file is damaged or has an unknown format.
    """
    try:
        unpacker = lzma.LZMADecompressor(memlimit=MEMORY)
        text = unpacker.decompress(path.read_bytes(), max_length=LIMIT)
        if not unpacker.eof:
            raise ValueError("it ends too early, or is too large")
        value = json.loads(text)
        number = value["format"]
        if number == FORMAT:
            check_form(value)
    except (*DAMAGE, OSError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(
            f"{path}: not a valid run file ({error or type(error).__name__})"
        ) from error
    if number != FORMAT:
        raise ConfigError(
            f"{path}: has format {number}; this version of fedexp reads formats up to {FORMAT}"
        )
    return value


def check_form(value: Mapping[str, Any]) -> None:
    """Raise an exception listed in DAMAGE unless a run file has the form that `pack` writes.

    The total number of examples is limited, since arrays of that size are made from the counts.
    """
    kinds = {"overrides": list} if "elsewhere" in value else KINDS
    if "elsewhere" in value and not NOTED.fullmatch(value["elsewhere"]):
        raise ValueError(f"{value['elsewhere']}: must be a run of another sweep")
    for name, kind in kinds.items():
        if not isinstance(value[name], kind):
            raise ValueError(f"`{name}` is not a {kind.__name__}")
    examples = 0
    for kept in value.get("partitions", ()):
        for row in kept["counts"]:
            if len(row) != len(kept["classes"]) or any(type(n) is not int or n < 0 for n in row):
                raise ValueError("its counts must be one non-negative integer per class")
            examples += sum(row)
        names = list(kept["classes"])
        if names != kept["classes"] or any(len(name) > LONGEST_NAME for name in names):
            raise ValueError(
                f"its class names must be a list of texts of at most {LONGEST_NAME:,} characters"
            )
    if examples > MOST_EXAMPLES:
        raise ValueError(
            f"the sum of its counts is {examples:,} examples; at most {MOST_EXAMPLES:,} are allowed"
        )


def kept_files(sweep: Path) -> dict[str, Path]:
    """Return the run files of a sweep by run name."""
    paths = sorted((sweep / FOLDER).glob(f"*{SUFFIX}"))
    return {path.name.removesuffix(SUFFIX): path for path in paths}


def how_to_restore(directory: Path) -> str:
    """Return a hint on how to restore the runs of a sweep, to append to an error message.

    Return an empty string if the sweep has no run files.
    """
    count = len(kept_files(directory))
    command = f"`fedexp report {directory} --restore DIR` restores their directories"
    return f"; {count} runs are saved as files: {command}" if count else ""


@contextmanager
def kept_runs(sweep: Path, besides: Collection[str] = ()) -> Iterator[dict[str, RunDirectory]]:
    """Yield the runs of a sweep's run files by name, unpacked to a temporary directory.

    If a job uses a run from another sweep, that run is yielded. If the other sweep has neither a
    directory nor a run file for it, the job is left out. Raises ConfigError if a file cannot be
    read.

    besides: names of runs to leave out.
    """
    with TemporaryDirectory(prefix="fedexp-") as temporary:
        found = {}
        for name, path in kept_files(sweep).items():
            if name in besides:
                continue
            value = read(path)
            source = find_reused(sweep, value["elsewhere"]) if "elsewhere" in value else path
            if source is None:
                continue
            if not source.is_dir():
                source = unpack(source, Path(temporary) / name)
            found[name] = RunDirectory(source, tuple(value["overrides"]))
        yield found


def find_reused(sweep: Path, note: str) -> Path | None:
    """Return the directory of a finished run in another sweep, or else its run file.

    Return None if the run has neither.

    note: the path ../../<sweep>/<run> from the job's run file.
    """
    other, run = PurePosixPath(note).parts[-2:]
    folder = sweep.absolute().parent / other
    return folder / run if RunDirectory(folder / run).finished else kept_files(folder).get(run)


@contextmanager
def all_jobs(sweep: Path) -> Iterator[list[RunDirectory]]:
    """Yield all jobs of a sweep, read from run directories and from run files.

    If a run has both a finished run directory and a run file, the directory is used.
    """
    kept = kept_files(sweep)
    finished = [name for name in kept if resolve_reuse(RunDirectory(sweep / name)).finished]
    replaced = {sweep / name for name in kept if name not in finished}
    with kept_runs(sweep, finished) as runs:
        jobs = [run for run in find_jobs(sweep) if run.directory not in replaced]
        yield sorted([*jobs, *runs.values()], key=lambda run: run.directory.name)


def restore(sweep: Path, target: Path) -> list[Path]:
    """Make run directories `target/<run>` from a sweep's run files and return them.

    If a directory exists or a file cannot be read, ConfigError is raised before anything is
    written.
    """
    with kept_runs(sweep) as runs:
        for name in runs:
            if (target / name).exists():
                raise ConfigError(f"{target / name}: already exists; choose another directory")
        with storage.storing(target):
            for name, run in runs.items():
                # a copy of the temporary directory itself would be unreadable for other users
                ignored = shutil.ignore_patterns(*LEFT_OUT)
                shutil.copytree(run.directory, target / name, ignore=ignored)
                files.write_overrides(target / name, run.overrides)
    return [target / name for name in runs]


def unpack(path: Path, directory: Path) -> Path:
    """Make a run directory from a run file and return it.

    Raises ConfigError if the file cannot be read.
    """
    value = read(path)
    try:
        contents = dict(texts(value))
        kept = value.get("partitions", ())
        partitions = {
            partition_name(i, each["info"]): arrays_of(each) for i, each in enumerate(kept, 1)
        }
    except DAMAGE as error:
        raise ConfigError(f"{path}: not a valid run file ({error!r})") from error
    for name, text in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    for name, arrays in partitions.items():
        save_npz(directory / name, **arrays)
    return directory


def partition_name(number: int, info: Mapping[str, Any]) -> str:
    """Return the name of a partition's file.

    number: the partition's task, counted from 1. info: how the partition was made. If the partition
    was introduced during the run, the file name contains the partition's first round.
    """
    if "from_round" in info:
        return changed_partition_name(int(info["from_round"]))
    return files.PARTITION if number == 1 else task_partition_name(number)


def texts(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (file name, text) for each text file of a run directory."""
    yield files.OVERRIDES, yaml_files.dump(value["overrides"])
    yield files.CONFIG, yaml_files.dump(value["config"])
    yield files.SUMMARY, json.dumps(value["summary"], indent=2) + "\n"
    yield origin.NAME, json.dumps(value["origin"], indent=2) + "\n"
    for name in TABLES:
        if table := value["tables"].get(name):
            yield name, table_text(table)


def table_text(table: Mapping[str, str]) -> str:
    """Return the text of a csv file from the table's columns."""
    if "of" in table:
        table = as_accuracies(table)
    cells = [column.split(",") for column in table.values()]
    if len(set(map(len, cells))) != 1:
        raise ValueError("columns of different lengths")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table, *zip(*cells, strict=True)])
    return text.getvalue()


def arrays_of(kept: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of partition.npz.

    Run files do not contain indices, so the numbers 0, 1, ... replace them.
    """
    counts = np.array(kept["counts"], dtype=np.int64)
    indices, sizes = np.arange(counts.sum()), counts.sum(1)
    return {
        "indices": indices,
        "sizes": sizes,
        "counts": counts,
        "hash": np.array(partition_hash(np.split(indices, np.cumsum(sizes)[:-1]))),
        "classes": np.array(kept["classes"], dtype=str),
        "info": np.array(json.dumps(kept["info"] | {"indices": NOT_KEPT, "hash": kept["hash"]})),
    }
