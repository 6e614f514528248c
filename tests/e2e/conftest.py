"""Fixtures that run the command line, in this process or in a new one."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from forks import Forked, ForkServer

from fedexp.cli import main
from fedexp.cli.commands import SUBCOMMANDS


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


class CommandLine:
    """Run the command line: `fedexp(*arguments)`. `done` and `rejected` check the exit code too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *arguments: str) -> Answer:
        given = arguments[:1] and arguments[0] in SUBCOMMANDS
        given = given or any(a.startswith(("tracker=", "resume=")) for a in arguments)
        chosen = [] if given else ["tracker=none"]
        self._monkeypatch.setattr(sys, "argv", ["fedexp", *arguments, *chosen])
        self._capfd.readouterr()
        try:
            code = main.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Answer(code, *self._capfd.readouterr())

    def done(self, *arguments: str) -> Answer:
        answer = self(*arguments)
        assert answer.code == 0, answer.err
        return answer

    def rejected(self, *arguments: str) -> Answer:
        """Run a command that must end with exit code 2 and one message."""
        answer = self(*arguments)
        assert answer.code == 2, answer.err
        assert "Traceback" not in answer.err + answer.out
        assert answer.err.count("fedexp:") == 1, answer.err
        return answer


@pytest.fixture
def fedexp(monkeypatch, capfd, tmp_path) -> Iterator[CommandLine]:
    """Yield the command line in an empty working directory, without W&B by default."""
    logger = logging.getLogger("fedexp")
    before = list(logger.handlers), logger.propagate
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ):  # also for what set_up_process changes
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            del os.environ[name]
        os.environ["FEDEXP_DATA"] = str(tmp_path / "no data")
        yield CommandLine(monkeypatch, capfd)
        monkeypatch.undo()  # before, since it may restore a variable of this fixture
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logger.handlers[:], logger.propagate = before


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Yield a server that starts command lines, which can be killed."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def start(forks, tmp_path) -> Iterator[Callable[..., Forked]]:
    """Yield `start(*arguments, **environment)`, which starts the command line as a process."""
    running: list[Forked] = []

    def call(*arguments: str, **environment: str) -> Forked:
        running.append(forks.start(*arguments, folder=tmp_path, **environment))
        return running[-1]

    yield call
    for process in running:
        process.kill()
        process.wait()
