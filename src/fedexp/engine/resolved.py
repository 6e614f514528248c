"""The hardware that a run uses: device, precision, threads and engine."""

import ctypes
import platform
from dataclasses import dataclass
from typing import Any

import torch

from fedexp.core.console import plural
from fedexp.core.memory import proc_value
from fedexp.engine.base import Engine
from fedexp.engine.vectorised.engine import Vectorised


@dataclass(frozen=True)
class Resolved:
    """The hardware that a run uses, without `auto`."""

    device: torch.device
    engine: str
    precision: str
    threads: int  # of each process
    workers: int  # number of ranks that train
    trainer: Engine  # trains the clients, in this process or in each rank
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of parameters and inputs.

        With bf16, the forward pass runs in bf16 with fp32 parameters (autocast).
        """
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def vectorises(self) -> bool:
        """Return whether the vectorised engine trains the clients, possibly in several ranks."""
        return isinstance(self.trainer, Vectorised)

    def apply(self) -> None:
        """Set the options of torch that apply to the whole process.

        They are set for every job, because the jobs of a sweep may share a process. In the
        caller's process, `default_torch` restores them.
        """
        torch.set_num_threads(self.threads)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        tf32 = self.precision in ("tf32", "bf16")
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        # Otherwise, the order of additions may depend on the threads.
        torch.backends.cudnn.deterministic = True
        keep_freed_memory()

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return cpu_name()

    def sentence(self) -> str:
        cuda = self.device.type == "cuda"
        name = self.device_name if cuda else plural(self.threads, "thread")
        precision = self.precision
        if cuda and precision == "fp32" and has_bf16():
            precision = "fp32 (tf32 is faster and less exact)"
        if self.engine != "workers":
            return f"{self.device} ({name}), engine {self.engine}, {precision}: {self.reason}"
        count = plural(self.workers, "worker")
        return f"{self.device} ({count} of {name} each), {precision}: {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        """Return the values for summary.json."""
        return {
            "device": str(self.device),
            "name": self.device_name,
            "engine": self.engine,
            "precision": self.precision,
            "threads": self.threads,
            "workers": self.workers,
        }


def has_bf16() -> bool:
    """Return whether the GPU computes in bf16 and tf32 without emulation."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def cpu_name() -> str:
    """Return the model name of the CPU, from /proc/cpuinfo on Linux."""
    known = proc_value("cpuinfo", "model name")
    return known or platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. Local steps are then up to 1.6 times as fast.

    By default, glibc returns large blocks to the operating system and requests them again in every
    step.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL("libc.so.6")
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc.mallopt(m_mmap_threshold, 1 << 30)
    libc.mallopt(m_trim_threshold, 1 << 30)
