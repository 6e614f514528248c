"""Golden values: what runs of the public command compute, equal to the numbers in golden/runs.json.

If a change alters them, it changes what users measure. Every run starts `fedexp.run` and is read
from its run directory by `outcome`, so only that function knows the files' formats. Besides, these
tests import the base classes of one's own models (drawn_models.py, toy_models.py) and core/rng.py.

Runs are in float64, from initial weights that are equal on every CPU. Still, other CPUs sum in
another order, so the last digits differ: numbers are compared to 1e-9 of their size. Weights that
PyTorch draws in float32 differ by 1e-7 between CPUs: the initial weights of fedexp's own models,
and what DRAWN_BY_TORCH lists, are compared to 1e-6. What numpy draws is equal everywhere, and is
compared by hash. (ATEN_CPU_CAPABILITY=default makes PyTorch compute as on a CPU without AVX2.)

`python tests/test_golden.py --write` renews all values, and `--write NAME ...` those of some runs;
explain why in the changelog.
"""

import csv
import hashlib
import itertools
import json
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedexp
from drawn_models import Recorded
from fedexp.config.options import conf_directories, list_options
from fedexp.core.rng import generator_for, torch_seed

GOLDEN = Path(__file__).parent / "golden" / "runs.json"

# --- the runs

MACHINE = ["tracker=none", "hardware=cpu", "hardware.engine=sequential", "hardware.threads=1"]
MACHINE += ["hardware.precision=fp64", "figures.draw=false"]
COMMON = [*MACHINE, "num_clients=6", "participation=0.5", "rounds=3", "local.epochs=1"]
COMMON += ["local.batch_size=60", "keep_models=1"]
DIGITS = [*COMMON, "dataset=digits", "model=drawn_cnn"]
TASKS = [*DIGITS, "scenario=class_incremental", "scenario.num_tasks=2", "rounds=2"]
STREAM = [*TASKS, "scenario=class_stream"]
SURROGATE = [*TASKS, "surrogate.fraction=0.2", "surrogate.shards=1", "surrogate.server_shards=1"]
PUBLIC = [*DIGITS, "public.fraction=0.1"]
PERSONAL = [*DIGITS, "evaluate=[global,personal]"]
ALONE = ["num_clients=1", "participation=1", "partition=iid"]
PROMPTS = [*TASKS, "model=drawn_transformer"]
TEXTS = [*COMMON, "dataset=thucnews", "model=drawn_textcnn", "dataset.vocabulary=null"]
TEXTS += ["dataset.vectors=null", "local.optimizer=adam", "min_size=2"]
GENERATED = ["algorithm.batches=2", "algorithm.batch_size=8", "algorithm.steps=2"]
GENERATED += ["algorithm.width=4"]

