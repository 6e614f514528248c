"""Read LEAF's data set FEMNIST from json files with the examples of each user.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv 1812.01097. The users of FEMNIST
are writers. Each file has the form `{"users": [u, ...], "num_samples": [n, ...], "user_data": {u:
{"x": [[784 floats], ...], "y": [label, ...]}}}`.
"""

import json
import logging
import string
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.data.cache import Arrays, make_arrays

log = logging.getLogger("fedexp")
SIDE = 28
CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)  # LEAF's label order
COMMAND = "preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.9"
Samples = tuple[np.ndarray, np.ndarray]  # images and labels


def find_split_files(folder: Path) -> list[Path]:
    """Return the json files of one split, sorted.

    Raises ConfigError if the folder has no such files.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(
            f"{folder}: contains no json files. FEMNIST cannot be downloaded: clone"
            f" github.com/TalwalkarLab/leaf, run `{COMMAND}` in its folder data/femnist, and"
            f" copy data/train/*.json to {folder.with_name('train')} and data/test/*.json to"
            f" {folder.with_name('test')}"
        )
    return files


def read_femnist(train: Iterable[Path], test: Iterable[Path]) -> Arrays:
    """Return the arrays of FEMNIST from the json files of both splits.

    Unlike in MNIST, ink is 0 and the white paper is 255 (LEAF stores these values as 0 and 1). The
    array `owners` contains each training example's writer. Writers are sorted by name and numbered
    from 0. The test data of all writers are pooled.
    """
    writers, tested = (read_users(paths) for paths in (train, test))
    names = sorted(writers)
    owners = np.repeat(np.arange(len(names)), [len(writers[u][1]) for u in names])
    return make_arrays(pool_users(writers), pool_users(tested), CLASSES) | {"owners": owners}


def pool_users(users: dict[str, Samples]) -> Samples:
    """Return all users' images and labels, sorted by user name."""
    x, y = zip(*(users[name] for name in sorted(users)), strict=True)
    return np.concatenate(x), np.concatenate(y)


def read_users(files: Iterable[Path]) -> dict[str, Samples]:
    """Return a dict that maps each user's name to the user's examples.

    Raises ConfigError if a file is not a valid file of this data set.
    """
    users: dict[str, Samples] = {}
    for path in files:
        log.info("reading %s; this is done only once", path)
        try:
            user_data = json.loads(path.read_bytes())["user_data"]
            for user, samples in user_data.items():
                require_valid(user not in users, f"user {user} is also in another file")
                users[user] = _check_samples(samples["x"], samples["y"])
        except Exception as error:  # a json file can contain anything
            raise ConfigError(
                f"{path}: is not a LEAF json file for FEMNIST ({type(error).__name__}: {error})"
            ) from error
    return users


def _check_samples(x: list[list[float]], y: list[int]) -> Samples:
    require_valid(len(x) == len(y), f"{len(x)} images but {len(y)} labels")
    pixels = np.asarray(x, np.float64).reshape(len(x), SIDE, SIDE, 1)
    require_valid(all(type(label) is int for label in y), "the labels must be integers")
    labels = np.array(y, np.int64)
    require_valid(
        not ((labels < 0) | (labels >= len(CLASSES))).any(),
        f"the labels must be from 0 to {len(CLASSES) - 1}",
    )
    require_valid(bool(((pixels >= 0) & (pixels <= 1)).all()), "the pixels must be from 0 to 1")
    return np.rint(pixels * 255).astype(np.uint8), labels  # exact: LEAF divided 8-bit values by 255


def require_valid(condition: bool, message: str) -> None:
    """Raise ValueError with this message unless the condition is true."""
    if not condition:
        raise ValueError(message)
