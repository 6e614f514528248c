"""fedexp: federated-learning experiments that measure forgetting.

In Python and notebooks:

    import fedexp

    run = fedexp.run(["algorithm=fedntd", "rounds=10", "tracker=none"])
    run.summary["accuracy"], run.rounds, run.class_accuracy, run.model()
    fedexp.load_run("outputs/...")
    sweep = fedexp.load_sweep("multirun/...")
    sweep.runs, sweep.select(algorithm="fedntd", seed=0)
    fedexp.measure(accuracies, axes=("task", "evaluated_task"))

The names in `__all__` are stable. They are imported when they are first used, since importing torch
and pandas takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedexp.analysis.runs import Run, Sweep, load_run, load_sweep
    from fedexp.cli.running import run
    from fedexp.core.errors import ConfigError
    from fedexp.metrics.measure import measure

__version__ = "0.2.0"
__all__ = [
    "ConfigError",
    "Run",
    "Sweep",
    "load_run",
    "load_sweep",
    "measure",
    "run",
]
# names of fedexp 0.1, with what replaces them
_REMOVED = {
    "Evaluation": "`fedexp evaluate <run> --out classes.csv`",
    "evaluate": "`fedexp evaluate <run> --out classes.csv`",
    "export": "torch.save(run.model().network.state_dict(), path)",
    "sweep": "`fedexp --multirun`, then fedexp.load_sweep(directory)",
}

_HOMES = {
    "ConfigError": "fedexp.core.errors",
    "Run": "fedexp.analysis.runs",
    "Sweep": "fedexp.analysis.runs",
    "load_run": "fedexp.analysis.runs",
    "load_sweep": "fedexp.analysis.runs",
    "measure": "fedexp.metrics.measure",
    "run": "fedexp.cli.running",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        hint = f"; use {_REMOVED[name]}" if name in _REMOVED else ""
        raise AttributeError(f"module 'fedexp' has no attribute {name!r}{hint}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
