"""Small federations, and comparing run directories."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from fedexp.config.options import MULTIPLE
from fedexp.rundir import files
from fedexp.rundir.checkpoint import ClientStates

SOURCE = Path(__file__).resolve().parents[2] / "src"
# A federation that trains a round in a tenth of a second; and with a small model, in less.
FEDERATION = ("num_clients=8", "participation=0.5", "local.epochs=1", "min_size=2", "figures=false")
FEDERATION = (
    *FEDERATION,
    "hardware=cpu",
    "hardware.engine=sequential",
    "hardware.threads=1",
    "checkpoint_interval=1",
)
# three steps a client
SMALL = (*FEDERATION, "model.channels=[4]", "model.hidden=[8]", "local.batch_size=60")
# the same for any partition, since only partition=lda has a minimal size
WITHOUT_MIN_SIZE = tuple(option for option in SMALL if not option.startswith("min_size"))

# An algorithm that fails.
ALGORITHM = """
from dataclasses import dataclass

from fedexp.algorithms.base import FedAvg


class Broken(FedAvg):
    def aggregate(self, server, messages, round):
        raise RuntimeError("the aggregation broke")
"""


def table(directory: Path, name: str) -> pd.DataFrame:
    """A csv file of a run without the columns that depend on the clock."""
    frame = pd.read_csv(directory / name, dtype=str)  # as text: equal means equal to the last digit
    return frame.drop(
        columns=[c for c in frame if c == "seconds" or c.endswith(("_seconds", "_per_second"))]
    )


def assert_same_run(first: Path, second: Path) -> None:
    """Equal tidy files, bit for bit, and equal weights."""
    for name in ("rounds.csv", "class_accuracy.csv", "clients.csv"):
        pd.testing.assert_frame_equal(table(first, name), table(second, name))
    states = [torch.load(d / files.CHECKPOINT, weights_only=True) for d in (first, second)]
    for directory, state in zip((first, second), states, strict=True):
        for key in ("lengths", "checksums", "seconds", "train_seconds", "trackers"):
            state.pop(key, None)
        state["clients"] = dict(ClientStates(directory / files.CLIENT_STATES, state["clients"]))
    assert states[0].pop("status") == states[1].pop("status")
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)
    local = [d / "local_class_accuracy.csv" for d in (first, second)]
    assert local[0].exists() == local[1].exists()
    if local[0].exists():
        assert local[0].read_bytes() == local[1].read_bytes()


def summary_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def write_images(root: Path, train: int, test: int, size: int = 8, suffix: str = "png") -> None:
    """Grey images of the classes a and b in the folders train/<class> and test/<class>."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for name in "ab":
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                picture = Image.fromarray(rng.integers(0, 256, (size, size), dtype=np.uint8))
                picture.save(folder / f"{i}.{suffix}")


def content_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory but its lock."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path): path.read_bytes() for path in paths}


def add_class(folder: Path, group: str, module: str, code: str, more: str = "") -> None:
    """Write `module`.py with one class, and own/<group>/<module>.yaml, the option for it."""
    (folder / f"{module}.py").write_text(code)
    (folder / "own" / group).mkdir(parents=True)
    name = re.findall(r"class (\w+)", code)[-1]
    package = f"# @package {group}.{module}\n" if group in MULTIPLE else ""
    option = f"{package}# {name}.\n_target_: {module}.{name}\n{more}"
    (folder / "own" / group / f"{module}.yaml").write_text(option)
