"""Check that two commits compute the same numbers, bit for bit, in float32 on this machine.

    python tools/compare_commits.py HEAD~1 HEAD
    python tools/compare_commits.py ../before . --only fedntd resume

Each side is a commit, which is checked out into a temporary worktree, or the path of a checkout.
Both run the configurations below with the packages of this Python. Then the csv files (without
times), partitions, models, checkpoints and client states of the runs are compared. Prints a line
for each configuration, and exits with code 1 if any differs. Takes about two minutes.

Where the two sides lay out their checkpoints differently, only the models are compared, and the
line says so.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

HOME = Path(__file__).resolve().parents[1]
# what differs between two equal runs, or says only how a run is stored
IGNORED = {"seconds", "train_seconds", "lengths", "checksums", "spans", "wandb_id", "format"}
IGNORED |= {"trackers"}  # which states of callbacks are trackers'
# tables that earlier commits wrote in other formats, or not at all
OTHER_TABLES = (
    *("local_class_accuracy", "personal_class_accuracy", "example_correct"),
    "classes",  # the names of the classes
)

COMMON = ["tracker=none", "hardware=cpu", "hardware.threads=1", "figures.draw=false", "rounds=3"]
COMMON += ["num_clients=6", "participation=0.5", "local.epochs=1", "local.batch_size=40"]
COMMON += ["keep_models=1", "checkpoint_interval=1"]
SEQUENTIAL = [*COMMON, "hardware.engine=sequential"]
SMALL = ["model.channels=[4]", "model.hidden=[8]"]
DIGITS = [*SEQUENTIAL, *SMALL, "dataset=digits"]
TASKS = ["scenario=class_incremental", "scenario.num_tasks=2", "rounds=2"]
SURROGATE = ["surrogate.shards=1", "surrogate.server_shards=1"]
IMAGES = ["dataset=image_folder", "dataset.augmentation.crop_padding=2", "partition=iid"]
IMAGES += ["dataset.augmentation.flip=true", "dataset.augmentation.cutout=4"]
TEXTS = ["dataset=thucnews", "dataset.vocabulary=null", "dataset.vectors=null", "min_size=2"]
TEXTS += ["model=textcnn", "model.filters=4", "model.heights=[1,2]", "model.dimension=8"]
STOPPED = "stop.minutes=0.00001"  # ends after the first round

# name -> the commands of a run; the later ones resume it
RUNS: dict[str, list[list[str]]] = {
    "fedavg": [[*DIGITS, "algorithm=fedavg", "forgetting_metric=all"]],
    "fedntd": [[*DIGITS, "algorithm=fedntd", "partition=sharding", "shards_per_client=5"]],
    "scaffold": [[*DIGITS, "algorithm=scaffold", "weighting=uniform"]],
    "flashback": [[*DIGITS, "algorithm=flashback", "public.fraction=0.1"]],
    "moon": [[*DIGITS, "algorithm=moon", "algorithm.projection=4", "server.optimizer=adam"]],
    "feddf": [[*DIGITS, "algorithm=feddf", "public.fraction=0.1", "validation.fraction=0.1"]],
    "tasks": [[*DIGITS, *TASKS, *SURROGATE, "algorithm=cfed", "surrogate.fraction=0.2"]],
    "augmented": [
        [*SEQUENTIAL, *SMALL, *IMAGES, "algorithm=fedka", "test_views=[plain,augmented]"]
    ],
    "vectorised": [
        [*COMMON, *SMALL, "dataset=digits", "algorithm=fedprox", "hardware.engine=vectorised"]
    ],
    "workers": [
        [
            *[*COMMON, *SMALL, "dataset=digits", "algorithm=ditto", "hardware.engine=workers"],
            *["hardware.workers=2", "evaluate=[global,personal]"],
        ]
    ],
    "resume": [
        [*DIGITS, "algorithm=feddyn", STOPPED],
        ["resume=DIRECTORY", "stop.minutes=null"],
    ],
    "texts": [
        [*SEQUENTIAL, *TEXTS, *TASKS, *SURROGATE, "algorithm=cfed", "surrogate.dataset=weibo"]
    ],
}

# What the process of a side does: the commands of each run directory are in jobs.json.
CHILD = """
import json, sys, traceback
from pathlib import Path
import fedexp
if not Path(fedexp.__file__).resolve().is_relative_to(sys.argv[1]):
    sys.exit(f"imports {fedexp.__file__} instead of the package in {sys.argv[1]}")
if __name__ == "__main__":
    for directory, commands in json.loads(Path("jobs.json").read_text()).items():
        try:
            for i, command in enumerate(commands):
                fedexp.run(command, *([] if i else [directory]))
        except Exception:
            Path(directory).mkdir(parents=True, exist_ok=True)
            Path(directory, "failed.txt").write_text(traceback.format_exc())
