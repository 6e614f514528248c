"""For all tests. Before torch is imported: test workers share the cores; each computes with one thread, unspinning."""

import logging
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """The command line sets up logging; left so, a later test in the same process would find more on stderr."""
    logger = logging.getLogger("fedexp")
    before = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate, logger.level = before
