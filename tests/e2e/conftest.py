"""Fixtures that run the command line, in this process (quick) or as a process of its own."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from helpers import SOURCE

from fedexp import cli


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def fedexp(monkeypatch, capfd, tmp_path) -> Iterator[Callable[..., Answer]]:
    """`fedexp(*arguments)` in an empty working directory, without W&B unless asked for."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FEDEXP_DATA", str(tmp_path / "no data"))
    logger = logging.getLogger("fedexp")
    before = list(logger.handlers), logger.propagate
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments: str) -> Answer:
        chosen = [] if any(a.startswith(("tracker=", "resume=")) for a in arguments) else ["tracker=none"]
        monkeypatch.setattr(sys, "argv", ["fedexp", *arguments, *chosen])
        capfd.readouterr()
        try:
            code = cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Answer(code, *capfd.readouterr())

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logger.handlers[:], logger.propagate = before


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`start(*arguments)`: the same as a process that can be killed."""
    running: list[subprocess.Popen] = []

    def call(*arguments: str) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": str(SOURCE), "FEDEXP_DATA": str(tmp_path / "no data")}
        # Where the tests themselves run in the background, SIGINT is ignored, and children would inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            [sys.executable, "-m", "fedexp", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        signal.signal(signal.SIGINT, before)
        running.append(process)
        return process

    yield call
    for process in running:
        process.kill()
        process.wait()
