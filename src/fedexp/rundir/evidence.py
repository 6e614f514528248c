"""Keep finished runs as small files that can be committed: `multirun/<sweep>/runs/<run>.json.xz`.

A file has everything that tables, figures and documents read from a run directory: rounds, class
accuracies of all test views, task accuracies, configuration, overrides, fingerprint, and the
summary with commit and hardware. `pack` makes the file and `unpack` makes a run directory from it,
so every reader of run directories can read both.

A file does not have the clients' tables, the checkpoints, the times of a round's phases and the
partition's indices. Round times are rounded to three digits and losses to seven; no table shows
more. The other cells are copied from the csv files as text. Nothing is unpickled.
"""

import csv
import io
import json
import lzma
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from fedexp.core import storage
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
from fedexp.rundir.reader import RunDirectory, finished_summary
from fedexp.rundir.run_reuse import NOTE, ROOT

FORMAT = 1
FOLDER, SUFFIX = "runs", ".json.xz"
LIMIT, MEMORY = 2**26, 2**27  # most bytes of an unpacked file, and of memory for unpacking it
MOST_EXAMPLES = 2**26  # most examples of all partitions of a run together
LONGEST_NAME = 1000  # most characters of a class name
KINDS = {  # types of the parts of a file
    "overrides": list,
    "config": dict,
    "origin": dict,
    "summary": dict,
    "tables": dict,
    "partitions": list,
}
# errors that reading an invalid file may raise
DAMAGE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
LARGEST = 20_000  # most test examples of a class
TABLES = (files.ROUNDS, files.TASKS, *(file_in_view(files.CLASSES, view) for view in VIEWS))
PHASES, LOSSES = (
    re.compile(r".*(_seconds|_per_second)"),
    re.compile(r"(train|test|validation)_loss"),
)
NOTED = re.compile(r"\.\./\.\./[^/]+/[^/]+")  # a run of another sweep: ../../<sweep>/<run>
LEFT_OUT = ("checkpoint", "figures", "wandb", "*.log", ".lock", ".owner.json", "*.tmp")


def keep_runs(sweep: Path) -> list[Path]:
    """Write a file for each finished run of a sweep and return the paths.

    A job that uses another sweep's run gets a file too.
    """
    jobs = sorted({path.parent.parent for path in sweep.glob("*/.hydra/overrides.yaml")})
    found = [(job, content) for job in jobs if (content := pack(job)) is not None]
    paths = [sweep / FOLDER / f"{job.name}{SUFFIX}" for job, _ in found]
    for path, (_, content) in zip(paths, found, strict=True):
        storage.write_atomically(path, content, sync_folder=False)
    return paths


