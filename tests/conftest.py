"""For all tests. Before torch is imported: test workers share the cores; each computes with one thread, unspinning."""

import logging
import os
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What one test has timed (fedexp.engine.timed) the next one reads, but nothing of the user's own cache.
CACHE = tempfile.TemporaryDirectory(prefix="fedexp-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE.name


@pytest.fixture(autouse=True)
def no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk takes most of the time of some tests, and only a machine that goes down would show it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """The command line and Hydra set up logging; left so, a later test in the same process would find more on stderr,
    or a stream that is closed."""
    loggers = [logging.getLogger(name) for name in (None, "fedexp", "hydra")]
    before = [(list(logger.handlers), logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        pytests = [handler for handler in logger.handlers if type(handler).__module__.startswith("_pytest")]
        kept = [handler for handler in handlers if not type(handler).__module__.startswith("_pytest")]
        logger.handlers[:] = pytests + kept
        logger.propagate, logger.level = propagate, level


@pytest.fixture
def fresh_processes() -> Iterator[None]:
    """joblib keeps its processes for five minutes, with the environment and import path of the test that began them."""
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)
    yield
    get_reusable_executor().shutdown(wait=True)
