"""Choice of device, engine and precision for a run (config group `hardware`)."""

import ctypes
import os
import platform
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedexp.core.console import plural
from fedexp.core.errors import ConfigError, require, require_choice
from fedexp.engine.base import Engine
from fedexp.engine.processes.distributed import Distributed
from fedexp.engine.processes.ranks import HOW_TO_START, find_ranks
from fedexp.engine.processes.workers import Workers, spread
from fedexp.engine.sequential import Sequential
from fedexp.engine.timed import Measured, Way
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.engine.vectorised.stacked import CONVOLUTIONS, stacked_way

ONE_CLIENT = ("direct", "winograd")  # ways of convolving outside of the vectorised engine
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp64")
ENGINES = ("auto", "sequential", "workers", "vectorised", "distributed")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The user's choice of hardware; `resolve` turns `auto` into a choice and says why, but for
    what timing decides."""

    device: str  # auto | cpu | cuda | cuda:N
    engine: str  # auto | sequential | workers | vectorised | distributed
    # processes of the workers engine; None: one per core or GPU, at most one per sampled client
    workers: int | None
    precision: str  # auto | fp32 | tf32 | bf16 | fp64
    # CPU threads of a process; None: one with workers, else OMP_NUM_THREADS or one per core
    threads: int | None
    chunk: int | None  # clients at a time in the vectorised engine; None: as many as fit
    # auto | direct | winograd (one client at a time) | grouped | streams (vectorised)
    convolution: str
    cuda_graphs: bool  # the vectorised engine on CUDA records its steps and replays them
    # of a sweep, at a time, where several jobs run on one machine (fedexp.training.gpus)
    jobs_per_gpu: int

    def __post_init__(self) -> None:
        known = (
            self.device in ("auto", "cpu", "cuda") or self.device.removeprefix("cuda:").isdigit()
        )
        require(known, "hardware.device", self.device, "one of auto, cpu, cuda, cuda:<number>")
        require_choice("hardware.engine", self.engine, ENGINES)
        require_choice("hardware.precision", self.precision, PRECISIONS)
        # OpenMP ends the process when it gets no more
        sound = self.threads is None or 1 <= self.threads <= 1024
        require(sound, "hardware.threads", self.threads, "at least 1 and at most 1024, or null")
        require_choice("hardware.convolution", self.convolution, (*CONVOLUTIONS, *ONE_CLIENT))
        require(
            self.workers is None or self.workers >= 1,
            "hardware.workers",
            self.workers,
            "at least 1, or null",
        )
        only = self.workers is None or self.engine in ("auto", "workers")
        wanted = f"null with hardware.engine={self.engine} (hardware.workers=null)"
        require(only, "hardware.workers", self.workers, wanted)
        require(self.jobs_per_gpu >= 1, "hardware.jobs_per_gpu", self.jobs_per_gpu, "at least 1")
        require(
            self.chunk is None or self.chunk >= 1,
            "hardware.chunk",
            self.chunk,
            "at least 1, or null",
        )

    @property
    def takes_any_gpu(self) -> bool:
        """Return whether a run takes a GPU and it may be any of them."""
        several = self.engine in ("workers", "distributed") or find_ranks() is not None
        return self.device in ("auto", "cuda") and not several

    def resolve(self, vectorises: bool, cohort_size: int, share: int | None = None) -> "Resolved":
        """Resolve `auto`. vectorises: as the model says (models.Model); share: cores that the run
        may use, where other runs use the others; None: all that this process may."""
        device, why = self._device()
        share = cores() if share is None else min(share, cores())
        count, ranks, engine = self._workers(device, cohort_size, share), self._ranks(), self.engine
        if ranks > 1 or engine == "distributed":
            engine, count = "distributed", ranks
        elif engine == "auto" and device.type == "cuda":
            engine = "vectorised" if vectorises else "sequential"
        elif engine == "auto":
            engine = "workers" if count > 1 or self.workers else "sequential"
        if engine == "vectorised" and not vectorises:
            raise ConfigError(
                "hardware.engine=vectorised: this model says (`vectorises`) that it has layers that"
                " cannot be stacked; use hardware.engine=sequential"
            )
        if self.precision == "tf32" and device.type != "cuda":
            raise ConfigError(
                "hardware.precision=tf32: only CUDA devices have it; use fp32 or bf16 on a CPU"
            )
        if engine not in ("workers", "distributed"):
            count = 1
        # One thread, so that the number of cores does not change how sums are rounded.
        threads = self.threads or (
            1 if engine in ("workers", "distributed") else default_threads(share)
        )
        inner = "vectorised" if device.type == "cuda" and vectorises else "sequential"
        single = Vectorised(self.chunk, self.convolution, self.cuda_graphs)
        resolved = Resolved(device, engine, self.precision, threads, count, single, inner, why)
        self._check_convolution(resolved)
        return resolved

    def _check_convolution(self, resolved: "Resolved") -> None:
        """Raise ConfigError for a way of convolving that what was chosen does not have."""
        if self.convolution in ONE_CLIENT and resolved.kind == "vectorised":
            raise ConfigError(
                f"hardware.convolution={self.convolution}: the vectorised engine has grouped"
                " and streams"
            )
        if self.convolution == "winograd" and (
            resolved.device.type != "cpu" or self.precision == "bf16"
        ):
            raise ConfigError("hardware.convolution=winograd: only on a CPU, in fp32 or fp64")

    def _workers(self, device: torch.device, cohort_size: int, share: int) -> int:
        """Return the number of worker processes that are of use."""
        places = share // (self.threads or 1)
        if device.type == "cuda":
            places = torch.cuda.device_count() if device.index is None else 1
        return min(self.workers or max(places, 1), cohort_size)

    def _ranks(self) -> int:
        """Return the number of processes that torchrun or Slurm has started for this run."""
        ranks = find_ranks()
        if ranks is None and self.engine == "distributed":
            raise ConfigError(f"hardware.engine=distributed: {HOW_TO_START}")
        size = 1 if ranks is None else ranks.size
        if size > 1 and (self.engine not in ("auto", "distributed") or self.workers):
            raise ConfigError(
                f"hardware.engine={self.engine}: {size} processes were started; must be auto or"
                " distributed"
            )
        if size > 1 and self.device.startswith("cuda:"):
            raise ConfigError(
                f"hardware.device={self.device}: each of {size} processes takes the GPU of its"
                " number; use cuda"
            )
        return size

    def _device(self) -> tuple[torch.device, str]:
        if self.device == "auto":
            if torch.cuda.is_available():
                return torch.device("cuda"), "a CUDA device is there"
            return torch.device("cpu"), "no CUDA device is there"
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"hardware.device={self.device}: this machine shows {torch.cuda.device_count()}"
                " CUDA devices; use hardware=auto or hardware=cpu"
            )
        return device, "asked for"


@dataclass(frozen=True)
class Resolved:
    """The hardware that a run uses."""

    device: torch.device
    engine: str
    precision: str  # auto until `timed` has decided
    threads: int  # of each process
    workers: int  # processes that train
    vectorised: Vectorised  # as it was asked for, used or not
    inner: str  # engine of each worker
    why: str
    measured: Measured | None = None  # what timing has found; None: it had nothing to decide

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of parameters and input; bf16 runs the forward pass in bf16 over fp32
        parameters (autocast)."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def convolves(self) -> str:
        """Return how the convolutions of one client are computed (see models.winograd.Conv2d):
        "direct", or "winograd". Where nothing was timed, it is "winograd" in fp32 on x86 CPUs with
        AVX2 or AVX-512."""
        if self.vectorised.convolution in ONE_CLIENT:
            return self.vectorised.convolution
        if self.measured is not None:
            return self.measured.way.convolution
        plain = self.device.type == "cpu" and self.precision == "fp32"
        return (
            "winograd"
            if plain and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
            else "direct"
        )

    @property
    def ways(self) -> list[Way]:
        """Return the ways of computing a client's step among which timing decides; one where all is
        named or known."""
        cpu, asked = self.device.type == "cpu", self.vectorised.convolution
        precisions = ["fp32", "bf16"] if self.precision == "auto" else [self.precision]
        if len(precisions) > 1 and cpu and (trouble_with_bf16() or asked == "winograd"):
            precisions = ["fp32"]
        ways: list[Way] = []
        for precision in precisions:
            both = cpu and precision == "fp32" and self.kind == "sequential"
            named = [asked] if asked in ONE_CLIENT else []
            ways += [
                Way(precision, one)
                for one in named or (("winograd", "direct") if both else ("direct",))
            ]
        return ways

    def choose(self, way: Way, measured: Measured | None = None) -> "Resolved":
        """Return the hardware with one of its ways in place of `auto`. measured: how it was found,
        if by timing."""
        return replace(self, precision=way.precision, measured=measured)

    @property
    def kind(self) -> str:
        """Return the engine that trains, in this process or in others."""
        return self.inner if self.engine in ("workers", "distributed") else self.engine

    def trouble(self) -> str | None:
        """Return what makes this choice a slow one, where it is known or can be measured."""
        return (
            trouble_with_bf16() if self.precision == "bf16" and self.device.type == "cpu" else None
        )

    def in_one_process(self) -> "Resolved":
        """Return the hardware of one worker, used in this process."""
        return replace(self, engine=self.inner, workers=1) if self.engine == "workers" else self

    def make_engine(self) -> Engine:
        if self.engine == "workers":
            inner = self._single(self.inner)
            return Workers(inner, spread(self, self.workers), share=self.inner == "vectorised")
        if self.engine == "distributed":
            return Distributed(self._single(self.inner), self)
        return self._single(self.engine)

    def _single(self, engine: str) -> Engine:
        return Sequential() if engine == "sequential" else self.vectorised

    def apply(self) -> None:
        """Set process-wide switches; for every job, since the jobs of a sweep may share one
        process."""
        torch.set_num_threads(self.threads)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        tf32 = self.precision in ("tf32", "bf16")
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        # else it may add in the order in which threads come by
        torch.backends.cudnn.deterministic = True
        keep_freed_memory()

    def sentence(self) -> str:
        name = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else plural(self.threads, "thread")
        )
        text = f"{self.device} ({name}), engine {self.engine}, {self.precision}: {self.why}"
        if self.engine in ("workers", "distributed"):
            noun = "worker" if self.engine == "workers" else "distributed rank"
            text = (
                f"{self.device} ({plural(self.workers, noun)} of {name} each), {self.precision}:"
                f" {self.why}"
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return the values as they stand in summary.json."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu_name()
        convolution = self.convolves
        if self.kind == "vectorised":
            convolution = stacked_way(self.vectorised.convolution, self.device)
        return {
            "device": str(self.device),
            "name": name,
            "engine": self.engine,
            "precision": self.precision,
            "threads": self.threads,
            "workers": self.workers,
            "convolution": convolution,
            **({} if self.measured is None else self.measured.as_dict()),
        }

    def arithmetic(self) -> dict[str, Any]:
        """Return what decides how sums are rounded. Not the number of workers, nor whether clients
        train in this process or in others: neither changes a bit."""
        values = self.as_dict() | {
            "engine": self.kind,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }
        for name in ("workers", "seconds_of_a_step"):
            values.pop(name, None)
        if self.kind == "vectorised":
            values |= {"chunk": self.vectorised.chunk}
        if self.device.type == "cuda":
            values |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        return values


def default_threads(share: int) -> int:
    """Return OMP_NUM_THREADS where it is set, else one thread for each core that the run may
    use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return share