# option of conf/algorithm -> the rest of its command, if it is not DIGITS
ALGORITHMS: dict[str, list[str]] = {
    "afcl": [*TASKS, "rounds=1", "participation=1"],
    "ccvr": [*DIGITS, "algorithm.samples=8", "algorithm.epochs_on_server=2"],
    "cfed": [*SURROGATE, "algorithm.server_distillation=true"],
    "cfed_c": [*SURROGATE, *ALONE],
    "codaprompt": [*PROMPTS, "algorithm.layers=[0,1]", "algorithm.components=6"],
    "ditto": PERSONAL,
    "dmc": [*SURROGATE, *ALONE],
    "dualprompt": [
        *PROMPTS,
        "algorithm.general_layers=[0]",
        "algorithm.general_length=2",
        "algorithm.task_layers=[1]",
        "algorithm.task_length=2",
    ],
    "ewc": [*TASKS, *ALONE, "algorithm.lambda_=10"],
    "fedala": [*PERSONAL, "algorithm.max_passes=3"],
    "fedbn": [*PERSONAL, "model.batch_norm=true"],
    "fedcbdr": [*TASKS, "algorithm.samples=40"],
    "feddf": PUBLIC,
    "feddmc": SURROGATE,
    "feddmc_full": SURROGATE,
    "fedewc": [*TASKS, "algorithm.lambda_=10"],
    "fedfomo": [*PERSONAL, "algorithm.models=2"],
    "fedka": [*DIGITS, "algorithm.beta=0.01"],
    "fedkd": [*DIGITS, "algorithm.tau=2"],
    "fedlwf": TASKS,
    "fedmultihead": TASKS,
    "fedntd": [*DIGITS, "algorithm.tau=2"],
    "fedpac": PERSONAL,
    "fedproj": [*PUBLIC, "algorithm.lr=0.001", "algorithm.memory_batch=64"],
    "fedproto": PERSONAL,
    "fedprox": [*DIGITS, "algorithm.mu=1"],
    "fedreg": [*DIGITS, "algorithm.ascent=2", "weighting=uniform"],
    "fedrep": [*PERSONAL, "algorithm.head_epochs=2"],
    "fedrod": PERSONAL,
    "fedsmoo": [*DIGITS, "local.momentum=0"],
    "fedspeed": [*DIGITS, "local.momentum=0"],
    "fedssd": PUBLIC,
    "finetuning": [*TASKS, *ALONE],
    "flashback": PUBLIC,
    "glfc": [*TASKS, "algorithm.memory=20"],
    "l2p": [*PROMPTS, "algorithm.pool=4", "algorithm.selected=2", "algorithm.length=2"],
    "local_only": PERSONAL,
    "lorm": [*TASKS, "model=drawn_adapted"],
    "lwf": [*TASKS, *ALONE],
    "mfcl": [*TASKS, *GENERATED],
    "multihead": [*TASKS, *ALONE],
    "pilora": [*TASKS, "model=drawn_adapted"],
    "target": [*TASKS, *GENERATED],
}

# name -> all overrides; after the options, further commands
RUNS = {
    name: [f"algorithm={name}", *ALGORITHMS.get(name, DIGITS)]
    for name in list_options("algorithm", conf_directories())
}
RUNS |= {
    "fedntd mse": [
        *DIGITS,
        "algorithm=fedntd",
        "algorithm.distance=mse",
        "algorithm.beta=0.01",
    ],
    "moon projection": [*RUNS["moon"], "algorithm.projection=4"],
    "fednova ccvr": [*RUNS["fednova"], "algorithm.variant=ccvr"],
    "scaffold steps": [*RUNS["scaffold"], "algorithm.divisor=steps", "local.momentum=0"],
    # texts, dropout, a second data set, and unlabelled texts
    "texts": [
        *[*TEXTS, "algorithm=cfed", "scenario=domain_incremental", "rounds=2"],
        *["scenario.domains=[sina2019]", "surrogate.dataset=weibo", "model.dropout=0.5"],
    ],
    # tasks
    "rotations": [*DIGITS, "scenario=rotations", "rounds=2"],
    "shuffled tasks": [*STREAM, "scenario.shuffle_classes=true", "scenario.blur=0.2", "seed=1"],
    "own orders": [*STREAM, "scenario.order=per_client", "scenario.replay=5"],
    # local training and server
    "adam, cosine": [
        *[*DIGITS, "local.optimizer=adam", "local.schedule=cosine", "local.warmup=1"],
        *["local.lr=0.01", "server.optimizer=yogi", "weighting=uniform"],
    ],
    "nesterov, steps": [
        *[*DIGITS, "local.optimizer=nesterov", "local.schedule=step", "local.step_rounds=2"],
        *["server.optimizer=sgd", "server.lr=0.5", "server.momentum=0.9"],
    ],
    # changes of the data within a run, and every metric
    "schedule": [
        *[*DIGITS, "schedule.partition={2: {name: iid}}", "schedule.classes={3: {3: 0.1}}"],
        *["forgetting_metric=all", "keep_local_models=[2]"],
    ],
}

