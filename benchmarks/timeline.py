"""Show where the wall time of a whole run goes, from the start of Python to the end of its process.

A process starts fedexp's command with the options of FedNTD on W1 and measures the calls in `PARTS`
and all imports. Times are exclusive: a call that is listed does not count for the call that made
it. On a CUDA device, the context is created before the command starts, so that its time is not
counted elsewhere. `start of Python` and `exit` are measured from outside. No part of fedexp is
changed, and the sum of the rows is the wall time.
"""

import argparse
import builtins
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import markdown, spread

# (module in which a name is used, the name, its row)
PARTS = (
    ("fedexp.cli.job", "run_job", "other"),
    ("fedexp.training.run", "build", "configuration"),
    ("fedexp.training.run", "assemble", "model, engine and checks"),
    ("fedexp.training.prepare", "divide", "data and partition"),
    ("fedexp.engine.ranks.workers", "Workers.start", "start of ranks"),
    ("fedexp.training.rounds", "play_round", "rest of the rounds"),
    ("fedexp.training.exchange", "Exchange.assemble", "schedules"),
    ("fedexp.training.exchange", "Exchange.prepare_next_round", "schedules"),
    ("fedexp.training.exchange", "Exchange.train", "training, launched"),
    ("fedexp.training.exchange", "Exchange.run", "training, waited for"),
    ("fedexp.training.rounds", "aggregate", "aggregation"),
    ("fedexp.training.rounds", "evaluate", "tests"),
    ("fedexp.training.recorder", "Recorder.write", "tables"),
    ("fedexp.training.recorder", "Recorder.save_checkpoint", "checkpoints"),
    ("fedexp.trackers.base", "Callbacks.call", "console, trackers, callbacks"),
    ("fedexp.training.run", "draw_all", "figures"),
)
FIRST = "Exchange.run"  # its first call compiles kernels and records graphs


class Clock:
    """Adds the time to the innermost of the rows that are open."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.open = ["imports"]
        self.last = time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self.seconds[self.open[-1]] = self.seconds.get(self.open[-1], 0.0) + now - self.last
        self.last = now

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.lap()
        self.open.append(name)
        try:
            yield
        finally:
            self.lap()
            self.open.pop()

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the function, whose calls count for a row."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with self.row(name):
                return function(*args, **options)

        return call

    def imports(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that imports, whose calls count for the imports of the open row."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            here = self.open[-1]
            late = here if "import" in here else f"{here}: imports"
            with self.row(late):
                return function(*args, **options)

        return call

    def split_first(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, of whose first call all rows are joined in one."""
        calls: list[None] = []

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            calls.append(None)
            if len(calls) > 1:
                return function(*args, **options)
            before = dict(self.seconds)
            start = time.perf_counter()
            result = function(*args, **options)
            took = time.perf_counter() - start
            self.lap()
            self.seconds = before | {"first round's training": took}
            return result

        return call


def replaced(module: str, name: str) -> tuple[Any, str, Callable[..., Any]]:
    """Return the owner of a function, its name there, and the function."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, last, getattr(owner, last)


def child(out: Path, cuda: bool, arguments: Sequence[str]) -> int:
    """Run fedexp's command in this process, and write the seconds of each row."""
    clock = Clock()
    import torch

    from fedexp.cli.main import main

    found = [(*replaced(module, name), row) for module, name, row in PARTS]
    clock.lap()
    clock.open = ["configuration"]
    for owner, name, function, row in found:
        setattr(owner, name, clock.timed(function, row))
    owner, name, function = replaced("fedexp.training.exchange", FIRST)
    setattr(owner, name, clock.split_first(function))
    if cuda:
        with clock.row("CUDA context"):
            torch.zeros(1, device="cuda")
    setattr(builtins, "__import__", clock.imports(builtins.__import__))  # noqa: B010
    setattr(importlib, "import_module", clock.imports(importlib.import_module))  # noqa: B010
    sys.argv = ["fedexp", *arguments]
    code = main()
    clock.lap()
    out.write_text(json.dumps(clock.seconds | {"ended": time.time()}), encoding="utf-8")
    return code


def timeline(command: Sequence[str], work: Path, cuda: bool) -> dict[str, float]:
    """Run a command of fedexp once, and return the seconds of each row, in the order of a run."""
    out, arguments = work / "rows.json", command[command.index("fedexp") + 1 :]
    program = [sys.executable, "-m", "benchmarks.timeline", "--child", str(out), *["--cuda"] * cuda]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    start = time.time()
    subprocess.run(
        [*program, "--", *(each.replace("OUT", str(work / "run")) for each in arguments)],
        check=True,
        cwd=measure.ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    end, rows = time.time(), json.loads(out.read_text(encoding="utf-8"))
    ended = rows.pop("ended")
    before = ended - start - sum(rows.values())
    return {"start of Python": before, **rows, "exit": end - ended, "all in": end - start}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("--device", default="cuda", help="device of the runs (default: cuda)")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1, help="number of runs")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cuda", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="options of fedexp, for a smaller workload")
    options = parser.parse_args(arguments)
    if options.child:
        return child(options.child, options.cuda, options.overrides)
    from benchmarks.w1 import OVERRIDES, data_overrides, data_sentence

    cuda, data = options.device.startswith("cuda"), [*data_overrides(), *options.overrides]
    hardware = (f"hardware.device={options.device}", f"hardware.precision={options.precision}")
    settings = (*OVERRIDES, *data, "algorithm=fedntd", *hardware, f"rounds={options.rounds}")
    found: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="fedexp-timeline-") as scratch:
            rows = timeline(measure.fedexp(*settings), Path(scratch), cuda)
        for name, seconds in rows.items():
            found.setdefault(name, []).append(seconds)
        print(f"all in {rows['all in']:.2f} s", flush=True)
    print(f"{measure.machine()}. FedNTD, {data_sentence(data)}, {options.rounds} rounds.\n")
    cells = [[name, spread(seconds, ".2f")] for name, seconds in found.items()]
    print(markdown(("part of the run", f"s (n={options.repeats})"), cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
