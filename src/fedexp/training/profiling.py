"""Profile one round by operation (`profile=true`)."""

import gzip
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity

from fedexp.core import storage

log = logging.getLogger("fedexp")
SLOWEST = 10
# the columns of operations.csv -> the attributes of torch's profiler with times in microseconds
TIMES = {
    "self_cpu_ms": "self_cpu_time_total",
    "cpu_ms": "cpu_time_total",
    "self_device_ms": "self_device_time_total",
}


@contextmanager
def profiled(directory: Path, number: int) -> Iterator[None]:
    """Profile the block and log the slowest operations.

    The results are written to profile/trace.json.gz (for chrome://tracing or Perfetto) and to
    profile/operations.csv.

    directory: the run directory.
    number: the number of the profiled round.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    table = operations(profiler)
    folder = directory / "profile"
    storage.write_atomically(folder / "operations.csv", table.to_csv(index=False).encode())
    with tempfile.TemporaryDirectory() as temporary:
        trace = Path(temporary, "trace.json")
        profiler.export_chrome_trace(str(trace))
        storage.write_atomically(folder / "trace.json.gz", gzip.compress(trace.read_bytes()))
    shown = table.head(SLOWEST).to_string(index=False, float_format=lambda value: f"{value:.1f}")
    log.info(
        "round %d: the %d slowest operations (profile/operations.csv lists all operations):\n%s",
        number,
        SLOWEST,
        shown,
    )


def operations(profiler: torch.profiler.profile) -> pd.DataFrame:
    """Return a table with one row per operation, in the order of decreasing time.

    A row gives the time of the operation in milliseconds, excluding and including the operations
    that it calls, and the operation's share of the total time in percent.
    """
    events = profiler.key_averages()
    table = pd.DataFrame({"operation": [e.key for e in events], "calls": [e.count for e in events]})
    for column, attribute in TIMES.items():
        table[column] = [getattr(event, attribute) / 1e3 for event in events]
    by = "self_device_ms" if table["self_device_ms"].any() else "self_cpu_ms"
    if by == "self_cpu_ms":
        table = table.drop(columns="self_device_ms")
    table["share_percent"] = 100 * table[by] / table[by].sum()
    return table.sort_values(by, ascending=False, ignore_index=True)