# What no kind of hook needs in addition to the other runs is slow.
SLOW = {"afcl", "ccvr", "cfed_c", "dmc", "dualprompt", "codaprompt", "ewc", "feddecorr", "feddf"}
SLOW |= {"feddmc", "feddmc_full", "fedexp_step", "fedkd", "fedlc", "fedlmd", "fedproj", "fedproto"}
SLOW |= {"fedrod", "fedrs", "fedsam", "fedsmoo", "fedspeed", "fedssd", "fedvls"}
SLOW |= {"finetuning", "glfc", "lwf"}
SLOW |= {"mfcl", "multihead", "pilora", "regmean", "fedntd mse", "fednova ccvr", "scaffold steps"}
SLOW |= {"moon projection", "own orders", "rotations", "nesterov, steps"}

# These algorithms draw weights by PyTorch, see above.
DRAWN_BY_TORCH = {"codaprompt", "moon projection", "pilora"}

LINEAR = [*MACHINE, "dataset=digits", "model=recorded", "local.epochs=1", "local.batch_size=100"]
SETS = {
    "iid": ["partition=iid"],
    "lda": ["partition=lda", "alpha=0.3"],
    "lda of the released code": ["partition=lda", "alpha=0.3", "partition.numpy_seed=19940817"],
    "sharding": ["partition=sharding"],
    "equal_shards": ["partition=equal_shards", "sort_by_label=true"],
    "public": ["partition=iid", "public.fraction=0.1"],
    "public at random": ["partition=iid", "public.fraction=0.1", "public.balanced=false"],
    "validation": ["partition=iid", "validation.fraction=0.1"],
    "validation per client": ["validation.fraction=0.1", "validation.per_client=true"],
    "surrogate": ["surrogate.fraction=0.1", "surrogate.shards=1", "surrogate.server_shards=1"],
}
COHORTS = ("seed", "round")  # values of cohorts.draw
AUGMENTED = [f"dataset.augmentation.{each}" for each in ("crop_padding=1", "flip=true", "cutout=2")]
VIEWS = [*LINEAR, *AUGMENTED, "test_views=[plain,augmented]", "rounds=1", "num_clients=6"]

# option of conf/model -> how it becomes small enough for a test
MODELS = {
    "cnn": [],
    "cnn_3fc": [],
    "cnn_circle": [],
    "resnet10": ["model.widths=[8,8,16,16]"],
    "resnet18": [],
    "resnet50": [],
    "resnet56_bottleneck": ["model.widths=[8,8,16]", "model.blocks=1"],
    "t_cnn": [],
    "textcnn": [],
    "torchvision": ["model.name=mobilenet_v3_small"],
}
SLOW_MODELS = {"cnn_3fc", "cnn_circle", "resnet18", "resnet50", "torchvision"}
# timm is not in the extra dev; networks with adapters are those of torchvision and timm
UNDRAWN_MODELS = {"timm", "timm_lora", "torchvision_lora"}


# --- reading a run directory: the only place that knows its files


def outcome(directory: Path) -> dict[str, Any]:
    """Return what a run computed, without times: its tables, partitions and last global model."""
    found: dict[str, Any] = {
        name: columns(directory / f"{name}.csv")
        for name in ("rounds", "clients", "tasks")
        if (directory / f"{name}.csv").exists()
    }
    matrix = columns(directory / "class_accuracy.csv")
    found["classes"] = [
        " ".join("-" if v is None else f"{1000 * v:.0f}" for r, v in rows)
        for rows in grouped(zip(matrix["round"], matrix["accuracy"], strict=True))
    ]
    for path in sorted(directory.glob("partition*.npz")):
        found[path.stem] = sets(path)
    found["model"] = {name: measured(name, v) for name, v in sorted(model(directory).items())}
    return found


