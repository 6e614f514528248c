"""fedexp: federated-learning experiments that measure forgetting.

In Python and notebooks:

    import fedexp

    run = fedexp.run(["algorithm=fedntd", "rounds=10", "tracker=none"])
    run.summary["accuracy"], run.rounds, run.class_accuracy, run.model()
    sweep = fedexp.load_sweep("multirun/...")  # made by `fedexp --multirun`
    sweep.runs, sweep.select(algorithm="fedntd", seed=0)
    fedexp.load_run("outputs/...")
    fedexp.evaluate(run, dataset="digits"), fedexp.export(run, "model.safetensors")
    fedexp.measure(accuracies, axes=("task", "evaluated_task"))

The names in `__all__` are stable. They are imported when they are first used, since importing torch
and pandas takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedexp.analysis.evaluation import Evaluation
    from fedexp.api.directories import Run, Sweep, load_run, load_sweep
    from fedexp.api.measuring import measure
    from fedexp.api.models import evaluate, export
    from fedexp.api.running import run
    from fedexp.core.errors import ConfigError

__version__ = "0.2.0"
__all__ = [
    "ConfigError",
    "Evaluation",
    "Run",
    "Sweep",
    "evaluate",
    "export",
    "load_run",
    "load_sweep",
    "measure",
    "run",
]

_HOMES = {
    "ConfigError": "fedexp.core.errors",
    "Evaluation": "fedexp.analysis.evaluation",
    "Run": "fedexp.api.directories",
    "Sweep": "fedexp.api.directories",
    "evaluate": "fedexp.api.models",
    "export": "fedexp.api.models",
    "load_run": "fedexp.api.directories",
    "load_sweep": "fedexp.api.directories",
    "measure": "fedexp.api.measuring",
    "run": "fedexp.api.running",
}


def __getattr__(name: str) -> Any:
    if name == "sweep":
        raise AttributeError("fedexp.sweep: no longer exists; use `fedexp --multirun`")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedexp' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
