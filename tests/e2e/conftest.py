"""Fixtures that run the command line, in this process or in a new one."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers import SOURCE

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


# The environment variable STOP_AFTER has rounds after each of which the process stops itself once.
# ENGINES has engines: each then trains in a child of its own, in a directory with its name, so that
# torch is imported once.
PROGRAM = """
import os, signal, sys
import fedexp.training.run
from fedexp.cli.main import main
from fedexp.training import rounds

def play(simulation, state, *others, play_round=rounds.play_round):
    if state.round in stops:
        stops.remove(state.round)
        os.kill(os.getpid(), signal.SIGSTOP)
    return play_round(simulation, state, *others)

stops = {int(number) for number in os.environ.get("STOP_AFTER", "").split(",") if number}
rounds.play_round = play
engines = os.environ.get("ENGINES", "").split()
for engine in engines:
    if os.fork() == 0:
        sys.exit(main([*sys.argv[1:], f"hardware.engine={engine}", f"hydra.run.dir={engine}"]))
if not engines:
    sys.exit(main())
for engine in engines:
    os.wait()
"""


class Started(subprocess.Popen):
    """A command line in another process, whose output goes to a file in its folder."""

    def __init__(self, folder: Path, output: str, arguments: Sequence[str], **changes: str):
        self.output = folder / output
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        environment |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"} | changes
        with open(self.output, "wb") as file:
            super().__init__(
                [sys.executable, "-c", PROGRAM, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def read(self) -> str:
        """Return its output so far."""
        return self.output.read_text()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Started]]:
    """Yield `start(*arguments, **environment)`, which starts the command line as a process."""
    running: list[Started] = []

    def call(*arguments: str, **environment: str) -> Started:
        output = f".output{len(running)}"
        running.append(Started(tmp_path, output, arguments, **environment))
        return running[-1]

    yield call
    for process in running:
        process.kill()
        process.wait()
