"""The measures of forgetting that a run evaluates and logs (config group `forgetting_metric`).

The formulas are in `fedexp.metrics.forgetting` and `fedexp.metrics.examples`.
"""

import importlib
import itertools
import pkgutil
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedexp.core.errors import ConfigError, naming_hook
from fedexp.core.limits import Checked, Positive
from fedexp.core.unchanged import modes, require_modes
from fedexp.data.views import VIEWS
from fedexp.metrics import examples, forgetting
from fedexp.metrics.accuracy import class_mean
from fedexp.metrics.quantity import ACCURACY, OF_ROUNDS, OF_RUN, Column, Quantity, by_name
from fedexp.metrics.record import Record
from fedexp.metrics.task_matrix import QUANTITIES as BETWEEN_TASKS
from fedexp.metrics.tasks import QUANTITIES as OF_TASKS

FORGETTING = Quantity("forgetting", "min", "forgetting/F", label="forgetting F", main=True)
ROUND_FORGETTING = Quantity("round_forgetting", "min", main=True)
LOCAL_ROUND_FORGETTING = Quantity(
    "local_round_forgetting", "min", label="local round forgetting,\nmean over clients"
)


def declared(cls: type, names: Any) -> dict[str, Quantity]:
    """Return the quantities that a metric declares by name.

    names: the quantities, or `max` or `min`, by name. Raises ConfigError if tables and reports
    could not use them.
    """
    found = {}
    for name, each in names.items() if isinstance(names, Mapping) else [(names, None)]:
        words = isinstance(name, str) and name.isprintable() and name and "," not in name
        quantity = each if isinstance(each, Quantity) else Quantity(str(name), each)
        if not words or quantity.name != name or quantity.better not in ("max", "min"):
            raise ConfigError(
                f"forgetting_metric: {cls.__name__} declares {name!r}; columns and further must map"
                " a name without a comma to 'max' or 'min'"
            )
        found[name] = quantity
    return found


class ForgettingMetric(Checked, prefix="forgetting_metric."):
    """Base class of metrics. A metric computes named values from the record of a run.

    It declares their names, which are the same in all rounds. A value that is not defined yet is
    nan.
    """

    _replaced: ClassVar = {"needs_neurons": "the hook callback, whose result sees the models"}

    # The names of the values in rounds.csv and summary.json, each with `max` if a larger value is
    # better and `min` otherwise, or with a Quantity that also has its names in trackers and
    # figures; `further` are only in summary.json.
    columns: ClassVar[Mapping[str, Any]] = {}
    further: ClassVar[Mapping[str, Any]] = {}
    of_clients: ClassVar[Sequence[str]] = ()  # names of the values in clients.csv
    # whether local models must be evaluated (`local_evaluation`)
    needs_local: ClassVar[bool] = False
    # whether the clients' personal models must be tested in every evaluated round
    needs_personal: ClassVar[bool] = False
    # whether models must be tested on each client's own test examples in every evaluated round
    needs_own: ClassVar[bool] = False
    # whether the accuracy must be measured by domain (`Record.domains`)
    needs_domains: ClassVar[bool] = False
    # whether the metric uses the predictions for single test examples
    needs_examples: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise ConfigError if tables and reports could not use the declared names."""
        super().__init_subclass__(**options)
        columns, further = cls.columns, cls.further
        cls.columns = cls.further = {}  # a rejected class declares nothing
        cls.columns, cls.further = declared(cls, columns), declared(cls, further)
        if unknown := set(cls.of_clients) - set(cls.columns):
            raise ConfigError(
                f"forgetting_metric: {cls.__name__} has {', '.join(sorted(unknown))} in of_clients;"
                " these must also be columns, their means over the clients"
            )

    def names(self) -> Sequence[str]:
        """Return the columns that the metric has with its options. By default, these are all."""
        return tuple(self.columns)

    def check_run(self, simulation: Any) -> None:
        """Raise ConfigError if the metric is not defined for a run, before it starts."""

    def callback(self) -> Any:
        """Return a callback (`fedexp.trackers.base.Callback`) that sees the models, or None."""
        return None

    def figures(self, record: Record) -> Mapping[str, Callable[[], Any]]:
        """Return functions that draw the metric's own figures (matplotlib), by file name."""
        return {}

    def round_values(self, record: Record) -> dict[str, float]:
        """Return the values of the last recorded round, as columns of rounds.csv.

        By default, these are the means of `local_values` over the round's clients.
        """
        clients = self.client_values(record)
        return {name: _mean(clients.get(name, ())) for name in client_names(self)}

    def local_values(self, record: Record, index: int) -> dict[str, np.ndarray]:
        """Return a value per client, [S] each, for the local models of one round.

        index: the position of the round in `record.local_rounds`.

        """
        return {}

    def client_values(self, record: Record) -> dict[str, np.ndarray]:
        """Return the last round's columns of clients.csv, [S] each, in the order of the cohort.

        The result is empty if the local models of this round were not evaluated.
        """
        recorded = bool(record.local_rounds) and record.local_rounds[-1] == record.rounds[-1]
        if not recorded:
            return {}
        values = self.local_values(record, len(record.local_rounds) - 1)
        return dict(checked(self, values, client_names(self), len(record.sampled[-1])))

    def summary(self, record: Record) -> dict[str, float]:
        """Return the values of the run for summary.json; by default, those of the last round."""
        return self.round_values(record)

    def _run_mean(self, record: Record, key: str) -> float:
        """Return the mean of a value over the clients of each round, averaged over the rounds.

        key: the name of the value in `local_values`.

        """
        return _mean(
            [_mean(self.local_values(record, i)[key]) for i in range(len(record.local_rounds))]
        )


