"""Count the functions of fedexp that run between a command and its first optimizer step.

    python tools/count_road.py [--list] [override ...]

The command is `fedexp tracker=none hardware.engine=sequential [override ...]`, in a temporary
directory. Lambdas and comprehensions are not counted. Also counts the functions that are given the
job. --list prints the functions, in the order of their first calls.
"""

import inspect
import os
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fedexp
from fedexp.cli.main import main

PACKAGE = str(Path(fedexp.__file__).parent)
FIRST_STEP = "step_in_place"  # of fedexp.algorithms.optimizers


def count(arguments: list[str]) -> tuple[dict[CodeType, str], set[str]]:
    """Run the command, and return the called functions with their places, and those with a job."""
    called: dict[CodeType, str] = {}
    with_job: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event != "call" or code in called or not code.co_filename.startswith(PACKAGE):
            return
        if is_function:
            called[code] = f"{code.co_filename.removeprefix(PACKAGE)[1:]}:{code.co_qualname}"
            given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
            if any(type(value).__name__ == "Job" for value in given):
                with_job.add(called[code])
        if code.co_name == FIRST_STEP:
            raise SystemExit

    sys.setprofile(note)
    try:
        main(arguments)
    except SystemExit:
        sys.setprofile(None)
    return called, with_job


if __name__ == "__main__":
    own = [text for text in sys.argv[1:] if text != "--list"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found, jobs = count(["tracker=none", "hardware.engine=sequential", *own])
        os.chdir("/")
    if "--list" in sys.argv:
        print(*(f"{place}{' (job)' * (place in jobs)}" for place in found.values()), sep="\n")
    files = {code.co_filename for code in found}
    print(f"{len(found)} functions in {len(files)} files; {len(jobs)} are given the job")
