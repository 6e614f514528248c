"""Random generators that depend on (seed, purpose, round, client) and never on the call order."""

import contextlib
import random
import zlib
from collections.abc import Iterator

import numpy as np
import torch


def generator_for(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return an independent generator for one purpose.

    For example, `generator_for(seed, "batches", round, client)` draws a client's batches in a
    round. Zeros at the end of a key do not count (NumPy's SeedSequence): (1, 0) is the key (1,). So
    a purpose has keys of one length; of another one, it needs another name
    (`tests/test_layout.py`).
    """
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *key])


def torch_seed(seed: int, purpose: str, *key: int) -> int:
    """Return a 63-bit seed for torch.manual_seed, derived like `generator_for`."""
    return int(generator_for(seed, purpose, *key).integers(2**63 - 1))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and `random` while the block runs.

    Initial values and dropout draw from torch's, and users' code may draw from any of them. The
    states are restored afterwards, except those of GPU generators, because no other code uses them.
    """
    before, state = random.getstate(), np.random.get_state()  # noqa: NPY002 (what users call)
    try:
        with torch.random.fork_rng(devices=[]):
            if torch.cuda.is_available():
                torch.manual_seed(seed)
            else:
                # without CUDA, torch.manual_seed also stores a stack trace: this takes milliseconds
                torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(before)
        np.random.set_state(state)  # noqa: NPY002