def _mean(values: np.ndarray | Sequence[float]) -> float:
    return float(class_mean(np.asarray(values, dtype=np.float64)))


class BackwardTransfer(ForgettingMetric):
    """`forgetting`: the forgetting F up to this round (FedNTD Eq. 5)."""

    columns: ClassVar = by_name(FORGETTING)

    def round_values(self, record: Record) -> dict[str, float]:
        return {"forgetting": forgetting.forgetting_f(record.matrix)}


class RoundDrop(ForgettingMetric):
    """`round_forgetting`: mean drop of class accuracies since the previous evaluated round.

    See Flashback section 3. If `local` is true, the metric also logs `local_round_forgetting`, the
    drop during local training, for each client and averaged over the clients. Both values start in
    round 2, because the initial model has nothing to forget. The summary contains the means over
    all rounds.
    """

    columns: ClassVar = by_name(ROUND_FORGETTING, LOCAL_ROUND_FORGETTING)
    of_clients = ("local_round_forgetting",)
    local: bool

    def names(self) -> Sequence[str]:
        return tuple(self.columns)[: 1 + self.local]

    @property
    def needs_local(self) -> bool:  # type: ignore[override]
        return self.local

    def round_values(self, record: Record) -> dict[str, float]:
        # compute only the last drop, so that the cost does not grow with the run
        drops = forgetting.round_drop(record.matrix[-3:])
        last = float(drops[-1]) if drops.size else float("nan")
        return {"round_forgetting": last} | super().round_values(record)

    def local_values(self, record: Record, index: int) -> dict[str, np.ndarray]:
        if not self.local:
            return {}
        round, local = record.local_rounds[index], record.local_class_accuracy[index]
        drops = forgetting.local_round_drop(record.distributed(round), local)
        return {"local_round_forgetting": drops if round > 1 else np.full_like(drops, np.nan)}

    def summary(self, record: Record) -> dict[str, float]:
        values = {"round_forgetting": _mean(forgetting.round_drop(record.matrix))}
        if self.local:
            values["local_round_forgetting"] = self._run_mean(record, "local_round_forgetting")
        return values


class ClientDrop(ForgettingMetric):
    """`client_forgetting`: drop of the local models from each client's own best class accuracies.

    This is FlexFed's measure with the opposite sign, averaged over classes and over those clients
    of the cohort that have trained in an earlier round in which local models were tested, so it
    depends on `local_evaluation.every`. It starts in round 2. The summary contains the value of the
    last round.
    """

    columns: ClassVar = {"client_forgetting": "min"}
    of_clients = ("client_forgetting",)
    needs_local = True

    def local_values(self, record: Record, index: int) -> dict[str, np.ndarray]:
        rounds = slice(index + 1)
        drops = forgetting.client_drop(record.sampled[rounds], record.local_class_accuracy[rounds])
        return {"client_forgetting": drops}


