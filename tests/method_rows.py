"""Rows of the generic tests: algorithms with parameters at which they differ from FedAvg.

The tests of another package declare its rows in a file `*_rows.py` in their own folder.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from fedexp.algorithms.base import FedAvg
from fedexp.training.simulation import Simulation
from toy_federation import TWO_TASKS, Normed, make_simulation

SIZES = (1, 3, 4, 2)


def declared(name: str) -> Iterator[Any]:
    """Yield the entries of the list `name` in the files of other packages that have it."""
    for path in sorted(Path(__file__).parent.glob("*/*_rows.py")):
        yield from getattr(import_module(path.stem), name, ())


@dataclass(frozen=True)
class Row:
    """An algorithm with parameters at which it differs from FedAvg.

    A change of any single parameter must change the result: a number is halved (0 becomes 0.5), a
    bool inverted, a text replaced by its value in `other`. Parameters in `silent` have no effect in
    this row, and those in `rejected` cannot be changed alone.
    """

    rounds: ClassVar[int] = 2  # the second one has teachers and client states
    cls: type[FedAvg]
    live: dict[str, Any] = field(default_factory=dict)
    # changes of `live` that give FedAvg; None: no such changes
    zero: dict[str, Any] | None = None
    other: dict[str, Any] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    public: float = 0.0  # fraction of the training data on the server
    model: Any = None  # None: the small CNN
    dataset: Any = None  # None: noise with four classes
    # the global model is FedAvg's, so the personal models are compared
    personal: bool = False
    stops_gradient: bool = False  # parts of the objective have no gradient

    def make(self, **changes: Any) -> FedAvg:
        return self.cls(**self.live | changes)

    def changed(self, name: str) -> Any:
        value = self.live[name]
        if name in self.other:
            return self.other[name]
        return not value if isinstance(value, bool) else value / 2 or 0.5

    @property
    def name(self) -> str:
        return "-".join([self.cls.__name__, *map(str, self.live.values())])

    def simulation(self, algorithm: FedAvg | None = None, **settings: Any) -> Simulation:
        """Return a simulation of this row's algorithm, or of another one on the same data."""
        return make_simulation(
            algorithm or self.make(),
            **{"public": self.public, "model": self.model, "dataset": self.dataset} | settings,
        )


def stream(algorithm: FedAvg, **changes: Any):
    """Return a simulation of four clients and two tasks of two classes with two rounds each. 12 of
    the 40 training examples are unlabelled."""
    settings = {
        "sizes": SIZES,
        "scenario": TWO_TASKS,
        "surrogate": 0.3,
        "rounds": 2,
        "participation": 0.75,
    }
    return make_simulation(algorithm, **settings | changes)


@dataclass(frozen=True)
class TaskRow(Row):
    """As above, with parameters at which the method differs from FedAvg in task 2."""

    rounds: ClassVar[int] = 4  # two of each task
    at_once: bool = False  # the method differs from FedAvg in the first task, too
    # a model with batch norm; None: the method is not defined for any
    normed: Any = field(default_factory=Normed)
    keeps: bool = False  # clients keep examples of the previous task

    def simulation(self, algorithm: FedAvg | None = None, **changes: Any):
        return stream(algorithm or self.make(), **{"model": self.model} | changes)