def columns(path: Path) -> dict[str, list[float | int | str | None]]:
    """Return the columns of a csv file, without those that depend on the clock."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if not name.endswith(("seconds", "_per_second"))]
    return {name: [number(row[name]) for row in rows] for name in names}


def sets(path: Path) -> dict[str, str]:
    """Return the hashes of the examples of the clients and of the other sets of a partition."""
    with np.load(path, allow_pickle=False) as file:
        parts = [file[name] for name in ("sizes", "indices")]
        found = {"clients": digest(*parts)}
        for name in ("public", "validation"):
            if name in file and len(file[name]):
                found[name] = digest(file[name])
    return found


def model(directory: Path, number: int | None = None) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the global model after a round, or after the last."""
    files = {int(path.stem[6:]): path for path in directory.glob("models/round_*[0-9].pt")
             if "client" not in path.stem}  # fmt: skip
    saved = torch.load(files[max(files) if number is None else number], weights_only=True)
    return saved["params"] | saved["buffers"]


def cohorts(directory: Path) -> list[list[int]]:
    table = columns(directory / "clients.csv")
    pairs = zip(table["round"], table["client"], strict=True)
    return [[int(client) for _, client in rows] for rows in grouped(pairs)]


# --- comparing


def number(text: str) -> float | int | str | None:
    """Return what a cell of a csv file holds; None if it is empty or not a number."""
    if text.lstrip("-").isdigit():
        return int(text)
    try:
        value = float(text or "nan")
    except ValueError:
        return text
    return float(f"{value:.12g}") if math.isfinite(value) else None


def grouped(pairs: Any) -> list[list[Any]]:
    """Return consecutive pairs with the same first value as lists."""
    return [list(rows) for _, rows in itertools.groupby(pairs, key=lambda pair: pair[0])]


def digest(*arrays: Any) -> str:
    joined = b"".join(np.asarray(array).astype("<i8").tobytes() for array in arrays)
    return hashlib.sha256(joined).hexdigest()[:12]


def measured(name: str, values: torch.Tensor) -> list[float]:
    """Return the norm of a tensor, and its projection on a direction that belongs to its name."""
    flat = values.double().flatten().numpy()
    direction = np.random.default_rng(zlib.crc32(name.encode())).random(flat.size) - 0.5
    return [float(f"{v:.12g}") for v in (np.sqrt(flat @ flat), flat @ direction)]