class ForgettingDegree(ForgettingMetric):
    """`forgetting_degree`: share of a class's accuracy lost in local training (FedKA Eq. 1).

    The degree is averaged over classes and clients. For a class that the global model never
    predicts correctly, any gain results in a huge negative degree. The degree is therefore clipped
    at -1 before averaging. `fedexp.metrics.forgetting.forgetting_degree` returns the values without
    clipping, [S, C]. The summary is the mean over rounds.
    """

    columns: ClassVar = by_name(Quantity("forgetting_degree", "min", "forgetting/degree"))
    of_clients = ("forgetting_degree",)
    xi: Positive  # small constant in the denominator
    needs_local = True

    def local_values(self, record: Record, index: int) -> dict[str, np.ndarray]:
        before = record.distributed(record.local_rounds[index])
        degree = forgetting.forgetting_degree(before, record.local_class_accuracy[index], self.xi)
        return {"forgetting_degree": class_mean(np.maximum(degree, -1.0))}

    def summary(self, record: Record) -> dict[str, float]:
        return {"forgetting_degree": self._run_mean(record, "forgetting_degree")}


class InOutLocal(ForgettingMetric):
    """In- and out-local accuracy (FedNTD Definition 1, Fig. 4).

    For local models, the metric logs a value per client, and the mean and population standard
    deviation over the cohort. For the global model after the round, the metric logs the accuracies
    on the joint distribution of the cohort.
    """

    columns: ClassVar = by_name(
        Quantity("in_local_accuracy", "max", "local/in_accuracy"),
        Quantity("in_local_accuracy_std", "min", "local/in_accuracy_std"),
        Quantity("out_local_accuracy", "max", "local/out_accuracy"),
        Quantity("out_local_accuracy_std", "min", "local/out_accuracy_std"),
        Quantity("global_in_accuracy", "max", "test/in_accuracy"),
        Quantity("global_out_accuracy", "max", "test/out_accuracy"),
    )
    of_clients = ("in_local_accuracy", "out_local_accuracy")
    needs_local = True

    def round_values(self, record: Record) -> dict[str, float]:
        clients = self.client_values(record)
        values = {}
        for key in self.of_clients:
            column = clients.get(key, np.empty(0))
            values[key] = _mean(column)
            values[f"{key}_std"] = _mean((column - values[key]) ** 2) ** 0.5
        inside = outside = float("nan")
        if clients:
            inside, outside = forgetting.in_out_joint(
                record.class_accuracy[-1], record.sampled_counts(-1)
            )
        return values | {"global_in_accuracy": inside, "global_out_accuracy": outside}

    def local_values(self, record: Record, index: int) -> dict[str, np.ndarray]:
        counts = record.sampled_counts(index)
        inside, outside = forgetting.in_out_local(record.local_class_accuracy[index], counts)
        return {"in_local_accuracy": inside, "out_local_accuracy": outside}


class Consistency(ForgettingMetric):
    """`consistency`: cosine similarity of class accuracies in consecutive evaluated rounds.

    This is FedNTD Fig. 2b. The summary contains the mean over all rounds.
    """

    columns: ClassVar = {"consistency": "max"}

    def round_values(self, record: Record) -> dict[str, float]:
        values = forgetting.consistency(record.matrix[-2:])
        return {"consistency": float(values[-1]) if values.size else float("nan")}

    def summary(self, record: Record) -> dict[str, float]:
        return {"consistency": _mean(forgetting.consistency(record.matrix))}


