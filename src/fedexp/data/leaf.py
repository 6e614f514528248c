"""FEMNIST as LEAF writes it: json files of users, each a writer with images and labels.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv 1812.01097. One file is
`{"users": [u, ...], "num_samples": [n, ...], "user_data": {u: {"x": [[784 floats], ...], "y": [label, ...]}}}`.
"""

import json
import logging
import string
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.data.cache import Arrays

log = logging.getLogger("fedexp")
SIDE = 28
CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)  # LEAF's label order
Users = dict[str, tuple[np.ndarray, np.ndarray]]  # writer -> (x uint8 [n, 28, 28, 1], y int64 [n])


def split_files(folder: Path) -> list[Path]:
    """Return the json files of one split, sorted. Raises ConfigError when there are none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(
            f"{folder}: has no json files. FEMNIST cannot be downloaded ready-made: run LEAF's "
            "`preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.9` (github.com/TalwalkarLab/leaf, data/femnist) and "
            "put its data/train/*.json and data/test/*.json into the folders train and test there"
        )
    return files


def read_femnist(train: Iterable[Path], test: Iterable[Path]) -> Arrays:
    """Read pixels as LEAF has them: white (the paper) is 1 = 255, ink is 0, the opposite of MNIST.

    `owners` numbers the writers of the training data from 0 in the sorted order of their names; the test data of all
    writers are pooled.
    """
    writers, tested = _read_users(train), _read_users(test)
    names = sorted(writers)
    return {
        "x_train": np.concatenate([writers[u][0] for u in names]),
        "y_train": np.concatenate([writers[u][1] for u in names]),
        "x_test": np.concatenate([tested[u][0] for u in sorted(tested)]),
        "y_test": np.concatenate([tested[u][1] for u in sorted(tested)]),
        "classes": np.array(CLASSES),
        "owners": np.repeat(np.arange(len(names)), [len(writers[u][1]) for u in names]),
    }


def _read_users(files: Iterable[Path]) -> Users:
    users: Users = {}
    for path in files:
        log.info("reading %s, once", path)
        try:
            user_data = json.loads(path.read_bytes())["user_data"]
            for user, samples in user_data.items():
                _require(user not in users, f"writer {user} is in another file, too")
                users[user] = _samples(samples["x"], samples["y"])
        except Exception as error:  # a json file can hold anything
            raise ConfigError(f"{path}: not a LEAF json file of FEMNIST ({type(error).__name__}: {error})") from error
    return users


def _samples(x: list[list[float]], y: list[int]) -> tuple[np.ndarray, np.ndarray]:
    _require(len(x) == len(y), f"{len(x)} images but {len(y)} labels")
    pixels = np.asarray(x, np.float64).reshape(len(x), SIDE, SIDE, 1)
    _require(all(type(label) is int for label in y), "labels that are no integers")
    labels = np.array(y, np.int64)
    _require(not ((labels < 0) | (labels >= len(CLASSES))).any(), f"labels outside 0..{len(CLASSES) - 1}")
    _require(bool(((pixels >= 0) & (pixels <= 1)).all()), "pixels outside 0..1")
    return np.rint(pixels * 255).astype(np.uint8), labels  # exact: LEAF divided 8-bit values by 255


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
