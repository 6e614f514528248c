"""The models in a run directory: from the last two saved rounds and from chosen rounds.

The models of the last two saved rounds are in the checkpoints, which every run writes.
`keep_models` adds models/round_<number>.pt for the chosen rounds. `keep_local_models` adds
models/round_<number>_client_<client>.pt, the model that a client trained in the round. All files
are read with `weights_only=True`, so they contain tensors and plain values but no code.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp.rundir import files
from fedexp.rundir.checkpoint_form import check_form
from fedexp.rundir.schema import fits

FOLDER = "models"
NAME = re.compile(r"round_(\d{1,9})\.pt")
OF_CLIENT = re.compile(r"round_(\d{1,9})_client_(\d{1,9})\.pt")
HINT = (
    "a run keeps its last model and, with keep_models=<n> or keep_models=[<rounds>], those after"
    " these rounds"
)
LOCAL_HINT = "keep_local_models=[<rounds>] keeps the local models of these rounds"


@dataclass(frozen=True)
class KeptModel:
    """The global model after a round or a client's local model, as tensors on the CPU."""

    round: int
    params: Params  # name -> trained parameter
    buffers: Params  # name -> buffer, such as running statistics
    client: int | None = None  # None: the global model


def file_of_round(number: int, client: int | None = None) -> str:
    """Return the path of a round's model, relative to the run directory.

    client: the client of a local model; None for the global model.
    """
    whose = "" if client is None else f"_client_{client}"
    return f"{FOLDER}/round_{number}{whose}.pt"


def save(directory: Path, number: int, server: Tree) -> None:
    """Write the global model after a round.

    server: the server state; its `params` and `buffers` are saved. Raises StorageError.
    """
    model = {"round": number, "params": server["params"], "buffers": server["buffers"]}
    storage.save_tree(directory / file_of_round(number), model)


def save_local(directory: Path, number: int, client: int, model: Tree) -> None:
    """Write the model that a client trained in a round.

    model: a dict with `params` and `buffers`. They are copied first, since saving a view of stacked
    tensors would save the whole stack. Raises StorageError.
    """
    copied = {
        part: {k: v.clone() for k, v in model[part].items()} for part in ("params", "buffers")
    }
    storage.save_tree(
        directory / file_of_round(number, client), {"round": number, "client": client} | copied
    )


def kept_rounds(directory: Path) -> list[int]:
    """Return the rounds with a complete saved model, in ascending order."""
    found = {number for number, path in kept_files(directory).items() if is_whole(path)}
    return sorted(found | {model.round for model in from_checkpoints(directory)[0]})


def kept_clients(directory: Path, number: int) -> list[int]:
    """Return the clients with a complete local model of a round, in ascending order."""
    return sorted(
        client for client, path in local_files(directory).get(number, {}).items() if is_whole(path)
    )


def load(directory: Path, number: int | None = None, client: int | None = None) -> KeptModel:
    """Return a saved model of a run.

    number: the round; None for the last round with such a model. client: return the model that this
    client trained in the round; None for the global model after the round.

    Raises ConfigError if there is no such model or its file is damaged.
    """
    if client is not None:
        return load_local(directory, number, client)
    kept, problems = from_checkpoints(directory)
    models, of_rounds = {model.round: model for model in reversed(kept)}, kept_files(directory)
    rounds = sorted(models.keys() | of_rounds.keys())
    if not rounds:
        raise ConfigError("\n".join(problems) or f"{directory}: no model is kept there; {HINT}")
    wanted = rounds[-1] if number is None else number
    if wanted in models:
        return models[wanted]
    if wanted in of_rounds:
        return model_in(of_rounds[wanted], storage.load_tree(of_rounds[wanted]), wanted)
    raise ConfigError(
        f"{directory}: the model after round {wanted} is not kept; kept: {listed(rounds)}; {HINT}"
    )


def load_local(directory: Path, number: int | None, client: int) -> KeptModel:
    """Return the model that a client trained in a round, see `load`."""
    found, problem = local_files(directory), ""
    wanted = max(found, default=0) if number is None else number
    if not found:
        problem = f"no local model is kept there; {LOCAL_HINT}"
    elif wanted not in found:
        kept = listed(sorted(found))
        problem = f"no local model of round {wanted} is kept; rounds: {kept}; {LOCAL_HINT}"
    elif client not in found[wanted]:
        kept = listed(sorted(found[wanted]))
        problem = f"no model of client {client} is kept of round {wanted}; clients: {kept}"
    if problem:
        raise ConfigError(f"{directory}: {problem}")
    path = found[wanted][client]
    return model_in(path, storage.load_tree(path), wanted, client)


def listed(numbers: Sequence[int]) -> str:
    """Return numbers separated by commas, at most the first 20."""
    return ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")


def kept_files(directory: Path) -> dict[int, Path]:
    """Return round -> file of the global models that `keep_models` saved."""
    named = [(NAME.fullmatch(path.name), path) for path in (directory / FOLDER).glob("*.pt")]
    return {int(name[1]): path for name, path in named if name and path.is_file()}


def local_files(directory: Path) -> dict[int, dict[int, Path]]:
    """Return round -> client -> file of the local models that `keep_local_models` saved."""
    found: dict[int, dict[int, Path]] = {}
    for path in (directory / FOLDER).glob("*.pt"):
        if (name := OF_CLIENT.fullmatch(path.name)) and path.is_file():
            found.setdefault(int(name[1]), {})[int(name[2])] = path
    return found


def from_checkpoints(directory: Path) -> tuple[list[KeptModel], list[str]]:
    """Return the models of valid checkpoints, latest first, and messages about the others."""
    models, problems = [], []
    for name in (files.CHECKPOINT, files.PREVIOUS):
        path = directory / name
        if not path.is_file():
            continue
        try:
            state = storage.load_tree(path)
            check_form(path, state)
            models.append(
                model_in(path, state["server"] | {"round": state["round"]}, state["round"])
            )
        except ConfigError as error:
            problems.append(str(error))
    return models, problems


def model_in(path: Path, state: object, number: int, client: int | None = None) -> KeptModel:
    """Return the model in a loaded file.

    Raises ConfigError unless the file has a model of this round and client.
    """
    if not isinstance(state, dict) or not fits(state.get("round"), int) or state["round"] != number:
        raise ConfigError(f"{path}: not a model of round {number}")
    if client is not None and state.get("client") != client:
        raise ConfigError(f"{path}: not a model of client {client}")
    parts: dict[str, Any] = {part: state.get(part) for part in ("params", "buffers")}
    if not fits(parts, {str: {str: torch.Tensor}}):
        raise ConfigError(f"{path}: not a model (its parameters are not tensors by name)")
    return KeptModel(number, **parts, client=client)


def is_whole(path: Path) -> bool:
    """Return whether the checksums of all records of a file are right."""
    try:
        storage.check_tree(path)
    except ConfigError:
        return False
    return True