def cores() -> int:
    """Return the cores that this process may run on (Slurm and taskset limit them)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_bf16() -> bool:
    """Return whether this CPU multiplies bf16 numbers by itself; True where Linux does not say."""
    flags = cpu_flags()
    return not flags or any(
        name in flags for name in ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16")
    )


def cpu_flags() -> list[str]:
    """Return what Linux says that this CPU can do: `flags` of x86, `Features` of ARM; elsewhere
    nothing."""
    return (cpu_entry("flags") or cpu_entry("Features") or "").split()


def trouble_with_bf16() -> str | None:
    """Return why bf16 is slower than fp32 on this CPU: by what Linux says of it, elsewhere by a
    short trial."""
    flags = cpu_flags()
    if not flags:
        ratio = cost_of_bf16()
        return (
            f"in a short trial bf16 took {ratio:.1f} times as long as fp32 on this CPU"
            if ratio > 1.2
            else None
        )
    if not has_bf16():
        return (
            "this CPU has no bf16 instructions: bf16 will be many times slower than fp32"
            " (precision=fp32)"
        )
    if (
        cpu_entry("vendor_id") == "GenuineIntel"
        and "avx512_bf16" in flags
        and "amx_bf16" not in flags
    ):
        return (
            "this CPU has AVX512-BF16 without AMX: bf16 was measured to take 1.7 times as long as"
            " fp32 on such a one"
        )
    return None


def cost_of_bf16() -> float:
    """Return how many times as long as in fp32 a convolution takes in bf16 here, by the best of
    three."""
    tensors = torch.ones(4, 32, 16, 16), torch.ones(64, 32, 5, 5)

    def seconds(dtype: torch.dtype) -> float:
        images, kernels = (each.to(dtype) for each in tensors)
        found = []
        for _ in range(3):
            start = time.perf_counter()
            torch.nn.functional.conv2d(images, kernels)
            found.append(time.perf_counter() - start)
        return min(found)

    return seconds(torch.bfloat16) / seconds(torch.float32)


def cpu_name() -> str:
    return cpu_entry("model name") or platform.processor() or platform.machine()


def cpu_entry(key: str) -> str:
    """Return the entry of the first core in Linux's /proc/cpuinfo; empty where it says nothing."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            pairs = (line.partition(":") for line in lines)
            return next((value.strip() for name, _, value in pairs if name.strip() == key), "")
    except OSError:
        return ""


def keep_freed_memory() -> None:
    """Keep freed memory for the next step, up to 1.6 times faster: by default glibc gives large
    blocks back and faults them in again on every step."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL("libc.so.6")
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc.mallopt(m_mmap_threshold, 1 << 30)
    libc.mallopt(m_trim_threshold, 1 << 30)
