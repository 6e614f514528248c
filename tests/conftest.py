"""Fixtures of all tests. Before torch is imported, each test process is limited to one thread."""

import functools
import gc
import io
import logging
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf, base

from leftovers import Watch

# A shell ignores Ctrl+C in programs that it starts in the background, and so would their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all modules are imported and all tests are collected
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Handlers, propagation and level of each logger before any test.
LOGGING = {
    name: (
        [*logging.getLogger(name).handlers],
        logging.getLogger(name).propagate,
        logging.getLogger(name).level,
    )
    for name in (None, "fedexp", "hydra")
}
load = OmegaConf.load


@functools.lru_cache(maxsize=1000)
def parsed(text: str) -> bytes:
    return pickle.dumps(load(io.StringIO(text)))


def load_quickly(file_: str | Path | IO[Any]) -> Any:
    """Parse equal yaml texts once. A command reads about 40 yaml files, mostly the same ones."""
    try:
        return pickle.loads(
            parsed(
                Path(file_).read_text(encoding="utf-8")
                if isinstance(file_, str | Path)
                else file_.read()
            )
        )
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        if isinstance(file_, str | Path):
            return load(file_)  # its message names the file
        raise


@pytest.fixture(autouse=True, scope="session")
def quick_libraries() -> Iterator[None]:
    """Avoid repeated work of Hydra, and draw figures with fewer pixels."""
    # not imported by the process that only distributes the tests
    from matplotlib import rc_params_from_file

    from fedexp.figures import style

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(load_quickly))
        patch.setattr(base, "parse", functools.lru_cache(base.parse))  # "${...}"
        gc.freeze()  # the millions of objects of torch are never garbage
        gc.set_threshold(20_000, 20, 20)
        gc.enable()
        patch.setattr(
            style,
            "OURS",
            dict(rc_params_from_file(style.OURS, use_default_template=False)) | {"savefig.dpi": 30},
        )
        yield


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[Watch]:
    """Fail a test that leaves a process, a thread or a changed environment variable.

    Otherwise another test would fail, and only if it comes later in the same process. Fixtures of
    modules and of the session may keep what they start: they are set up earlier.
    """
    watch = Watch()
    yield watch
    if (world := sys.modules.get("fedexp.engine.ranks.world")) is not None:
        watch.keep_ranks(world)  # shared by all tests of this process
    left = watch.clear()
    assert not left, "\n".join(["this test leaves", *left])


@pytest.fixture(autouse=True)
def no_power_cut(nothing_left: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk. It would take most of the time of some tests."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def logging_as_at_first() -> None:
    for name, (handlers, propagate, level) in LOGGING.items():
        logger = logging.getLogger(name)
        pytests = [
            handler for handler in logger.handlers if type(handler).__module__.startswith("_pytest")
        ]
        logger.handlers[:] = pytests + handlers
        logger.propagate = propagate
        if logger.level != level:  # setLevel is slow
            logger.setLevel(level)


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """Restore logging before and after each test, since the command line and Hydra change it."""
    logging_as_at_first()
    yield
    logging_as_at_first()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty working directory, and restore sys.argv, which commands change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedexp"])
    return tmp_path


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start joblib's processes anew. joblib would keep them for five minutes, with the environment
    and import path of an earlier test.

    A single job runs in this process, where Hydra's plugin would import all plugins again. Objects
    of the old classes could then not be pickled for the next sweep.
    """
    monkeypatch.setattr(Singleton, "set_state", staticmethod(lambda state: None))
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)
    yield
    get_reusable_executor().shutdown(wait=True)
