"""Start command lines in milliseconds, as forks of a process that has imported fedexp.

A fork runs `fedexp.cli.main.main` like `python -m fedexp`, with separate arguments, environment,
working directory and output, in a new session. The server computes nothing, so it has no threads of
torch when it forks.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass
class Forked:
    """A started command line, with some methods of subprocess.Popen."""

    server: "ForkServer"
    pid: int
    output: Path  # stdout and stderr
    returncode: int | None = field(default=None)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 100.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"process {self.pid} still runs after {timeout} s:\n{self.read()}"
                )
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def read(self) -> str:
        """Return its output so far."""
        return self.output.read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # its number is not reused before it is waited for
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client in the test process."""

    def __init__(self) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._started: list[Forked] = []

    def ask(self, question: Mapping[str, object]) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return json.loads(answer)

    def start(self, *arguments: str, folder: Path, **environment: str) -> Forked:
        """Start `fedexp <arguments>` in a folder, which also gets its output."""
        output = folder / f".output{len(self._started)}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        clean |= {"PYTHONPATH": str(SOURCE), "FEDEXP_DATA": str(folder / "no data")} | environment
        order = {
            "arguments": arguments,
            "folder": str(folder),
            "output": str(output),
            "environment": clean,
        }
        pid = self.ask(order)
        assert pid is not None
        self._started.append(Forked(self, pid, output))
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.kill()
        self._process.kill()  # it would take seconds to end by itself
        self._process.wait()


def serve() -> None:
    """Answer each line of json: start a command line, or return the exit code of a process."""
    import pandas  # noqa: F401 (these imports are for the forks)

    import fedexp.analysis.report
    import fedexp.cli.sweeps
    import fedexp.figures.draw
    import fedexp.training.run  # noqa: F401

    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            assert len(os.listdir("/proc/self/task")) == 1, (
                "a process with threads cannot be forked"
            )
            answer = os.fork() or become(order, replies.fileno())
        print(json.dumps(answer), file=replies, flush=True)


def become(order: Mapping[str, object], replies: int) -> int:
    """Run the command line in the fork; does not return."""
    code: object = 1
    try:
        # otherwise the test would wait for answers after the server has died
        os.close(replies)
        os.setsid()
        os.chdir(str(order["folder"]))
        os.environ.clear()
        os.environ.update(order["environment"])  # type: ignore[call-overload]
        sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
        for number, source in ((0, os.devnull), (1, order["output"]), (2, order["output"])):
            descriptor = os.open(str(source), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, number)
            os.close(descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["fedexp", *order["arguments"]]  # type: ignore[misc]
        from fedexp.cli.main import main

        if rounds := os.environ.pop("STOP_AFTER", None):
            stop_after({int(number) for number in rounds.split(",")})
        code = main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def stop_after(rounds: set[int]) -> None:
    """Stop this process with SIGSTOP once after each of these rounds, so a test need not hurry."""
    from fedexp.training import rounds as module

    play_round = module.play_round

    def play(simulation: Any, state: Any) -> Any:
        if state.round in rounds:
            rounds.remove(state.round)
            os.kill(os.getpid(), signal.SIGSTOP)
        return play_round(simulation, state)

    module.play_round = play


if __name__ == "__main__":
    serve()
