"""Measure the speed of a GPU that is lent for half an hour, in 25 minutes.

The parts run one after another, the most valuable first, each with its own limit. All lines are
printed as soon as they are known. A part that fails or reaches its limit does not stop the others.

- captured: which engine trains clients on a GPU (benchmarks.captured)
- timeline: where the time of a whole run goes (benchmarks.timeline)
- peers: other simulators and a plain PyTorch loop (benchmarks.peers)
- jobs: whole runs side by side (benchmarks.gpu)
- rounds: 200 rounds of FedNTD and the bare loop (benchmarks.gpu)
- convolutions: the Triton kernels, and other options for them (benchmarks.convolutions)

If a command may not take 25 minutes, name some of the parts in each call. --quick tries all of them
on a CPU with tiny sizes.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from benchmarks.measure import ROOT

# part -> (its limit in seconds, the command on a GPU, the command of a try on a CPU)
TINY = "dataset=few_random_pixels num_clients=20 local.epochs=1 partition.min_size=1"
TINY += " model.channels=[4,4] model.hidden=[8] hardware.threads=1"
ON_CPU = "--device=cpu --precision=fp32"
OF_GPU = "gpu --device=cpu --rounds=2 --bare-rounds=2 --repeats=1 --precisions=fp32"
PARTS: dict[str, tuple[float, str, str]] = {
    "captured": (
        280,
        "captured --exact --budget=240",
        f"captured --quick --rounds=1 --networks=cnn {ON_CPU}",
    ),
    "timeline": (80, "timeline --repeats=2", f"timeline --rounds=2 {ON_CPU} -- {TINY}"),
    "peers": (
        420,
        "peers --device=cuda --precision=tf32 --workers=5 --rounds=9 --repeats=3 --no-results",
        "peers --quick --workers=1 --no-results",
    ),
    "jobs": (
        400,
        "gpu --parts=jobs --precisions=bf16 --job-minutes=6",
        f"{OF_GPU} --parts=jobs --jobs=2 -- {TINY}",
    ),
    "rounds": (
        180,
        "gpu --parts=rounds --precisions=bf16,tf32 --repeats=1",
        f"{OF_GPU} --parts=rounds -- {TINY}",
    ),
    "convolutions": (
        130,
        "convolutions --parts=time,options --budget=120",
        "convolutions --device=cpu --budget=60",
    ),
}


def run(name: str, command: Sequence[str], limit: float) -> str:
    """Run a command, with its output here, and return how it ended."""
    start = time.monotonic()
    program = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = program.wait(limit)
        how = "ended" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        how = f"stopped after its {limit:.0f} s"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # also processes that it left behind
            with suppress(ProcessLookupError):
                os.killpg(program.pid, number)
            with suppress(subprocess.TimeoutExpired):
                program.wait(5)
    return f"{name}: {how} in {time.monotonic() - start:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m benchmarks.day", description=__doc__)
    parser.add_argument("--minutes", type=float, default=25, help="time for everything")
    parser.add_argument("--parts", type=words, default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="only show that the parts work")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"--parts={','.join(unknown)}: must be of {', '.join(PARTS)}")
    end, results = time.monotonic() + 60 * options.minutes, []
    for name in options.parts:
        limit, *commands = PARTS[name]
        left = end - time.monotonic()
        if left <= 0:
            results.append(f"{name}: left out, no time is left")
        else:
            module, *rest = commands[options.quick].split()
            print(f"\n===== {name}, {left:.0f} s left: {module} {' '.join(rest)}", flush=True)
            command = [sys.executable, "-m", f"benchmarks.{module}", *rest]
            results.append(run(name, command, left if options.quick else min(limit, left)))
        print(f"===== {results[-1]}", flush=True)
    print("\n" + "\n".join(results), flush=True)
    return 0 if all(": ended in " in line for line in results) else 1


if __name__ == "__main__":
    sys.exit(main())
