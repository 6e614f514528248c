"""Profile one round by operation (`profile=true`)."""

import gzip
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity

from fedexp.core import storage

log = logging.getLogger("fedexp")
SLOWEST = 10


@contextmanager
def profiled(directory: Path, number: int) -> Iterator[None]:
    """Profile the block and log the slowest operations.

    The results are profile/trace.json.gz (for chrome://tracing or Perfetto) and
    profile/operations.csv.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    table = operations(profiler)
    storage.write_atomically(
        directory / "profile" / "operations.csv", table.to_csv(index=False).encode()
    )
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace.json")
        profiler.export_chrome_trace(str(trace))
        storage.write_atomically(
            directory / "profile" / "trace.json.gz", gzip.compress(trace.read_bytes())
        )
    shown = table.head(SLOWEST).to_string(index=False, float_format=lambda value: f"{value:.1f}")
    log.info(
        "round %d, the %d slowest operations (all: profile/operations.csv):\n%s",
        number,
        SLOWEST,
        shown,
    )


def operations(profiler: torch.profiler.profile) -> pd.DataFrame:
    """Return one row per operation, slowest first.

    A row has the milliseconds in the operation itself and including its callees, and its share.
    """
    rows: list[dict[str, Any]] = []
    for event in profiler.key_averages():
        row = {"operation": event.key, "calls": event.count}
        row |= {
            "self_cpu_ms": event.self_cpu_time_total / 1e3,
            "cpu_ms": event.cpu_time_total / 1e3,
        }
        rows.append(row | {"self_device_ms": event.self_device_time_total / 1e3})
    table = pd.DataFrame(rows)
    by = "self_device_ms" if table["self_device_ms"].any() else "self_cpu_ms"
    if by == "self_cpu_ms":
        table = table.drop(columns="self_device_ms")
    table["share_percent"] = 100 * table[by] / table[by].sum()
    return table.sort_values(by, ascending=False, ignore_index=True)
