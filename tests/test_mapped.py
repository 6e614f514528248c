"""Image data sets that stay on disk: the same results as in memory, and little memory."""

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedexp.config.build import build
from fedexp.core.errors import ConfigError
from fedexp.data import datasets
from fedexp.data.cache import CACHE
from fedexp.data.image_files import Form, to_array
from fedexp.data.mapped import Chosen, ImageFile, join
from fedexp.rundir import files
from fedexp.training.job import Job
from fedexp.training.run import train_run
from toy_federation import composed

CLASSES = ("ant", "bee", "cat", "dog")
RUN = ["num_clients=4", "participation=0.5", "local.epochs=1", "local.batch_size=5", "rounds=2"]
RUN += ["partition=iid", "model.channels=[4]", "model.hidden=[8]", "tracker=none"]
RUN += ["hardware=cpu", "hardware.threads=1", "figures.draw=false"]
CROP = [f"dataset.augmentation.{text}" for text in ("size=12", "test_size=14")]
TASKS = ["scenario=class_incremental", "scenario.num_tasks=2", "scenario.split=null"]


def write_images(root: Path, train: int = 10, test: int = 5, sides: tuple[int, int] = (20, 16)):
    """Write coloured noise, a different colour in each class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for number, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (*sides, 3)) + 30 * number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")


@pytest.fixture
def photos(tmp_path) -> list[str]:
    write_images(tmp_path / "photos")
    root = f"dataset.root='{tmp_path / 'photos'}'"
    size = ["dataset.size=16", "dataset.counts=null", *CROP]
    return ["dataset=imagenet_r", root, f"data_dir='{tmp_path}'", *size]


def outcome(directory: Path, *overrides: str) -> dict[str, bytes]:
    """Train a run, and return its accuracies and its weights."""
    given = [*RUN, *overrides]
    names = ("dataset", "scenario", "partition", "model", "algorithm", "forgetting_metric")
    choices = dict.fromkeys((*names, "analysis", "hardware", "tracker"), "x")
    train_run(Job(composed(*given), directory, given, choices, None))
    state = torch.load(directory / files.CHECKPOINT, weights_only=True)
    found = {name: value.numpy().tobytes() for name, value in state["server"]["params"].items()}
    return found | {"accuracy": (directory / "class_accuracy.csv").read_bytes()}


@pytest.mark.parametrize(
    ("engine", "tasks", "algorithm"),
    [
        ("sequential", [], "fedavg"),
        ("vectorised", TASKS, "fedewc"),  # reads images under vmap
        pytest.param("workers", TASKS, "fedavg", marks=pytest.mark.slow),
        pytest.param("sequential", TASKS, "fedewc", marks=pytest.mark.slow),
    ],
)
def test_runs_on_mapped_images_equal_runs_in_memory(
    photos, tmp_path, monkeypatch, engine, tasks, algorithm
):
    workers = ["hardware.workers=2"] if engine == "workers" else []
    run = [*photos, *tasks, f"algorithm={algorithm}", f"hardware.engine={engine}", *workers]
    memory = outcome(tmp_path / "memory", *run)
    monkeypatch.setattr(datasets, "MOST_BYTES", 0)
    disk = outcome(tmp_path / "disk", *run)
    (stored,) = (tmp_path / CACHE).glob("*.u8")
    assert stored.stat().st_size == 60 * 16 * 16 * 3 + 4  # with the checksum
    assert disk.keys() == memory.keys()
    for key, value in memory.items():
        assert disk[key] == value, key


def test_images_are_stored_in_pieces_once_and_again_if_they_change(
    photos, tmp_path, monkeypatch, caplog
):
    data = build(composed(*photos)).dataset.load()
    monkeypatch.setattr(datasets, "MOST_BYTES", 60 * 16 * 16 * 3 - 1)
    monkeypatch.setattr(datasets, "PIECE", 7)
    caplog.set_level(logging.INFO, "fedexp")
    for _ in range(2):
        stored = build(composed(*photos)).dataset.load()
        assert isinstance(stored.x_train, Chosen)
        assert torch.equal(stored.x_train.read(torch.arange(40)), data.x_train)
        assert torch.equal(torch.cat([*stored.x_test.split(6)]), data.x_test)
    assert len([line for line in caplog.messages if "this is done only once" in line]) == 10
    Image.new("RGB", (16, 16)).save(tmp_path / "photos/train/ant/0.png")
    changed = build(composed(*photos)).dataset.load()
    assert changed.x_train.read(torch.tensor([0])).sum() == 0
    assert torch.equal(stored.x_train.read(torch.arange(40)), data.x_train), "it may be in use"
    assert len([line for line in caplog.messages if "remove this file if no run" in line]) == 1
    for path in (tmp_path / CACHE).glob("*.u8"):
        path.write_bytes(bytes(path.stat().st_size))  # damaged
    again = build(composed(*photos)).dataset.load()
    assert torch.equal(again.x_train.read(torch.arange(1, 40)), data.x_train[1:])
    assert "is damaged" in caplog.text


def test_roots_and_splits_have_separate_files_of_images(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "MOST_BYTES", 0)
    write_images(tmp_path / "other")
    first = build(composed(*photos)).dataset.load()
    other = [*photos, f"dataset.root='{tmp_path / 'other'}'"]
    build(composed(*other)).dataset.load()
    drawn = [f"dataset.root='{tmp_path / 'other/train'}'", "dataset.test_fraction=0.5"]
    for seed in (0, 1):
        build(composed(*photos, *drawn, f"dataset.split_seed={seed}")).dataset.load()
    names = {path.name[:20] for path in (tmp_path / CACHE).glob("*.u8")}
    assert len(names) == 4, "the first parts of their names differ, so none is outdated"
    assert first.x_train.read(torch.arange(40)).any()


def make_parts(tmp_path: Path) -> tuple[torch.Tensor, Chosen]:
    """Return images in memory, and the same images as two files and a tensor."""
    images = torch.randint(0, 256, (12, 3, 4, 2)).to(torch.uint8)
    parts = []
    for i, (start, stop) in enumerate([(0, 5), (5, 6)]):
        (tmp_path / f"{i}").write_bytes(images[start:stop].numpy().tobytes())
        parts.append(Chosen.all_of(ImageFile(str(tmp_path / f"{i}"), (stop - start, 3, 4, 2))))
    joined = join([*parts, images[6:]])
    assert isinstance(joined, Chosen)
    return images, joined


def test_indexing_and_concatenation_equal_those_of_tensors(tmp_path):
    images, stored = make_parts(tmp_path)
    assert stored.shape == images.shape
    for index in (torch.tensor([11, 0, 5, 5]), torch.arange(12) % 2 == 0, slice(3, 8)):
        assert torch.equal(stored[index].read(stored[index].rows), images[index])
        again = join([stored[index], stored])
        expected = torch.cat([images[index], images])
        assert torch.equal(torch.cat([*again.split(5)]), expected)
    assert torch.equal(join([images, images]), torch.cat([images, images]))


def test_batches_are_read_under_vmap(tmp_path):
    images, stored = make_parts(tmp_path)
    stored, index = stored[torch.arange(11, -1, -1)], torch.randint(0, 12, (2, 3, 4))

    def taken(index: torch.Tensor) -> torch.Tensor:
        pixels, positions = stored.fetch(index)
        return pixels[positions]

    expected = images.flip(0)[index]
    assert torch.equal(taken(index), expected)
    assert torch.equal(torch.func.vmap(taken)(index), expected)
    assert torch.equal(torch.func.vmap(taken, in_dims=1, out_dims=1)(index), expected)


def test_missing_file_is_reported(tmp_path):
    stored = Chosen.all_of(ImageFile(str(tmp_path / "gone"), (4, 2, 2, 1)))
    with pytest.raises(ConfigError, match=r"gone: this file of decoded images cannot be read"):
        stored.read(torch.tensor([1]))


def test_a_run_needs_less_memory_than_its_images(tmp_path):
    """128 MiB of images are divided into tasks, sent to a rank and read in batches.

    The memory of the process may grow by 60 MiB; a batch has 8 MiB in float32.
    """
    program = f"""
