"""The content of summary.json: a run's results, and the versions and hardware behind them."""

import functools
import json
import platform
import resource
import sys
from collections.abc import Container, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedexp
from fedexp.core.errors import ConfigError
from fedexp.core.memory import proc_bytes
from fedexp.core.provenance import commit
from fedexp.data.views import VALIDATION, name_in_view, rename_for_view, selection_view
from fedexp.engine.resolved import Resolved
from fedexp.metrics.quantity import ACCURACY, OF_RUN, SECONDS, SPEED
from fedexp.metrics.record import Record
from fedexp.metrics.targets import rounds_to_target
from fedexp.metrics.tasks import FORMULAS
from fedexp.rundir import files
from fedexp.trackers.base import Callbacks, Tracker
from fedexp.training.recorder import json_value, require_distinct, table_columns, task_history
from fedexp.training.simulation import Simulation
from fedexp.training.state import State

# keys of summary.json that are not values of metrics
RESERVED = (
    *("status", "algorithm", "dataset", "scenario", "partition", "model", "seed", "seeds"),
    *("sweep", "identity", "versions", "commit", "hardware", "checksums", "parts", "data"),
    *("peak_memory", "rounds_to_target", "tasks", "task_orders"),
    *("local_evaluation", "left_out", "schedule", "stopped", "hint"),
    *("not_finite", "directions", *(each.key for each in (ACCURACY, *OF_RUN, SECONDS, SPEED))),
    *FORMULAS,
    *("setting", "method", "run", "diverged", "n", "commits"),  # columns of a sweep's tables
)


def summary_of(simulation: Simulation, state: State) -> dict[str, Any]:
    """Return the results of a run up to the given state, for summary.json."""
    views = tuple(state.records)
    validated = VALIDATION in views
    best = state.best[0] if validated and state.best is not None else None
    found: dict[str, Any] = {}
    for view, record in state.records.items():
        values = test_summary(simulation, record, best)
        reached = values.pop("rounds_to_target")
        found |= rename_for_view(values, view)
        if view == selection_view(views):
            found["rounds_to_target"] = reached
        elif not validated:
            found |= rename_for_view({"rounds_to_target": reached}, view)
    every = simulation.local_evaluation.every
    directions = simulation.metrics.own_directions().items()
    optional = {
        "directions": {name_in_view(name, view): way for view in views for name, way in directions},
        "local_evaluation": {"every": every} if every else {},
        "left_out": simulation.left_out,
        "schedule": list_changes(simulation),
        "stopped": state.stopped if state.status == "stopped" else {},
        "hint": failure_hint(simulation, state),
    }
    found |= {name: value for name, value in optional.items() if value}
    if validated:
        found["best_round"] = best
    if state.status == "diverged":
        found["not_finite"] = state.not_finite
    speed = state.examples / state.train_seconds if state.train_seconds else None
    last = {"rounds": state.round, "seconds": state.seconds, "train_samples_per_second": speed}
    return found | last


def test_summary(simulation: Simulation, record: Record, best: int | None) -> dict[str, Any]:
    """Return the results of a run on one test set.

    best: the best round on the validation set, or None to use the round with the highest accuracy
        on this test set.
    """
    settings = simulation.settings
    rounds, values = record.rounds, record.accuracy
    best_accuracy = max(values[1:], default=values[-1])
    if best is not None:
        best_accuracy = values[rounds.index(best)]
    targets = settings.targets, settings.target_fractions
    metrics = simulation.metrics.summary(record)
    found = {"accuracy": values[-1], "best_accuracy": best_accuracy}
    found |= {name: json_value(value) for name, value in metrics.items()}
    if simulation.has_tasks:
        found |= task_history(simulation, record).summary()
    return found | {"rounds_to_target": rounds_to_target(rounds, values, *targets)}