class ForgettingEvents(ForgettingMetric):
    """Forgetting of single test examples from one evaluated round to the next.

    The rounds.csv columns `forgotten_examples` and `learned_examples` are shares of the test set;
    their difference is the change of accuracy. They start in round 2. The summary contains their
    means over the rounds, `forgetting_events` (how often an example is forgotten, mean over the
    test set) and `unforgettable_examples` (share of the test set). The sources are named in
    `fedexp.metrics.examples`.
    """

    columns: ClassVar = {"forgotten_examples": "min", "learned_examples": "max"}
    further: ClassVar = {"forgetting_events": "min", "unforgettable_examples": "max"}
    needs_examples = True

    def round_values(self, record: Record) -> dict[str, float]:
        return self._shares(record.correct(last=2))

    def summary(self, record: Record) -> dict[str, float]:
        right = record.correct()
        # before the second round, nothing can be forgotten, so these values are undefined too
        known = right if len(right) > 1 else right[:, :0]
        return self._shares(right) | {
            "forgetting_events": _mean(examples.forgetting_events(known)),
            "unforgettable_examples": _mean(examples.unforgettable(known)),
        }

    def _shares(self, right: np.ndarray) -> dict[str, float]:
        return {
            "forgotten_examples": _mean(examples.forgotten_share(right)),
            "learned_examples": _mean(examples.learned_share(right)),
        }


def checked(
    metric: ForgettingMetric, values: Any, names: Sequence[str], clients: int | None = None
) -> Mapping[str, Any]:
    """Return a metric's values after checking that they are those that it declares.

    Infinite values become nan, since JSON and trackers have no infinity.

    names: the declared names. clients: the number of clients if each value must be a sequence with
    one number per client, or None if each value must be a single number. Raises ConfigError for
    other values. Only user-defined metrics return them.
    """
    name = f"forgetting_metric: {type(metric).__name__}"
    if not isinstance(values, Mapping) or set(values) != set(names):
        raise ConfigError(
            f"{name} returns {reprlib.repr(values)}, but must return a dict with a number for each"
            f" name that it declares: {', '.join(names) or 'none'}"
        )
    for key, value in values.items():
        if clients is None:
            valid, wanted = isinstance(value, Real), "one number (nan if undefined)"
        else:
            valid, wanted = are_numbers(value, clients), f"{clients} numbers, one for each client"
        if not valid:
            raise ConfigError(
                f"{name} returns {key}={reprlib.repr(value)}, but {key} must be {wanted}"
            )
    numbers = {key: np.asarray(value, np.float64) for key, value in values.items()}
    defined = {key: np.where(np.isfinite(each), each, np.nan) for key, each in numbers.items()}
    return defined if clients is not None else {key: float(defined[key]) for key in defined}


def are_numbers(values: Any, count: int) -> bool:
    """Return whether `values` is a one-dimensional sequence of `count` numbers."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        return False
    return array.shape == (count,) and array.dtype.kind in "biuf"


def loaded_metrics() -> list[type[ForgettingMetric]]:
    """Return the classes of all metrics of fedexp, and of others that are loaded."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    kinds: list[type[ForgettingMetric]] = [ForgettingMetric]
    for metric in kinds:  # the list grows
        kinds += metric.__subclasses__()
    return kinds


def round_quantities() -> list[Quantity]:
    """Return all values that rounds.csv can have."""
    of_metrics = (each for kind in loaded_metrics() for each in kind.columns.values())
    return list(dict.fromkeys((*OF_ROUNDS, *of_metrics, *OF_TASKS)))


def quantities() -> list[Quantity]:
    """Return all values that runs can have."""
    further = (each for kind in loaded_metrics() for each in kind.further.values())
    every = (ACCURACY, *OF_RUN, *round_quantities(), *further, *BETWEEN_TASKS)
    return list(dict.fromkeys(every))


def main_columns(views: Sequence[str] = VIEWS) -> list[Column]:
    """Return the columns that tables of results show, for one test set after the other."""
    shown = [each for each in quantities() if each.main]
    return [column for view in views for each in shown for column in each.columns((view,))]


