"""Check that a checkpoint belongs to the run that resumes from it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Tree
from fedexp.metrics.history import History
from fedexp.rundir import files
from fedexp.rundir.checkpoint import by_view
from fedexp.rundir.client_states import file_name
from fedexp.training.simulation import Simulation

# The shape of each array in a history, for K clients, C classes, E evaluated rounds, L rounds with
# tests of local models, and S clients per cohort.
DIMENSIONS = {
    "rounds": "E",
    "class_accuracy": "EC",
    "local_rounds": "L",
    "sampled": "LS",
    "local_class_accuracy": "LSC",
    "distributed_accuracy": "LC",
    "personal_accuracy": "KC",
    "personal_peak": "KC",
    "labels": "M",
    "right": "EB",
}


def fits_run(directory: Path, simulation: Simulation) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that checks whether a saved state belongs to this run.

    `checkpoint.load` calls the returned function. It raises ConfigError if another run saved the
    state.
    """
    start = simulation.initial_state()
    stage = simulation.stages[0].federation
    example = simulation.first_client_state(simulation.algorithm, stage)

    def check(state: Mapping[str, Any]) -> None:
        try:
            check_numbers(state, simulation)
            require_fit(tuple(by_view(state)) == tuple(start.tested), "the views of the test set")
            for view, tested in by_view(state).items():
                check_rounds(tested, state["round"], simulation)
                check_history(tested["history"], start.tested[view].history, simulation)
            check_tree("server", state["server"], start.server)
            for client, version in state["clients"].items():
                path = directory / files.CLIENT_STATES / file_name(client, version)
                storage.check_tree(path)
                check_tree(path.name, storage.load_tree(path, mapped=True), example)
        except Mismatch as error:
            raise ConfigError(
                f"{directory}: the checkpoint belongs to another run; differing part: {error}"
            ) from error

    return check


class Mismatch(Exception):
    """Raised if a part of a saved state does not belong to this run."""


def require_fit(condition: bool, part: str) -> None:
    if not condition:
        raise Mismatch(part)


def check_numbers(state: Mapping[str, Any], simulation: Simulation) -> None:
    number, rounds, clients = state["round"], simulation.rounds, simulation.settings.num_clients
    require_fit(number <= rounds, f"round {number}, but the run has {rounds} rounds")
    # A completed or stopped run may be extended.
    require_fit(
        state["status"] != "running" or number < rounds,
        f"the status is running, but round {number} is the last one",
    )
    largest = max([*state["not_finite"], *state["clients"]], default=0)
    require_fit(largest < clients, f"client {largest}, but the run has {clients} clients")
    latest = max(state["clients"].values(), default=0)
    require_fit(latest <= number, "client states from a later round")


def check_rounds(tested: Mapping[str, Any], number: int, simulation: Simulation) -> None:
    """Check that the test results in a saved state are from the expected rounds.

    tested: the test results in one view.
    number: the round after which the state was saved.
    """
    rounds = [each for each, _ in tested["accuracy"]]
    require_fit(
        rounds == sorted({0, *rounds}) and rounds[-1] <= number, "which rounds were evaluated"
    )
    require_fit(tested["history"]["rounds"].tolist() == rounds, "which rounds the history contains")
    with_tasks = {each for each, values in tested["tasks"] if len(values) == len(simulation.stages)}
    expected = set(rounds) if simulation.has_tasks else set()
    require_fit(with_tasks == expected, "which rounds have task accuracies")


def check_history(
    found: Mapping[str, torch.Tensor], start: History, simulation: Simulation
) -> None:
    """Check the names and shapes of the arrays in a saved history.

    found: the saved history.
    start: the history of a new run, which has the expected names and shapes.
    """
    expected = start.to_tree()
    personal = (
        {"personal_accuracy", "personal_peak"} if simulation.metrics.needs_personal else set()
    )
    optional = {"distributed_accuracy"}
    strange = (expected.keys() | personal) ^ (found.keys() - optional)
    require_fit(not strange, f"history.{min(strange, default='')}")
    for name in expected.keys() & {"counts", "rounds_per_task", "starts", "labels"}:
        require_fit(torch.equal(found[name], expected[name]), f"history.{name}")
    clients, classes = start.counts.shape[-2:]
    sizes = {"K": clients, "C": classes, "E": len(found["rounds"])}
    sizes["B"] = -(-len(found.get("labels", ())) // 8)  # bytes of one round's packed predictions
    for name, letters in DIMENSIONS.items():
        if name in found:
            shape = tuple(found[name].shape)
            bound = tuple(sizes.setdefault(*pair) for pair in zip(letters, shape, strict=False))
            require_fit(len(letters) == len(shape) and bound == shape, f"shape of history.{name}")


def check_tree(name: str, found: Tree, expected: Tree) -> None:
    """Check that a saved tree has the same names, shapes and types as the expected tree.

    A method may add entries to the tree, but not to the model's parameters or buffers.
    """
    if isinstance(expected, dict):
        require_fit(isinstance(found, dict), name)
        if name.endswith((".params", ".buffers")):
            strange = sorted(map(str, found.keys() - expected.keys()))
            require_fit(not strange, f"{name}.{', '.join(strange)}")
        for key, value in expected.items():
            require_fit(key in found, f"{name}.{key} is missing")
            check_tree(f"{name}.{key}", found[key], value)
    elif isinstance(expected, torch.Tensor):
        require_fit(isinstance(found, torch.Tensor), name)
        for kind in ("shape", "dtype"):
            is_, wanted = getattr(found, kind), getattr(expected, kind)
            require_fit(is_ == wanted, f"{kind} of {name} is {is_}, but must be {wanted}")
    else:
        require_fit(type(found) is type(expected), name)