def differences(actual: Any, expected: Any, tolerance: float, place: str = "") -> Iterator[str]:
    """Yield a line for each value that differs. What is only in `actual` does not count."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key, value in expected.items():
            yield from differences(actual.get(key), value, tolerance, f"{place}{key} ")
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            yield from differences(*pair, tolerance, f"{place}[{i}] ")
    elif isinstance(expected, float) and isinstance(actual, float | int):
        if abs(actual - expected) > tolerance * max(abs(expected), 0.1):
            yield f"{place}is {actual!r}, expected {expected!r}"
    elif actual != expected:
        yield f"{place}is {actual!r}, expected {expected!r}"


def check(name: str, actual: Any, tolerance: float = 1e-9) -> None:
    """Fail with the first values that differ from the golden ones."""
    found = list(differences(actual, golden()[name], tolerance))
    assert not found, f"{name}: {len(found)} values differ\n" + "\n".join(found[:20])


@cache
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


# --- running

OWN = {
    "drawn_cnn": ("drawn_models.DrawnCNN", "channels: [4]\nkernel: 5\npadding: 2\nhidden: [8]\n"),
    "drawn_textcnn": (
        "drawn_models.DrawnTextCNN",
        "filters: 4\nheights: [1, 2]\nhidden: 6\ndropout: 0.1\ndimension: 8\n",
    ),
    "drawn_adapted": (
        "toy_models.DrawnAdapted",
        "lora: {_target_: fedexp_continual.models.lora.LoRA, rank: 2}\n",
    ),
    "drawn_transformer": ("toy_models.DrawnTransformer", ""),
    "recorded": ("drawn_models.Recorded", ""),
}
OWN_KEYS = {
    "drawn_cnn": "unit_features: null\nbatch_norm: false\n",
    "drawn_adapted": "head: '2'\nfreeze: []\n",
    "drawn_transformer": "head: head\nfreeze: []\n",
    "recorded": "head: fc\nfreeze: []\n",
}


def write_inputs(root: Path) -> None:
    """Write the options of the models, and small data sets of texts and of images."""
    folder = root / "conf" / "model"
    folder.mkdir(parents=True)
    for name, (cls, keys) in OWN.items():
        text = f"# {cls}.\n_target_: {cls}\n{keys}{OWN_KEYS.get(name, '')}"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    rng = np.random.default_rng(0)
    for source in ("thucnews", "sina2019"):
        (root / source).mkdir()
        for split, count in (("train", 40), ("test", 10)):
            lines = []
            for i in range(count * 3):
                letters = rng.integers(0, 8, 12) + 5 * (i % 3)
                lines.append("".join(chr(97 + c) for c in letters) + f"\t{i % 3}")
            (root / source / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (root / source / "class.txt").write_text("a\nb\nc", encoding="utf-8")
    posts = ["".join(chr(97 + c) for c in rng.integers(0, 18, 12)) for _ in range(60)]
    rows = "".join(f"{post},,0\n" for post in posts)
    (root / "thucnews" / "weibo_surrogate.csv").write_text(f"article,content,target\n{rows}")
    for split, name in itertools.product(("train", "test"), "ab"):
        (root / "image_folder" / split / name).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "image_folder" / split / name / f"{i}.png")


def run(root: Path, *overrides: str) -> Path:
    """Run a command on the inputs in `root`, and return its run directory."""
    directory = root / "run"
    last: dict[str, str] = {}  # the last value of each key
    for override in (*overrides, f"data_dir={root}"):
        key, _, value = override.partition("=")
        last[key] = value
    given = [f"{key}={value}" for key, value in last.items()]
    fedexp.run(given, directory, config_dir=root / "conf", overwrite=True)
    return directory


def run_outcome(root: Path, name: str) -> dict[str, Any]:
    return outcome(run(root, *RUNS[name]))


def set_outcome(root: Path, name: str, seed: int) -> dict[str, str]:
    """Return the hashes of a partition and the other sets."""
    small = [*LINEAR, "num_clients=10", "participation=0.1", "rounds=1", *SETS[name]]
    return sets(run(root, *small, f"seed={seed}") / "partition.npz")


def cohort_outcome(root: Path, name: str, seed: int) -> str:
    """Return the hash of 200 cohorts."""
    long = [*LINEAR, "num_clients=20", "participation=0.1", "rounds=200", "eval_interval=200"]
    long += ["partition=iid", "checkpoint_interval=200", f"cohorts.draw={name}", f"seed={seed}"]
    drawn = cohorts(run(root, *long))
    assert [len(cohort) for cohort in drawn] == [2] * 200
    return digest(*drawn)


def view_outcome(root: Path) -> dict[str, Any]:
    """Return the hashes of the pixels of the first three batches, and of the test images without
    and with augmentation."""
    Recorded.seen.clear()
    run(root, *VIEWS)
    batches = [x for training, x in Recorded.seen if training and len(x) > 2]
    tested = torch.cat([x for training, x in Recorded.seen if not training and len(x) > 2])
    Recorded.seen.clear()
    size = 360
    mean, std = 0.3054, 0.3761  # of digits; 10000 times a pixel (k / 16) or a mean is an integer
    found = [((x * std + mean) * 10000).round() for x in (*batches[:3], *tested.split(size)[:2])]
    assert not torch.equal(*found[-2:])
    return dict(zip(["1", "2", "3", "plain", "augmented"], map(digest, found), strict=True))


def initial_outcome(root: Path, name: str) -> dict[str, Any]:
    """Return the initial weights of one of fedexp's models: the norm, and a projection."""
    given = [*MACHINE, "num_clients=2", "participation=0.5", "rounds=1", "local.epochs=1"]
    given += ["local.batch_size=8", "keep_local_models=[1]"]
    images = ["dataset=image_folder", "partition=iid", f"dataset.root={root}/image_folder"]
    data = [each for each in TEXTS if "dataset" in each] if name == "textcnn" else images
    first = model(run(root, *given, *data, f"model={name}", *MODELS[name]), 0)
    return {"all": measured(name, torch.cat([v.double().flatten() for v in first.values()]))}


