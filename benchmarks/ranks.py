"""Compare rounds with one and two ranks, on two nodes, and in another version of fedexp.

The contestants take turns (A B C A B C ...) round by round, so that other load on the machine
affects all of them. The first round of each does not count. The workload is W1 of README.md;
`num_clients=1000 participation=1 partition=iid dataset=digits` and other overrides change it.
--other names a checkout of another version with its own .venv. The two nodes are two agents of
torchrun on this machine, with one rank each.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import MARK, ROOT, Memory, markdown, spread
from benchmarks.w1 import data_overrides

# Plays a round for each line of its input, and prints its seconds and a checksum of the model.
PROGRAM = """
import json, os, sys, time, zlib
if "RANK" in os.environ:
    from fedexp.engine.ranks.world import join
    if not join():
        sys.exit()
from benchmarks.w1 import make_simulation
from fedexp.training.rounds import play_round
simulation = make_simulation(sys.argv[1:])
state = simulation.initial_state()
for _ in sys.stdin:
    start = time.perf_counter()
    state.advance(play_round(simulation, state))
    seconds, crc = time.perf_counter() - start, 0
    for value in state.server["params"].values():
        crc = zlib.crc32(value.contiguous().numpy(), crc)
    print(json.dumps({"seconds": seconds, "model": f"{crc:08x}"}), flush=True)
simulation.engine.close()
"""
SEQUENTIAL = ("hardware.engine=sequential", "hardware.threads=1")
KILO_BYTES = re.compile(r"^(Rss|Pss):\s+(\d+) kB", re.MULTILINE)
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Version:
    """A way to play the rounds. nodes: the number of torchrun's agents; 0: without torchrun."""

    name: str
    overrides: Sequence[str]
    checkout: Path = ROOT
    nodes: int = 0

    def commands(self, overrides: Sequence[str]) -> list[list[str]]:
        """Return the commands to start at the same time. The first one has rank 0."""
        python = sys.executable if self.checkout == ROOT else f"{self.checkout}/.venv/bin/python"
        program = ["-c", PROGRAM, "hardware=cpu", *self.overrides, *overrides]
        if not self.nodes:
            return [[python, *program]]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        agent = [python, "-m", "torch.distributed.run", f"--nnodes={self.nodes}"]
        agent += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        program = ["--no-python", python, *program]
        return [[*agent, f"--node-rank={node}", *program] for node in range(self.nodes)]


class Player:
    """The running processes of a version."""

    def __init__(self, version: Version, overrides: Sequence[str], held: ExitStack):
        self.memory = Memory(uuid.uuid4().hex)
        self.rounds: list[dict] = []  # seconds, model and cpu of each
        variables = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        variables |= {"PYTHONPATH": str(version.checkout), MARK: self.memory.mark}
        variables |= {"GLOO_SOCKET_IFNAME": "lo"} if version.nodes else {}
        self.processes = [
            subprocess.Popen(
                command,
                cwd=version.checkout,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for command in version.commands(overrides)
        ]
        held.callback(self.end)

    def end(self) -> None:
        self.memory.end_all()
        for process in self.processes:
            process.wait()

    def play(self) -> None:
        first, before = self.processes[0], self.cpu()
        assert first.stdin is not None
        assert first.stdout is not None
        print(file=first.stdin, flush=True)
        self.rounds.append(json.loads(first.stdout.readline()))
        self.rounds[-1]["cpu"] = self.cpu() - before

    def cpu(self) -> float:
        """Return the processor seconds of all processes, in user and system mode."""
        ticks = 0
        for pid in self.memory.pids():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS

    def sizes(self) -> str:
        """Return the resident and the proportional set size of each process that trains, in MiB."""
        found = []
        for pid in sorted(self.memory.pids()):
            program = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"torch.distributed.run" in program:
                continue  # an agent
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            size = {name: int(number) / 1024 for name, number in KILO_BYTES.findall(text)}
            found.append(f"{size['Rss']:,.0f}, {size['Pss']:,.0f}")
        return "; ".join(found)


def versions(options: argparse.Namespace) -> list[Version]:
    """Return the versions to compare. The first one is the reference."""
    two = ("hardware.engine=workers", "hardware.workers=2")
    found = [
        Version("sequential", SEQUENTIAL),
        Version("1 rank", ("hardware.engine=workers", "hardware.workers=1")),
        Version("2 ranks", two),
        Version("2 nodes with 1 rank", ("hardware.engine=workers",), nodes=2),
    ]
    if options.other:
        found = [Version("other version, 2 workers", two, options.other.absolute()), *found]
    chosen = options.only.split(",")
    return [each for each in found if each.name.partition(",")[0] in chosen or not options.only]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--other", type=Path, help="checkout of another version")
    parser.add_argument("--only", default="", help="versions to compare, such as '2 ranks'")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one warm-up round")
    parser.add_argument("overrides", nargs="*", help="such as local.epochs=1")
    options = parser.parse_args(arguments)
    overrides = [*data_overrides(), *options.overrides]
    rows, models = [], set()
    with ExitStack() as held:
        chosen = versions(options)
        players = [Player(version, overrides, held) for version in chosen]
        for _ in range(options.rounds + 1):
            for player in players:
                player.play()
                print(player.rounds[-1], file=sys.stderr, flush=True)
        reference = players[0].rounds[1:]
        for version, player in zip(chosen, players, strict=True):
            counted = player.rounds[1:]
            cells = [version.name, str(len(counted))]
            for key in ("seconds", "cpu"):
                cells.append(spread([each[key] for each in counted], ".2f"))
                pairs = zip(counted, reference, strict=True)
                cells.append(spread([own[key] / other[key] for own, other in pairs], ".3f"))
            rows.append([*cells, player.sizes()])
            models.add(counted[-1]["model"])
    first = chosen[0].name
    head = ("", "n (rounds)", "s a round", f"x {first}", "CPU s a round", f"x {first}")
    shown = " ".join(each for each in overrides if not each.startswith("data_dir="))
    print(f"{measure.machine()}. {shown}\n")
    print(markdown((*head, "RSS, PSS of each process, MiB"), rows))
    print(f"\nThe models after the last round are {'equal' if len(models) == 1 else 'different'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