def list_changes(simulation: Simulation) -> list[dict[str, Any]]:
    """Return a dict for each change of the clients' data.

    It contains the first round in which the change applies, and the new partition."""
    names = ("scheme", "alpha", "shards_per_client", "shares")
    found = []
    for stage in simulation.stages:
        info = stage.partition.info
        if not stage.partition.is_change:
            continue
        known = {name: info[name] for name in names if name in info}
        found.append({"round": stage.first_round, **known, "hash": stage.partition.hash})
    return found


def failure_hint(simulation: Simulation, state: State) -> str:
    """Return the algorithm's hint if the run failed, or an empty string if it did not.

    A run has failed if it diverged, or if its accuracy never reached twice the accuracy of random
    guessing.
    """
    best = max((value for number, value in state.record.curve if number >= 1), default=1.0)
    failed = state.status == "diverged" or best * simulation.runtime.data.num_classes < 2
    return simulation.algorithm.hint if failed else ""


def check_result_names(simulation: Simulation) -> None:
    """Raise ConfigError if two results of a run have the same name."""
    table_columns(simulation)
    for view in simulation.runtime.views:
        names = [name_in_view(name, view) for name in simulation.metrics.summary_names()]
        require_distinct(files.SUMMARY, [*names, *RESERVED])


def values_of_callbacks(callbacks: Callbacks, known: Container[str]) -> dict[str, Any]:
    """Return what the callbacks add to summary.json. Undefined numbers become None.

    known: the names of the other values. Raises ConfigError if a value has the name of another one,
    which it would replace in all tables, or if JSON cannot hold it.
    """
    found: dict[str, Any] = {}
    for each, values in callbacks.call("summary"):
        group = "tracker" if isinstance(each, Tracker) else "callback"
        where = f"{group}: summary of {type(each).__name__} returns"
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} {values!r}; must be a dict")
        for name, value in values.items():
            if name in found or name in known or name in RESERVED:
                raise ConfigError(
                    f"{where} {name}={value!r}, but {files.SUMMARY} already has a value of this"
                    " name; rename it"
                )
            try:
                found[name] = defined(json.loads(json.dumps(value, default=as_numbers)))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{where} {name}, which JSON cannot hold ({error})") from error
    return found


def as_numbers(value: Any) -> Any:
    """Return an array, a tensor or a NumPy number as a list or number of Python."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def defined(value: Any) -> Any:
    """Return a value of JSON with None in place of nan and infinity."""
    if isinstance(value, dict):
        return {name: defined(each) for name, each in value.items()}
    if isinstance(value, list):
        return [defined(each) for each in value]
    return json_value(value)


# packages that affect the results, from decoding images to solving linear programs
NUMERIC = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "pillow")


def environment(hardware: Resolved) -> dict[str, Any]:
    """Return the versions, the commit and the hardware that produce the results."""
    return {
        "versions": versions(*NUMERIC, "hydra-core", "wandb"),
        "commit": commit(),
        "hardware": hardware.as_dict(),
    }


@functools.cache
def versions(*packages: str) -> dict[str, str]:
    """Return the versions of fedexp, Python and the given packages, if they are installed."""
    found = {"fedexp": fedexp.__version__, "python": platform.python_version()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | {"torch": str(torch.__version__)}  # includes the build, such as +cpu


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Return the peak memory in bytes.

    The entry `host` is the sum of the peaks of this process and its child processes. This is an
    upper bound of the memory used at any time, because shared pages are counted once per process.
    The entry `device` is the memory that torch reserved on a GPU, or None on a CPU. If a process
    runs several jobs, the values are the peaks over all of these jobs.
    """
    held = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    host = 0
    with suppress(OSError):  # the system has no /proc
        children = Path("/proc/self/task").glob("*/children")
        names = " ".join(["self", *(path.read_text() for path in children)]).split()
        host = sum(proc_bytes(f"{name}/status", "VmHWM") for name in names)
    return {"host": host or own_peak(), "device": held}


def own_peak() -> int:
    """Return this process's peak memory in bytes, on systems without /proc."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