def stream_outcome() -> dict[str, list[int]]:
    keys: tuple[tuple[int, ...], ...] = ((), (3,), (3, 7))
    return {
        f"{purpose} {seed}": [
            int(draw(seed, purpose, *key))
            for key in keys
            for draw in (lambda *a: generator_for(*a).integers(2**62), torch_seed)
        ]
        for purpose in ("partition", "cohort", "batches", "initial model")
        for seed in (0, 1)
    }


# --- the tests


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden")
    write_inputs(path)
    return path


def over(names: Any, slow: Any = ()) -> pytest.MarkDecorator:
    params = [pytest.param(n, marks=pytest.mark.slow if n in slow else ()) for n in names]
    return pytest.mark.parametrize("name", params)


@over(RUNS, SLOW)
def test_run_equals_golden_values(name, root):
    check(name, run_outcome(root, name), 1e-6 if name in DRAWN_BY_TORCH else 1e-9)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@over(SETS)
def test_partition_equals_golden_hash(name, seed, root):
    check(f"sets: {name} {seed}", set_outcome(root, name, seed))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@over(COHORTS, {"round"})
def test_cohorts_equal_golden_hashes(name, seed, root):
    check(f"cohorts: {name} {seed}", cohort_outcome(root, name, seed))


def test_batches_and_test_images_equal_golden_hashes(root):
    check("pixels", view_outcome(root))


@over(MODELS, SLOW_MODELS)
def test_initial_weights_equal_golden_values(name, root):
    check(f"initial: {name}", initial_outcome(root, name), tolerance=1e-6)


def test_random_streams_equal_golden_numbers():
    check("streams", stream_outcome())


def test_every_option_has_a_golden_run():
    missing = ", ".join(repr(name) for name in RUNS if name not in golden())
    assert not missing, f"run `python tests/test_golden.py --write {missing}`"
    assert ALGORITHMS.keys() <= RUNS.keys()
    assert sorted({*MODELS, *UNDRAWN_MODELS}) == list_options("model", conf_directories())


def test_golden_runs_differ():
    """Every run has its own results, and trained to its last round without nan."""
    found = [golden()[name] for name in RUNS]
    assert len({json.dumps([run["model"], run["rounds"]]) for run in found}) == len(found)
    for run in found:
        assert None not in (run["rounds"]["test_loss"] + run["clients"]["train_loss"])


def every_outcome(root: Path) -> dict[str, Callable[[], Any]]:
    """Return functions that compute the golden values, by their names."""
    found: dict[str, Callable[[], Any]] = {n: partial(run_outcome, root, n) for n in RUNS}
    for seed in (0, 1):
        sets_of, cohorts_of = (partial(f, root, seed=seed) for f in (set_outcome, cohort_outcome))
        found |= {f"sets: {n} {seed}": partial(sets_of, n) for n in SETS}
        found |= {f"cohorts: {n} {seed}": partial(cohorts_of, n) for n in COHORTS}
    found |= {f"initial: {n}": partial(initial_outcome, root, n) for n in MODELS}
    return found | {"pixels": partial(view_outcome, root), "streams": stream_outcome}


def write(*names: str) -> None:
    found = {**golden()} if names else {}
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        every = every_outcome(Path(folder))
        for name in names or every:
            found[name] = every[name]()
    lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in every]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    assert sys.argv[1:2] == ["--write"], "usage: python tests/test_golden.py --write [NAME ...]"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    write(*sys.argv[2:])
