"""The models that a run directory keeps: of the last saved round, of the one saved before it, and of every n-th round.

The first two are parts of the checkpoints, which every run writes; `keep_models=n` adds models/round_<number>.pt after
every n-th round. All of them are read with `weights_only=True`: tensors and plain values, no code.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp.rundir import files
from fedexp.rundir.checkpoint_form import check_form, is_count

FOLDER = "models"
NAME = re.compile(r"round_(\d+)\.pt")
HINT = "a run keeps its last model and, with keep_models=<n>, those after every n-th round"


@dataclass(frozen=True)
class KeptModel:
    """The global model after a round, as tensors on the CPU."""

    round: int
    params: Params  # in training, by name
    buffers: Params  # running statistics, by name


def file_of_round(number: int) -> str:
    """Return the path of a round's model in its run directory."""
    return f"{FOLDER}/round_{number}.pt"


def save(directory: Path, number: int, server: Tree) -> None:
    """Write the model after a round. server: its state, of which `params` and `buffers` are kept. Raises
    StorageError."""
    model = {"round": number, "params": server["params"], "buffers": server["buffers"]}
    storage.save_tree(directory / file_of_round(number), model)


def kept_rounds(directory: Path) -> list[int]:
    """Return the rounds whose model is kept and whole, ascending."""
    found = {number for number, path in kept_files(directory).items() if is_whole(path)}
    return sorted(found | {model.round for model in from_checkpoints(directory)[0]})


def load(directory: Path, number: int | None = None) -> KeptModel:
    """Return the model after a round; None: after the last that is kept.

    Raises ConfigError where none is kept of that round, or where it is damaged.
    """
    models, problems = from_checkpoints(directory)
    of_rounds = kept_files(directory)
    rounds = sorted({*of_rounds, *(model.round for model in models)})
    if not rounds:
        raise ConfigError("\n".join(problems) or f"{directory}: no model is kept there; {HINT}")
    wanted = rounds[-1] if number is None else number
    if found := [model for model in models if model.round == wanted]:
        return found[0]
    if wanted not in of_rounds:
        listed = ", ".join(map(str, rounds[:20])) + (", ..." if len(rounds) > 20 else "")
        raise ConfigError(f"{directory}: the model after round {wanted} is not kept; kept: {listed}; {HINT}")
    path = of_rounds[wanted]
    return model_in(path, storage.load_tree(path), wanted)


def kept_files(directory: Path) -> dict[int, Path]:
    """Return round -> file of the models that `keep_models` has written."""
    named = [(NAME.fullmatch(path.name), path) for path in (directory / FOLDER).glob("*.pt")]
    return {int(name[1]): path for name, path in named if name and len(name[1]) < 10 and path.is_file()}


def from_checkpoints(directory: Path) -> tuple[list[KeptModel], list[str]]:
    """Return the models of the checkpoints that are whole, the latest first, and what is wrong with the others."""
    models, problems = [], []
    for name in (files.CHECKPOINT, files.PREVIOUS):
        path = directory / name
        if not path.is_file():
            continue
        try:
            state = storage.load_tree(path)
            check_form(path, state)
            models.append(model_in(path, state["server"] | {"round": state["round"]}, state["round"]))
        except ConfigError as error:
            problems.append(str(error))
    return models, problems


def model_in(path: Path, state: object, number: int) -> KeptModel:
    """Return the model that a loaded file holds; raise ConfigError unless it is one, of that round."""
    if not isinstance(state, dict) or not is_count(state.get("round")) or state["round"] != number:
        raise ConfigError(f"{path}: not a model of round {number}")
    parts: list[Any] = [state.get(part) for part in ("params", "buffers")]
    for part in parts:
        if not (isinstance(part, dict) and all(isinstance(v, torch.Tensor) for v in part.values())):
            raise ConfigError(f"{path}: not a model (its parameters are not tensors by name)")
    return KeptModel(number, *parts)


def is_whole(path: Path) -> bool:
    """Return whether the records of a file are those that were written."""
    try:
        storage.check_tree(path)
    except ConfigError:
        return False
    return True
