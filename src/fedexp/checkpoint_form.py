"""What a checkpoint must look like before a run goes on from it: its form, then the model and the run it belongs to.

A file may load well and yet be of another run, or be written by hand. What is wrong with it is damage, as is a wrong
checksum: the checkpoint before it is used.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedexp import files
from fedexp.client_states import file_name
from fedexp.errors import ConfigError
from fedexp.experiment import CHECKPOINT_FORMAT, Experiment
from fedexp.tree import Tree
from fedexp.views import PLAIN, VIEWS, file_of

TABLES = (files.ROUNDS, files.CLIENTS, files.TASKS, *(file_of(files.CLASSES, view) for view in VIEWS))
STATUSES = ("running", "completed", "diverged")


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def is_share(value: Any) -> bool:
    """An accuracy; nan where a class or task has no test example."""
    return type(value) is float and (0 <= value <= 1 or math.isnan(value))


def is_dict(key: Callable[[Any], bool], value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda node: isinstance(node, dict) and all(key(k) and value(v) for k, v in node.items())


def is_list(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda node: isinstance(node, list) and all(item(each) for each in node)


def is_pair(value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """(round, value)"""
    return lambda node: isinstance(node, tuple | list) and len(node) == 2 and is_count(node[0]) and value(node[1])


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# Key -> whether a value has the right type: what the tests in one view have found, and a whole checkpoint.
TESTED: Mapping[str, Callable[[Any], bool]] = {
    "accuracy": is_list(is_pair(is_share)),
    "tasks": is_list(is_pair(is_list(is_share))),
    "history": is_dict(is_text, is_tensor),
}
FORM: Mapping[str, Callable[[Any], bool]] = {
    **TESTED,
    "round": is_count,
    "examples": is_count,
    "train_seconds": is_seconds,
    "seconds": is_seconds,
    "status": lambda value: is_text(value) and value in STATUSES,
    "not_finite": is_list(is_count),
    "wandb_id": lambda value: value is None or is_text(value),
    "server": lambda value: isinstance(value, dict) and {"params", "buffers"} <= value.keys(),
    "clients": is_dict(is_count, is_count),
    "alignment": is_list(lambda value: isinstance(value, dict)),
    "lengths": is_dict(lambda key: is_text(key) and key in TABLES, is_count),
}
OPTIONAL: Mapping[str, Callable[[Any], bool]] = {  # what older checkpoints lack
    "checksums": is_dict(lambda key: is_text(key) and key in TABLES, is_count),
    "views": is_dict(
        lambda view: view in VIEWS and view != PLAIN,
        lambda tested: (
            is_dict(is_text, lambda _: True)(tested)
            and tested.keys() == TESTED.keys()
            and all(fits(tested[key]) for key, fits in TESTED.items())
        ),
    ),
    "spans": is_list(lambda value: isinstance(value, dict) and is_count(value.get("first"))),
}
ARRAYS = ("counts", "rounds_per_task", "rounds", "class_accuracy", "local_rounds", "sampled", "local_class_accuracy")


def check_form(path: Path, state: Any) -> None:
    """Raises ConfigError unless a loaded checkpoint has the keys and types of one."""
    if not isinstance(state, dict):
        raise ConfigError(f"{path}: not a checkpoint (holds {type(state).__name__})")
    if state.get("format") != CHECKPOINT_FORMAT:
        raise ConfigError(f"{path}: format {state.get('format')}, this fedexp reads {CHECKPOINT_FORMAT}")
    if missing := [key for key in FORM if key not in state]:
        raise ConfigError(f"{path}: not a checkpoint of a run (without {', '.join(missing)})")
    if strange := [str(key) for key in state if key not in {*FORM, *OPTIONAL, "format"}]:
        raise ConfigError(f"{path}: not a checkpoint of a run (with {', '.join(strange)})")
    for key, fits in {**FORM, **OPTIONAL}.items():
        if key in state and not fits(state[key]):
            raise ConfigError(f"{path}: {key} is not what a checkpoint holds")
    histories = [tested["history"] for tested in by_view(state).values()]
    if missing := [name for name in ARRAYS for history in histories if name not in history]:
        raise ConfigError(f"{path}: history is not what a checkpoint holds (without {', '.join(missing)})")


def by_view(state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """View of the test set -> what a checkpoint has of it; the plain one stands in the checkpoint itself."""
    return {PLAIN: state} | state.get("views", {})


def fits_run(directory: Path, experiment: Experiment) -> Callable[[Mapping[str, Any]], None]:
    """A check for `checkpoint.load`: raises ConfigError for a state, of the right form, that is not of this run."""
    start = experiment.initial_state()
    stage = experiment.stages[0].federation
    example = experiment.algorithm.client_init(experiment.initial, stage)

    def check(state: Mapping[str, Any]) -> None:
        try:
            check_numbers(state, experiment)
            demand(tuple(by_view(state)) == tuple(start.tested), "the views of the test set")
            for view, tested in by_view(state).items():
                check_tested(tested, state["round"], experiment)
                check_history(tested, start.tested[view].history.to_tree())
            check_tree("server", state["server"], start.server)
            for client, version in state["clients"].items():
                path = directory / files.CLIENT_STATES / file_name(client, version)
                files.check_tree(path)
                check_tree(path.name, files.load_tree(path, mapped=True), example)
        except Unfit as error:
            raise ConfigError(f"{directory}: a checkpoint is not of this run ({error})") from error

    return check


class Unfit(Exception):
    """What of a state is not of this run."""


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise Unfit(what)


def check_numbers(state: Mapping[str, Any], experiment: Experiment) -> None:
    number, rounds, clients = state["round"], experiment.rounds, experiment.settings.num_clients
    demand(number <= rounds, f"round {number} of {rounds}")
    over = state["status"] == "completed"
    demand(over == (number == rounds) or state["status"] == "diverged", f"{state['status']} after round {number}")
    named = [*state["not_finite"], *state["clients"]]
    demand(all(client < clients for client in named), f"client {max(named, default=0)} of {clients}")
    demand(all(version <= number for version in state["clients"].values()), "clients' states of later rounds")


def check_tested(found: Mapping[str, Any], number: int, experiment: Experiment) -> None:
    """number: the round after which the state was saved."""
    tested = [each for each, _ in found["accuracy"]]
    demand(bool(tested) and tested[0] == 0 and tested[-1] <= number, "the rounds of accuracy")
    demand(all(a < b for a, b in itertools.pairwise(tested)), "the rounds of accuracy")
    names = (tested, len(experiment.stages)) if experiment.has_tasks else ([], 0)
    demand([each for each, _ in found["tasks"]] == names[0], "the rounds of tasks")
    demand(all(len(values) == names[1] for _, values in found["tasks"]), "the number of tasks")


def check_history(tested: Mapping[str, Any], start: Mapping[str, torch.Tensor]) -> None:
    """start: the history of a run that has just begun."""
    found = tested["history"]
    for name in ARRAYS:
        demand(found[name].dtype == start[name].dtype, f"type of history.{name}")
    for name in ("counts", "rounds_per_task"):
        demand(torch.equal(found[name], start[name]), f"history.{name}")
    rounds, local = found["rounds"].tolist(), found["local_rounds"]
    demand(rounds == [number for number, _ in tested["accuracy"]], "the rounds of history")
    clients, classes = start["counts"].shape[-2:]
    demand(found["class_accuracy"].shape == (len(rounds), classes), "shape of history.class_accuracy")
    sampled, accuracy = found["sampled"], found["local_class_accuracy"]
    demand(local.dim() == 1 and sampled.dim() == 2 and len(sampled) == len(local), "shape of history.sampled")
    demand(accuracy.shape == (*sampled.shape, classes), "shape of history.local_class_accuracy")
    demand(bool(((sampled >= 0) & (sampled < clients)).all()), "clients of history.sampled")
    demand(local.tolist() == sorted(set(local.tolist()) & set(rounds)), "the local rounds of history")


def check_tree(name: str, found: Tree, expected: Tree) -> None:
    """Names, shapes and types of what a run begins with must be in what it goes on from; methods may add to it."""
    if isinstance(expected, dict):
        demand(isinstance(found, dict), name)
        named = name.endswith((".params", ".buffers"))  # of the model, all of whose names are known
        strange = [str(key) for key in found if key not in expected] if named else []
        demand(not strange, f"{name}.{', '.join(strange)}")
        for key, value in expected.items():
            demand(key in found, f"without {name}.{key}")
            check_tree(f"{name}.{key}", found[key], value)
    elif is_tensor(expected):
        demand(is_tensor(found), name)
        demand(found.shape == expected.shape, f"shape of {name}: {list(found.shape)}, not {list(expected.shape)}")
        demand(found.dtype == expected.dtype, f"type of {name}: {found.dtype}, not {expected.dtype}")
    else:
        demand(type(found) is type(expected), name)