def pack(directory: Path) -> bytes | None:
    """Return the content of a run's file, or None if the run is not finished.

    Equal runs have equal bytes.
    """
    summary, note = finished_summary(directory), directory / NOTE
    overrides = yaml.safe_load(
        (directory / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")
    )
    value: dict[str, Any] = {"format": FORMAT, "overrides": portable(overrides)}
    if summary is None:
        if not note.exists():
            return None
        value["elsewhere"] = str(json.loads(note.read_text(encoding="utf-8"))["run"])
        # If the run is in the same sweep or outside of `multirun`, store a copy of it.
        if not NOTED.fullmatch(value["elsewhere"]):
            directory = directory / value.pop("elsewhere")
            if (summary := finished_summary(directory)) is None:
                return None
    if summary is not None:
        paths = [
            directory / files.PARTITION,
            *find_task_partitions(directory),
            *find_changed_partitions(directory).values(),
        ]
        started = {
            key: value for key, value in origin.read(directory).items() if key != "directory"
        }
        value |= {
            "config": portable(RunDirectory(directory).config),
            "origin": started,
            "summary": portable(summary),
            "tables": {
                name: columns(directory / name) for name in TABLES if (directory / name).exists()
            },
            "partitions": [partition(path) for path in paths if path.exists()],
        }
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def portable(value: Any) -> Any:
    """Replace absolute paths by their last part, also after the `=` of an override.

    The result has no paths of this machine.
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


def columns(path: Path) -> dict[str, str]:
    """Return column -> its cells, separated by commas, from a csv file of numbers."""
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    if not rows:
        return dict.fromkeys(names, "")
    table = {
        name: ",".join(shortened(name, cell) for cell in cells)
        for name, cells in zip(names, zip(*rows, strict=True), strict=True)
        if not PHASES.fullmatch(name)
    }
    return table | as_counts(table) if names == ["round", "class", "accuracy"] else table


def as_counts(table: Mapping[str, str]) -> dict[str, str]:
    """Return class accuracies as numbers of correct examples, which takes a third of the space.

    The key `of` has the number of examples of each class. The dict is empty if the accuracies are
    not such fractions.
    """
    classes, cells = table["class"].split(","), table["accuracy"].split(",")
    values: dict[str, list[float]] = {}
    for label, cell in zip(classes, cells, strict=True):
        values.setdefault(label, []).append(float(cell or "nan"))
    sizes = {label: denominator(np.array(found)) for label, found in values.items()}
    if None in sizes.values():
        return {}
    correct = [
        round(float(cell) * (sizes[label] or 1)) for label, cell in zip(classes, cells, strict=True)
    ]
    found = {
        "accuracy": ",".join(map(str, correct)),
        "of": ",".join(str(sizes[label]) for label in values),
    }
    return found if as_accuracies({**table, **found})["accuracy"] == table["accuracy"] else {}


def as_accuracies(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table with class accuracies from a table with counts, the inverse of `as_counts`."""
    classes, sizes = table["class"].split(","), map(int, table["of"].split(","))
    of = dict(zip(dict.fromkeys(classes), sizes, strict=True))
    cells = (
        repr(int(k) / of[label])
        for label, k in zip(classes, table["accuracy"].split(","), strict=True)
    )
    return {"round": table["round"], "class": table["class"], "accuracy": ",".join(cells)}


def denominator(values: np.ndarray) -> int | None:
    """Return the smallest n such that every value is k/n for an integer k.

    Return None if no n up to LARGEST satisfies this.
    """
    numbers = np.arange(1, LARGEST + 1)
    for value in np.unique(values):
        numbers = (
            numbers[np.round(value * numbers) / numbers == value] if value == value else numbers[:0]
        )
    return int(numbers[0]) if len(numbers) else None


def shortened(name: str, cell: str) -> str:
    """Return a cell rounded to the digits that its column keeps."""
    digits = 3 if name == "seconds" else 7 if LOSSES.match(name) else None
    return cell if digits is None or not cell else f"{float(cell):.{digits}g}"


def partition(path: Path) -> dict[str, Any]:
    """Return the parts of a partition that are kept.

    These are the number of examples per client and class, the class names, how the partition was
    made (`info`) and its hash.
    """
    arrays = load_npz(path)
    return {
        "counts": arrays["counts"].tolist(),
        "classes": [str(name) for name in arrays["classes"]],
        "info": json.loads(str(arrays["info"])),
        "hash": str(arrays["hash"]),
    }


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file. Raises ConfigError for damage or a newer format."""
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
            f"{path}: not the file of a run ({error or type(error).__name__})"
        ) from error
    if number != FORMAT:
        raise ConfigError(
            f"{path}: has format {number}; this version of fedexp reads formats up to {FORMAT}"
        )
    return value


def check_form(value: Mapping[str, Any]) -> None:
    """Raise one of DAMAGE unless a file's content has the form that `pack` writes.

    The number of examples is limited, since arrays of that size are made from the counts.
    """
    kinds = {"overrides": list} if "elsewhere" in value else KINDS
    for name, kind in kinds.items():
        if not isinstance(value[name], kind):
            raise ValueError(f"`{name}` is not a {kind.__name__}")
    examples = 0
    for kept in value.get("partitions", ()):
        for row in kept["counts"]:
            if len(row) != len(kept["classes"]) or any(type(n) is not int or n < 0 for n in row):
                raise ValueError("its counts are not a number of examples for each class")
            examples += sum(row)
        names = list(kept["classes"])
        if names != kept["classes"] or any(len(name) > LONGEST_NAME for name in names):
            raise ValueError(f"a class has no name of at most {LONGEST_NAME:,} characters")
    if examples > MOST_EXAMPLES:
        raise ValueError(f"its counts are of {examples:,} examples, at most {MOST_EXAMPLES:,}")


def kept_below(folders: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the content of each kept run below these folders.

    Unreadable files are skipped, and so are files that only refer to another sweep's run.
    """
    for path in sorted(
        {path for folder in folders for path in folder.rglob(f"{FOLDER}/*{SUFFIX}")}
    ):
        with suppress(ConfigError):
            value = read(path)
            if "elsewhere" not in value:
                yield value


def how_to_restore(directory: Path) -> str:
    """Return a hint, to follow "no run is there", for a sweep whose runs are kept as files.

    Return an empty string if no run is kept.
    """
    count = sum(1 for _ in (directory / FOLDER).glob(f"*{SUFFIX}"))
    command = f"`fedexp report {directory} --restore DIR` makes run directories of them"
    return f"; {count} are kept as files: {command}" if count else ""


def restore(sweep: Path, target: Path) -> list[Path]:
    """Make run directories `target/<run>` from a sweep's files and return them.

    A job that uses another sweep's run gets a copy of that run with the job's overrides. The job is
    left out if that run is not kept in the neighbouring sweep. Raises ConfigError, before anything
    is written, if a directory exists or a file cannot be read.
    """
    sources = {
        path.name.removesuffix(SUFFIX): path for path in sorted((sweep / FOLDER).glob(f"*{SUFFIX}"))
    }
    values = {name: read(path) for name, path in sources.items()}
    for name, value in values.items():
        if NOTED.fullmatch(note := str(value.get("elsewhere", ""))):
            folder, run = PurePosixPath(note).parts[-2:]
            sources[name] = sweep.absolute().parent / folder / FOLDER / f"{run}{SUFFIX}"
    made = {target / name: path for name, path in sources.items() if path.is_file()}
    if not made:
        return []
    if there := next((path for path in made if path.exists()), None):
        raise ConfigError(f"{there}: exists already; name a directory without it")
    with storage.storing(target), TemporaryDirectory(prefix="fedexp-") as temporary:
        for directory, source in made.items():
            copy = Path(temporary) / directory.name
            unpack(source, copy)
            own = yaml.safe_dump(values[directory.name]["overrides"], allow_unicode=True)
            (copy / files.OVERRIDES).write_text(own, encoding="utf-8")
        # a copy of the temporary directory would be unreadable for other users
        target.mkdir(parents=True, exist_ok=True)
        for directory in made:
            shutil.copytree(Path(temporary) / directory.name, directory)
    return list(made)


def unpack(path: Path, directory: Path) -> None:
    """Make a run directory from a file. Raises ConfigError if the file cannot be read."""
    value = read(path)
    try:
        contents = dict(texts(value))
        kept = value.get("partitions", ())
        partitions = {
            partition_name(i, each["info"]): arrays_of(each) for i, each in enumerate(kept, 1)
        }
    except DAMAGE as error:
        raise ConfigError(f"{path}: not the file of a run ({error!r})") from error
    for name, text in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    for name, arrays in partitions.items():
        save_npz(directory / name, **arrays)


def partition_name(number: int, info: Mapping[str, Any]) -> str:
    """Return the file name of the partition of task `number` (from 1) or of a change in a run.

    info: how the partition was made.
    """
    if "from_round" in info:
        return changed_partition_name(int(info["from_round"]))
    return files.PARTITION if number == 1 else task_partition_name(number)


def texts(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (file name, text) for the text files of a run directory."""
    yield ".hydra/overrides.yaml", yaml.safe_dump(value["overrides"], allow_unicode=True)
    if "elsewhere" in value:
        if not NOTED.fullmatch(value["elsewhere"]):
            raise ValueError(f"{value['elsewhere']}: not a run of another sweep")
        yield NOTE, json.dumps({"run": value["elsewhere"]})
        return
    yield files.CONFIG, yaml.safe_dump(value["config"], sort_keys=False, allow_unicode=True)
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
        raise ValueError("columns of several lengths")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table, *zip(*cells, strict=True)])
    return text.getvalue()


def arrays_of(kept: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of partition.npz.

    The indices are not kept, so the numbers 0, 1, ... replace them.
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


@contextmanager
def with_kept(sweep: Path) -> Iterator[Path]:
    """Yield a temporary directory with all runs of a sweep, from run directories and kept files.

    If the sweep is in a `multirun` directory, the other sweeps are in neighbouring directories.
    Without kept files, the sweep's directory is yielded.
    """
    parent = sweep.absolute().parent
    inside = parent.name == ROOT
    folders = (
        [path for path in sorted(parent.iterdir()) if path.is_dir()]
        if inside
        else [sweep.absolute()]
    )
    if not any(next(folder.glob(f"{FOLDER}/*{SUFFIX}"), None) for folder in folders):
        yield sweep
        return
    with TemporaryDirectory(prefix="fedexp-") as temporary:
        root = Path(temporary) / (ROOT if inside else "sweep")
        for folder in folders:
            lay_out(folder, root / folder.name)
        yield root / sweep.absolute().name


def lay_out(sweep: Path, target: Path) -> None:
    """Copy the files of a sweep's runs that tables and figures need.

    A finished run directory is preferred to the kept file of the same run.
    """
    target.mkdir(parents=True)
    for path in sweep.glob("*.json"):  # has the sweep's name
        shutil.copyfile(path, target / path.name)
    for directory in sorted(
        path for path in sweep.iterdir() if path.is_dir() and path.name != FOLDER
    ):
        if (directory / ".hydra").is_dir() or (directory / files.SUMMARY).exists():
            shutil.copytree(
                directory, target / directory.name, ignore=shutil.ignore_patterns(*LEFT_OUT)
            )
    for path in sorted((sweep / FOLDER).glob(f"*{SUFFIX}")):
        directory = target / path.name.removesuffix(SUFFIX)
        if finished_summary(directory) is None:
            shutil.rmtree(directory, ignore_errors=True)
            unpack(path, directory)