class Metrics:
    """The metrics of a run. If two of one class have the same names, their values must be equal.

    Raises ConfigError if metrics of different classes declare the same name.
    """

    def __init__(self, members: Sequence[ForgettingMetric]):
        self.members = members
        owners: dict[str, type] = {}
        for each in members:
            for name in (*each.names(), *each.further):
                if owners.setdefault(name, type(each)) is not type(each):
                    raise ConfigError(
                        f"forgetting_metric: {type(each).__name__} and {owners[name].__name__} both"
                        f" declare {name}; rename it in your metric"
                    )
        columns = [quantity for each in members for quantity in each.columns.values()]
        shown: dict[str, str] = {}
        for quantity in (*OF_ROUNDS, *OF_TASKS, *columns):
            other = shown.setdefault(quantity.tracked, quantity.name)
            if other != quantity.name:
                raise ConfigError(
                    f"forgetting_metric: {quantity.name} and {other} would both be"
                    f" {quantity.tracked} in W&B; rename yours"
                )
        self.needs_local = any(each.needs_local for each in members)
        for each in members if not self.needs_local else ():
            if names := client_names(each):
                raise ConfigError(
                    f"forgetting_metric: {type(each).__name__} has {', '.join(names)} in"
                    " of_clients, so it must have needs_local = True"
                )
        self.needs_personal = any(each.needs_personal for each in members)
        self.needs_own = any(each.needs_own for each in members)
        self.needs_domains = any(each.needs_domains for each in members)
        self.needs_examples = any(each.needs_examples for each in members)

    def names(self) -> list[str]:
        """Return the names of the values in rounds.csv."""
        return distinct(each.names() for each in self.members)

    def client_names(self) -> list[str]:
        """Return the names of the values in clients.csv."""
        return distinct(map(client_names, self.members))

    def summary_names(self) -> list[str]:
        """Return the names of the values in summary.json."""
        return distinct((*each.names(), *each.further) for each in self.members)

    def own_directions(self) -> dict[str, str]:
        """Return `max` or `min` for the names of the user's metrics, which reports do not load."""
        own = (each for each in self.members if f"{__package__}." not in type(each).__module__)
        declared = (q for each in own for q in (*each.columns.values(), *each.further.values()))
        return {quantity.name: str(quantity.better) for quantity in declared}

    def round_values(self, record: Record) -> dict[str, float]:
        """Return the values of the last recorded round."""
        found: dict[str, float] = {}
        for each in self.members:
            with calling(each, "round_values"):
                values = each.round_values(record)
            found |= checked(each, values, each.names())
        return found

    def client_values(self, record: Record) -> dict[str, np.ndarray]:
        """Return the values of the last round's local models, [S] each.

        The result is empty if the local models of this round were not evaluated.
        """
        found: dict[str, np.ndarray] = {}
        if record.local_rounds[-1:] != record.rounds[-1:]:
            return found
        for each in self.members:
            with calling(each, "local_values"):
                found |= each.client_values(record)
        return found

    def summary(self, record: Record) -> dict[str, float]:
        """Return the values of the run for summary.json."""
        found: dict[str, float] = {}
        for each in self.members:
            names = (*each.names(), *each.further)
            with calling(each, "summary"):
                values = each.summary(record)
            numbers = checked(each, values, names)
            found |= {name: as_declared(each.further.get(name), numbers[name]) for name in numbers}
        return found


@contextmanager
def calling(metric: ForgettingMetric, hook: str) -> Iterator[None]:
    """Call a hook of a metric in the block. What goes wrong is named after it."""
    before = modes()
    with naming_hook("forgetting_metric", hook, type(metric)):
        yield
    require_modes(before, f"forgetting_metric: {hook} of {type(metric).__name__}")


def as_declared(quantity: Quantity | None, value: float) -> float:
    """Return a value as an int if its quantity is a whole number, unless it is undefined."""
    is_whole = quantity is not None and quantity.whole and not np.isnan(value)
    return int(value) if is_whole else value


def distinct(names: Iterable[Iterable[str]]) -> list[str]:
    """Return all names once, in the order in which they first appear."""
    return list(dict.fromkeys(itertools.chain.from_iterable(names)))


def client_names(metric: ForgettingMetric) -> list[str]:
    """Return the names of a metric's values in clients.csv, with its options."""
    return [name for name in metric.of_clients if name in metric.names()]
