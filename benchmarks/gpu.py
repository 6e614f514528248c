"""The figures of a GPU on W1: FedNTD for 200 rounds against the bare loop, the algorithms against FedAvg, ResNets."""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.measure import Contestant, Rep, fedexp, markdown, read_rounds, run_once
from benchmarks.w1 import OVERRIDES, ROOT, data_overrides, data_sentence, prepare_workload

ALGORITHMS = ("fedavg", "fedprox", "fedntd", "scaffold", "moon")
RESNETS = ("resnet10", "resnet18", "resnet50")


class Gpu:
    """Runner of contestants one by one, which keeps what could not be measured."""

    def __init__(self, options: argparse.Namespace, work: Path):
        self.options, self.work, self.data = options, work, [*data_overrides(), *options.overrides]
        self.left_out: list[str] = []
        prepare_workload(options.bare_rounds, self.data).save(work / "w1")

    def fedexp(self, engine: str, precision: str, rounds: int, *overrides: str) -> Rep | None:
        hardware = (f"hardware.device={self.options.device}", f"hardware.engine={engine}")
        settings = (*OVERRIDES, *self.data, *hardware, f"hardware.precision={precision}", f"rounds={rounds}")
        return self._run(f"fedexp {engine} {precision} {' '.join(overrides)}", fedexp(*settings, *overrides))

    def bare(self, precision: str) -> Rep | None:
        """Return the sequential eager loop, testing the global model in every round like fedexp."""
        flags = ("--algorithm=fedntd", f"--precision={precision}", f"--device={self.options.device}")
        command = (sys.executable, "-m", "benchmarks.bare", str(self.work / "w1"), "OUT", *flags)
        more = (f"--rounds={self.options.bare_rounds}", "--global-evaluation")
        return self._run(f"bare loop {precision}", (*command, *more))

    def _run(self, name: str, command: tuple[str, ...]) -> Rep | None:
        try:
            rep = run_once(Contestant(name, command), self.work / "out", timeout=7200, environment={})
        except (measure.Refused, RuntimeError) as error:
            self.left_out.append(f"{name}: not measured: {error}")
            print(self.left_out[-1], flush=True)
            return None
        print(f"{name}: {rep.rate:,.0f} examples/s, {rep.seconds:.3f} s a round", flush=True)
        return rep

    def headline(self) -> str:
        """Run FedNTD for all rounds, the first too but not the start; compare its speed over the rounds of the bare
        loop."""
        o, rows = self.options, []
        for precision in o.precisions:
            if (bare := self.bare(precision)) is None:
                continue
            for engine in o.engines:
                if (rep := self.fedexp(engine, precision, o.rounds, "algorithm=fedntd")) is None:
                    continue
                same = read_rounds(self.work / "out", last=o.bare_rounds)
                if same.examples != bare.examples:
                    raise RuntimeError("fedexp and the bare loop trained different cohorts")
                cells = (
                    f"{rep.total:.1f}",
                    f"{rep.rate:,.0f}",
                    f"{bare.rate:,.0f}",
                    f"{bare.seconds / same.seconds:.1f}",
                )
                rows.append((f"{engine} {precision}", *cells, f"{rep.accuracy:.3f}"))
        head = ("FedNTD", f"s for {o.rounds} rounds", "examples/s", "bare loop, examples/s", "x bare loop (all in)")
        return markdown((*head, "accuracy"), rows)

    def algorithms(self) -> str:
        """Return the seconds of a round of each algorithm that there is, as a multiple of FedAvg's."""
        o, rows = self.options, []
        there = {path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml")}
        for precision in o.precisions:
            reference = None
            for name in [a for a in ALGORITHMS if a in there]:
                if (rep := self.fedexp(o.engines[0], precision, o.bare_rounds, f"algorithm={name}")) is None:
                    continue
                reference = reference or (rep if name == "fedavg" else None)
                multiple = f"{rep.seconds / reference.seconds:.2f}" if reference else ""
                rows.append((f"{name} {precision}", f"{rep.seconds:.3f}", f"{rep.rate:,.0f}", multiple))
        return markdown((f"{o.engines[0]} engine", "s a round, all in", "examples/s", "x FedAvg"), rows)

    def resnets(self) -> str:
        rows = []
        for model in self.options.models:
            if (rep := self.fedexp("sequential", "bf16", 3, f"model={model}")) is not None:
                rows.append((model, f"{rep.seconds:.2f}", f"{rep.rate:,.0f}"))
        return markdown(("FedAvg, sequential bf16", "s a round, all in", "examples/s"), rows)


def main(arguments: list[str] | None = None) -> int:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--bare-rounds", type=int, default=10, help="of the bare loop and of the algorithms' table")
    parser.add_argument("--precisions", type=words, default=["fp32", "tf32", "bf16"])
    parser.add_argument("--engines", type=words, default=["vectorised", "sequential"])
    parser.add_argument("--models", type=words, default=list(RESNETS))
    parser.add_argument("overrides", nargs="*", help="of fedexp, for a smaller workload")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("benchmarks.gpu: torch finds no CUDA device on this machine", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fedexp-gpu-") as scratch:
        gpu = Gpu(options, Path(scratch))
        text = [f"{measure.machine()}. W1, {data_sentence(gpu.data)}, {' '.join(options.overrides)}".strip(", ")]
        text += [gpu.headline(), gpu.algorithms(), gpu.resnets(), *gpu.left_out]
    print("\n\n".join(text))
    if options.device.startswith("cuda"):
        measure.write_section("GPU", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
