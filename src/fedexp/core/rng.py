"""Random generators that depend on (seed, purpose, round, client) and never on the call order."""

import zlib

import numpy as np


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
