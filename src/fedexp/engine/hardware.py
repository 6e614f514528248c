"""Choose the device, the engine and the precision of a run (config group `hardware`)."""

import copy
import os
import re
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch

from fedexp.core.console import plural
from fedexp.core.errors import require
from fedexp.core.limits import Checked, CountOrNone, Limit
from fedexp.engine.base import Engine
from fedexp.engine.ranks.workers import Workers
from fedexp.engine.ranks.world import launched_ranks
from fedexp.engine.resolved import Resolved, has_bf16
from fedexp.engine.sequential import Sequential
from fedexp.engine.vectorised.engine import Vectorised

# the defaults of the options that only the vectorised engine uses
VECTORISED = {"chunk": None, "cuda_graphs": True}


Device = Annotated[
    str,
    Limit(
        "one of auto, cpu, cuda, cuda:<number>",
        lambda v: re.fullmatch("auto|cpu|cuda(:[0-9]+)?", v) is not None,
    ),
]
# with more than 1024 threads, OpenMP may end the process
Threads = Annotated[int, Limit("at least 1 and at most 1024", lambda v: 1 <= v <= 1024)]


class Hardware(Checked, prefix="hardware."):
    """The hardware that the user requests. `resolve` replaces each `auto`."""

    device: Device
    engine: Literal["auto", "sequential", "workers", "vectorised"]
    # ranks of the workers engine; None: one per core or GPU, at most one per sampled client
    workers: CountOrNone
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp64"]
    # CPU threads of a rank; None: one with workers, else OMP_NUM_THREADS or one per core
    threads: Threads | None
    # clients that the vectorised engine trains at the same time; None: as many as fit into memory
    chunk: CountOrNone
    cuda_graphs: bool  # whether the vectorised engine records its steps as CUDA graphs

    def __post_init__(self) -> None:
        super().__post_init__()
        only = self.workers is None or self.engine in ("auto", "workers")
        wanted = f"null with hardware.engine={self.engine} (hardware.workers=null)"
        require(only, "hardware.workers", self.workers, wanted)

    def for_job(self, number: int) -> "Hardware":
        """Return the hardware for a job of a sweep, given the job's number.

        The jobs use this machine's GPUs in turn, unless `device` names a GPU or a job uses all.
        """
        gpus = torch.cuda.device_count()
        in_workers = self.engine == "workers" or self.workers or launched_ranks()
        if not gpus or self.device not in ("auto", "cuda") or in_workers:
            return self
        return InTurn(**vars(self) | {"device": f"cuda:{number % gpus}"})

    def resumed(self, before: str) -> "Hardware":
        """Return the hardware for a run that is resumed, which may have started on a GPU.

        `hardware.precision=auto` keeps the precision of the run. A CPU continues a run in tf32 with
        fp32, which is at least as exact.

        before: the precision that the run started with.
        """
        precision: Any = before if self.precision == "auto" else self.precision
        if precision == "tf32" and self._device()[0].type != "cuda":
            precision = "fp32"
        return replace(self, precision=precision)

    def resolve(self, cohort_size: int, share: int | None = None) -> Resolved:
        """Return the hardware that the run uses.

        The choice assumes that the vectorised engine supports the model (see `without_vmap`).

        cohort_size: the number of clients per round.
        share: the number of cores that this run may use. None: all cores of the process.
        """
        device, reason = self._device()
        share = cores() if share is None else min(share, cores())
        workers = self._workers(device, cohort_size, share)
        engine: str = self.engine
        if launched_ranks():
            self._check_launched()
            engine = "workers"
        elif engine == "auto" and device.type == "cuda" and self.workers is None:
            engine = "vectorised"
        elif engine == "auto":
            engine = "workers" if workers > 1 or self.workers else "sequential"
        in_workers = engine == "workers"
        # Each rank uses one thread, so that the number of cores does not affect rounding.
        threads = self.threads or (1 if in_workers else default_threads(share))
        precision: str = self.precision
        if precision == "auto":
            precision = "bf16" if device.type == "cuda" and has_bf16() else "fp32"
        trainer: Engine = Sequential()
        if engine == "vectorised" or (in_workers and device.type == "cuda"):
            trainer = Vectorised(self.chunk, self.cuda_graphs)
        count = workers if in_workers else 1
        resolved = Resolved(device, engine, precision, threads, count, trainer, reason)
        self._check(resolved)
        return resolved

    def without_vmap(self, resolved: Resolved, obstacle: str) -> Resolved:
        """Return the hardware for a run that the vectorised engine does not support.

        obstacle: why it is not supported, for the message.

        Raises ConfigError if the vectorised engine was requested.
        """
        other = "another engine, because the vectorised engine does not support this run"
        wanted = self.engine != "vectorised"
        require(wanted, "hardware.engine", self.engine, f"{other}: {obstacle}")
        engine = "sequential" if resolved.engine == "vectorised" else resolved.engine
        changed = replace(resolved, engine=engine, trainer=Sequential())
        self._check(changed)
        return changed

    def _check(self, resolved: Resolved) -> None:
        """Raise ConfigError if an option is incompatible with the resolved hardware."""
        engine = resolved.engine
        tf32_on_cpu = self.precision == "tf32" and resolved.device.type != "cuda"
        require(not tf32_on_cpu, "hardware.precision", "tf32", "fp32 or bf16 on a CPU")
        for name, default in VECTORISED.items():
            value = getattr(self, name)
            allowed = f"{default} with hardware.engine={engine}, which does not use this option"
            fits = value == default or resolved.vectorises
            require(fits, f"hardware.{name}", value, allowed)

    def _check_launched(self) -> None:
        """Raise ConfigError if an option does not fit the ranks that torchrun or srun started."""
        why = f"because {launched_ranks()} ranks were started"
        fits = self.engine in ("auto", "workers")
        require(fits, "hardware.engine", self.engine, f"auto or workers, {why}")
        wanted = f"null (hardware.workers=null), {why}"
        require(self.workers is None, "hardware.workers", self.workers, wanted)

    def _workers(self, device: torch.device, cohort_size: int, share: int) -> int:
        """Return the number of ranks to use, at most one per sampled client."""
        if launched_ranks():
            return min(launched_ranks(), cohort_size)
        places = share // (self.threads or 1)
        if device.type == "cuda":
            places = torch.cuda.device_count() if device.index is None else 1
        return min(self.workers or max(places, 1), cohort_size)

    def _device(self) -> tuple[torch.device, str]:
        """Return the device and the reason for choosing it."""
        if self.device == "auto" and torch.cuda.is_available():
            return torch.device("cuda"), "a CUDA device is available"
        if self.device == "auto":
            return torch.device("cpu"), "no CUDA device is available"
        device, count = torch.device(self.device), torch.cuda.device_count()
        exists = device.type == "cpu" or (device.index or 0) < count
        allowed = f"auto, cpu or one of this machine's {plural(count, 'CUDA device')}"
        require(exists, "hardware.device", self.device, allowed)
        return device, "requested"


class InTurn(Hardware):
    """The hardware of a job that uses one of this machine's GPUs, as `Hardware.for_job` chose."""

    def _device(self) -> tuple[torch.device, str]:
        return super()._device()[0], "the jobs use the GPUs in turn"


def make_engine(hardware: Resolved) -> Engine:
    """Return the engine of a run."""
    # a copy for each run, because an engine stores its chunk size and graphs
    trainer = copy.copy(hardware.trainer)
    if hardware.engine == "workers":
        return Workers(trainer, hardware, hardware.workers, share=hardware.vectorises)
    return trainer


def default_threads(share: int) -> int:
    """Return the default number of threads.

    This is OMP_NUM_THREADS if it is set, and otherwise the number of cores that the run may use.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return share


def cores() -> int:
    """Return the number of cores that this process may use.

    Slurm, taskset and containers (such as `docker run --cpus=2`) may limit this number.
    """
    from joblib import cpu_count

    return int(cpu_count())