"""


@contextlib.contextmanager
def checked_out(side: str, place: Path) -> Iterator[Path]:
    """Yield the path of a checkout; a commit is checked out into `place` and removed afterwards."""
    if Path(side, "src", "fedexp").is_dir():
        yield Path(side).resolve()
        return
    git = ["git", "-C", str(HOME), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(place), side], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)


def write_data(root: Path) -> None:
    """Write small data sets: images of two classes, labelled texts of three, unlabelled texts."""
    rng = np.random.default_rng(0)
    for split, name in itertools.product(("train", "test"), "ab"):
        (root / "image_folder" / split / name).mkdir(parents=True)
        for i in range(60):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "image_folder" / split / name / f"{i}.png")
    (root / "thucnews").mkdir()
    for split in ("train", "test"):
        lines = [f"{''.join(rng.choice([*'abcdefgh'], 12))}\t{i % 3}" for i in range(120)]
        (root / "thucnews" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    (root / "thucnews" / "class.txt").write_text("a\nb\nc")
    posts = "".join(f"{''.join(rng.choice([*'abcdefgh'], 12))},,0\n" for _ in range(60))
    (root / "thucnews" / "weibo_surrogate.csv").write_text(f"article,content,target\n{posts}")


def start(checkout: Path, results: Path, data: Path, names: list[str]) -> subprocess.Popen:
    """Start the process that does the runs of a side below `results`."""
    jobs = {}
    for name in names:
        directory, (first, *later) = str(results / name), RUNS[name]
        later = [[each.replace("DIRECTORY", directory) for each in command] for command in later]
        jobs[directory] = [[*last_values(first), f"data_dir={data}"], *later]
    results.mkdir()
    (results / "side.py").write_text(CHILD)
    (results / "jobs.json").write_text(json.dumps(jobs))
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "side.py", str(checkout)]
    with open(results / "log.txt", "w") as log:
        return subprocess.Popen(command, cwd=results, env=environment, stdout=log, stderr=log)


def last_values(overrides: list[str]) -> list[str]:
    """Return the overrides with the last value of each key."""
    return [f"{k}={v}" for k, v in dict(each.split("=", 1) for each in overrides).items()]


def differences(first: Path, second: Path) -> Iterator[str]:
    """Yield a line for each difference between two run directories; (...) is only a remark."""
    for directory in (first, second):
        if (directory / "failed.txt").exists():
            yield f"{directory}: {(directory / 'failed.txt').read_text().splitlines()[-1]}"
            return
    yield from different_files(first, second, "*.csv", read_table)
    yield from different_files(first, second, "*.npz", read_arrays)
    yield from different_files(first, second, "models/*.pt", read_tensors)
    stored = [read_tensors(directory / "checkpoint" / "latest.pt") for directory in (first, second)]
    if stored[0].keys() != stored[1].keys():
        yield "(checkpoints have other keys: only the server's state compared)"
        stored = [{k: v for k, v in each.items() if k.startswith("server")} for each in stored]
    yield from different_values("checkpoint", *stored)
    yield from different_files(first, second, "checkpoint/clients/*", read_tensors)


def different_files(first: Path, second: Path, pattern: str, read: Any) -> Iterator[str]:
    names = [{str(p.relative_to(d)) for p in d.glob(pattern)} for d in (first, second)]
    for name in sorted(names[0] | names[1]):
        if name.startswith(OTHER_TABLES) and name not in names[0] & names[1]:
            yield f"({name}: not in both)"
        elif name not in names[0] & names[1]:
            yield f"{name}: only in {(first if name in names[0] else second).parent.name}"
        else:
            yield from different_values(name, read(first / name), read(second / name))


def different_values(name: str, first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    different = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    if different:
        yield f"{name}: {', '.join(different[:4])}{', ...' if len(different) > 4 else ''}"


def read_table(path: Path) -> dict[str, list[str]]:
    """Return the columns of a csv file as text, without those that depend on the clock."""
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    columns = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    clock = ("seconds", "_per_second")
    return {name: column for name, column in columns.items() if not name.endswith(clock)}


def read_arrays(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return {key: (file[key].shape, file[key].tolist()) for key in file}


def read_tensors(path: Path) -> dict[str, Any]:
    """Return every value in a file of torch.save by its path, tensors as type, shape and bytes."""
    return dict(leaves(torch.load(path, weights_only=True, map_location="cpu")))


def leaves(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in IGNORED:
                yield from leaves(value, f"{place}.{key}" if place else str(key))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from leaves(value, f"{place}[{i}]")
    elif isinstance(node, torch.Tensor):
        flat = node.reshape(-1).clone(memory_format=torch.contiguous_format)
        yield place, (node.dtype, tuple(node.shape), flat.view(torch.uint8).numpy().tobytes())
    else:
        yield place, repr(node)  # nan equals nan


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("sides", nargs=2, metavar="SIDE", help="a commit or a checkout's path")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = Path(folder).resolve()
        write_data(place / "data")
        results = [place / "first", place / "second"]
        processes = []
        for side, result in zip(given.sides, results, strict=True):
            checkout = stack.enter_context(checked_out(side, place / f"{result.name}_checkout"))
            processes.append(start(checkout, result, place / "data", given.only))
        for process, result in zip(processes, results, strict=True):
            if process.wait():
                sys.exit((result / "log.txt").read_text())
        different = 0
        for name in given.only:
            found = list(differences(*(result / name for result in results)))
            wrong = [line for line in found if not line.startswith("(")]
            different += bool(wrong)
            found.sort(key=lambda line: line.startswith("("))  # remarks at the end
            shown = found[:2] + [f"and in {len(found) - 2} more"] * (len(found) > 2)
            print(f"{name:12}", "; ".join(["DIFFERS" if wrong else "equal", *shown]), flush=True)
    print(f"{different} of {len(given.only)} configurations differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