import resource
import numpy as np, torch
from fedexp.data.mapped import Chosen, ImageFile
from fedexp.data.tasks import assemble, pool_examples
from fedexp.data.types import ImageData
from fedexp.engine.ranks.objects import pack

n, labels = {2**27 // (512 * 512)}, ("a", "b")
path = {str(tmp_path / "images")!r}
with open(path, "wb") as file:
    file.truncate(n * 512 * 512)
x = Chosen.all_of(ImageFile(path, (n, 512, 512, 1)))
y = torch.arange(n) % 2
half = n // 2
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
start = peak()
data = ImageData("x", x[:half], y[:half], x[half:], y[half:], labels, (0.5,), (0.5,))
x, y, test = pool_examples([data], data)
parts = [(np.flatnonzero((y == c) & ~test), np.flatnonzero((y == c) & test)) for c in (0, 1)]
data = assemble(data, x, y, parts, labels, [[0], [1]]).data
packed = pack(data)
sent = len(packed.text) + sum(tensor.nbytes for tensor in packed.tensors)
for index in torch.randperm(half).split(8):
    batch = data.inputs(data.x_train, index, None, None, torch.float32)
print(sent, peak() - start, tuple(batch.shape[1:]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    sent, growth, *shape = done.stdout.split(maxsplit=2)
    assert shape == ["(1, 512, 512)\n"]
    assert int(sent) < 1e6
    assert float(growth) < 60  # MiB


def test_central_crop_keeps_the_aspect_ratio():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    found = to_array(image, Form(3, 10, "bicubic", keep_ratio=True))
    centre = np.asarray(image.crop((5, 0, 25, 20)).resize((10, 10), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(found[2:-2, 2:-2], centre[2:-2, 2:-2])  # inside, all taps exist
    stretched = to_array(image, Form(3, 10, "bicubic"))
    whole = np.asarray(image.resize((10, 10), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(stretched, whole)


def test_wrong_number_of_images_is_rejected(photos):
    assert build(composed(*photos, "dataset.counts=[40,20,4]")).dataset.load().num_classes == 4
    with pytest.raises(ConfigError, match="40 training images, 20 test images and 4 classes, but"):
        build(composed(*photos, "dataset.counts=[41,20,4]")).dataset.load()


# --- DomainNet


@pytest.fixture
def domains(tmp_path) -> Path:
    """Three domains with two classes; domain d has 2 + d training images and one test image."""
    root = tmp_path / "domainnet"
    for number, domain in enumerate(("clipart", "real", "sketch")):
        lists: dict[str, list[str]] = {"train": [], "test": []}
        for label, name in enumerate(("axe", "bus")):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for i in range(3 + number):
                Image.new("RGB", (9, 9), (50 * number, 100 * label, i)).save(folder / f"{i}.png")
                split = "test" if i == 0 else "train"
                lists[split].append(f"{domain}/{name}/{i}.png {label}\n")
        for split, lines in lists.items():
            (root / f"{domain}_{split}.txt").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize("most", [2**31, 0])
def test_domains_can_set_options_of_their_data_set(domains, monkeypatch, most):
    monkeypatch.setattr(datasets, "MOST_BYTES", most)
    others = "{domainnet:{domain:real}},{domainnet:{domain:sketch}}"
    built = build(
        composed(
            *("dataset=domainnet", "dataset.size=8", f"data_dir='{domains}'"),
            *("scenario=domain_incremental", "scenario.split=null"),
            f"scenario.domains=[{others.replace('}}', ',size:8}}')}]",
        )
    )
    found = built.scenario.sequence(built.dataset, np.random.default_rng(0))
    assert [task.name for task in found.tasks] == [
        "domainnet_clipart",
        "domainnet_real",
        "domainnet_sketch",
    ]
    assert [len(task.train) for task in found.tasks] == [4, 6, 8]
    assert found.data.classes == ("axe", "bus")
    x = found.data.x_train
    pixels = x.read(x.rows) if isinstance(x, Chosen) else x
    colours = pixels[:, 4, 4].tolist()
    assert colours[:4] == [[0, 0, 1], [0, 0, 2], [0, 100, 1], [0, 100, 2]]
    assert colours[-1] == [100, 100, 4]
    assert found.data.y_train[:4].tolist() == [0, 0, 1, 1]
    entries = [*(domains / CACHE).glob("domainnet_*")]
    assert len(entries) == 3, "domains do not replace each other"


def test_missing_image_of_a_list_is_reported(domains):
    (domains / "domainnet/clipart/axe/1.png").unlink()
    with pytest.raises(ConfigError, match=r"axe/1.png: cannot be read"):
        build(composed("dataset=domainnet", f"data_dir='{domains}'")).dataset.load()
