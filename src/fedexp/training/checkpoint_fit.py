"""Check that a valid checkpoint belongs to the model and the run that resume from it."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Tree
from fedexp.rundir import files
from fedexp.rundir.checkpoint_form import ARRAYS, by_view
from fedexp.rundir.client_states import file_name
from fedexp.training.simulation import Simulation


def fits_run(directory: Path, simulation: Simulation) -> Callable[[Mapping[str, Any]], None]:
    """Return a check for `checkpoint.load`.

    The check raises ConfigError for a valid state that does not belong to this run.
    """
    start = simulation.initial_state()
    stage = simulation.stages[0].federation
    example = simulation.first_client_state(simulation.algorithm, stage)

    def check(state: Mapping[str, Any]) -> None:
        try:
            check_numbers(state, simulation)
            demand(tuple(by_view(state)) == tuple(start.tested), "the views of the test set")
            for view, tested in by_view(state).items():
                check_tested(tested, state["round"], simulation)
                personal = simulation.metrics.needs_personal
                check_history(tested, start.tested[view].history.to_tree(), personal)
            check_tree("server", state["server"], start.server)
            for client, version in state["clients"].items():
                path = directory / files.CLIENT_STATES / file_name(client, version)
                storage.check_tree(path)
                check_tree(path.name, storage.load_tree(path, mapped=True), example)
        except Unfit as error:
            raise ConfigError(f"{directory}: a checkpoint is not of this run ({error})") from error

    return check


class Unfit(Exception):
    """A part of a state does not belong to this run."""


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise Unfit(what)


def check_numbers(state: Mapping[str, Any], simulation: Simulation) -> None:
    number, rounds, clients = state["round"], simulation.rounds, simulation.settings.num_clients
    demand(number <= rounds, f"round {number} of {rounds}")
    # A completed or stopped run may be extended.
    demand(state["status"] != "running" or number < rounds, f"running after round {number}")
    largest = max([*state["not_finite"], *state["clients"]], default=0)
    demand(largest < clients, f"client {largest} of {clients}")
    latest = max(state["clients"].values(), default=0)
    demand(latest <= number, "clients' states of later rounds")


def check_tested(found: Mapping[str, Any], number: int, simulation: Simulation) -> None:
    """Check a state's test results.

    number: the round after which the state was saved.
    """
    tested = [each for each, _ in found["accuracy"]]
    ascend = all(a < b for a, b in itertools.pairwise(tested))
    demand(ascend and tested[:1] == [0] and tested[-1] <= number, "the rounds of accuracy")
    rounds, tasks = (tested, len(simulation.stages)) if simulation.has_tasks else ([], 0)
    demand([each for each, _ in found["tasks"]] == rounds, "the rounds of tasks")
    demand(all(len(values) == tasks for _, values in found["tasks"]), "the number of tasks")


def check_history(
    tested: Mapping[str, Any], start: Mapping[str, torch.Tensor], personal: bool = False
) -> None:
    """Check a history.

    start: history of a new run.
    personal: whether clients' personal models are tested.
    """
    found, rounds = tested["history"], [number for number, _ in tested["accuracy"]]
    own = ("personal_accuracy", "personal_peak")
    for name in ("starts", *own):
        wanted = personal if name in own else name in start
        demand((name in found) == wanted, f"history.{name}")
    for name in ARRAYS:
        demand(found[name].dtype == start[name].dtype, f"type of history.{name}")
    for name in {"counts", "rounds_per_task", "starts"} & start.keys():
        demand(torch.equal(found[name], start[name]), f"history.{name}")
    clients, classes = start["counts"].shape[-2:]
    local, sampled = found["local_rounds"], found["sampled"]
    demand(local.dim() == 1 and sampled.dim() == 2, "shape of history.sampled")
    shapes = {
        "rounds": (len(rounds),),
        "class_accuracy": (len(rounds), classes),
        "sampled": (len(local), sampled.shape[1]),
        "local_class_accuracy": (*sampled.shape, classes),
    }
    shapes |= dict.fromkeys(own, (clients, classes)) if personal else {}
    if "distributed_accuracy" in found:
        shapes["distributed_accuracy"] = (len(local), classes)
    for name, shape in shapes.items():
        demand(found[name].shape == shape, f"shape of history.{name}")
    for name in own if personal else ():
        demand(found[name].dtype == torch.float64, f"type of history.{name}")
    demand(found["rounds"].tolist() == rounds, "the rounds of history")
    demand(bool(((sampled >= 0) & (sampled < clients)).all()), "clients of history.sampled")
    known = sorted(set(local.tolist()) & set(rounds))
    demand(local.tolist() == known, "the local rounds of history")


def check_tree(name: str, found: Tree, expected: Tree) -> None:
    """Check that a tree has the names, shapes and types of the expected tree.

    Methods may add names, except to the model's parameters and buffers.
    """
    if isinstance(expected, dict):
        demand(isinstance(found, dict), name)
        named = name.endswith((".params", ".buffers"))  # all names in the model are known
        strange = [str(key) for key in found if key not in expected] if named else []
        demand(not strange, f"{name}.{', '.join(strange)}")
        for key, value in expected.items():
            demand(key in found, f"without {name}.{key}")
            check_tree(f"{name}.{key}", found[key], value)
    elif isinstance(expected, torch.Tensor):
        demand(isinstance(found, torch.Tensor), name)
        for kind in ("shape", "dtype"):
            is_, wanted = getattr(found, kind), getattr(expected, kind)
            demand(is_ == wanted, f"{kind} of {name}: {is_}, not {wanted}")
    else:
        demand(type(found) is type(expected), name)
