"""Save and load the models in a run directory.

The two checkpoints of a run contain the models from the last two saved rounds. `keep_models` adds
models/round_<number>.pt for the chosen rounds. `keep_local_models` adds
models/round_<number>_client_<client>.pt, which contains the model that a client trained in the
round. All files are read with `weights_only=True`, so they contain tensors and plain values but no
code.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp.rundir import files
from fedexp.rundir.checkpoint import check_form

FOLDER = "models"
NAME = re.compile(r"round_(\d{1,9})(?:_client_(\d{1,9}))?\.pt")
HINT = (
    "a run keeps the models in its last two checkpoints; to save more, use keep_models=<n> or"
    " keep_models=[<rounds>]"
)
LOCAL_HINT = "to save the local models from some rounds, use keep_local_models=[<rounds>]"


@dataclass(frozen=True)
class KeptModel:
    """The global model after a round, or a client's local model, as tensors on the CPU."""

    round: int
    params: Params  # name -> trained parameter
    buffers: Params  # name -> buffer, such as running statistics
    client: int | None = None  # None: the global model


def file_of_round(number: int, client: int | None = None) -> str:
    """Return the path of a saved model relative to the run directory.

    number: the round. client: the client that trained a local model, or None for the global model.
    """
    whose = "" if client is None else f"_client_{client}"
    return f"{FOLDER}/round_{number}{whose}.pt"


def save(
    directory: Path, number: int, model: Mapping[str, Params], client: int | None = None
) -> None:
    """Write the global model after round `number`, or the model that a client trained in it.

    model: a dict with `params` and `buffers`. The tensors are copied first, since saving a view of
    stacked tensors would save the whole stack. Raises StorageError if the file cannot be written.
    """
    content: Tree = {"round": number} if client is None else {"round": number, "client": client}
    for part in ("params", "buffers"):
        content[part] = {name: value.clone() for name, value in model[part].items()}
    storage.save_tree(directory / file_of_round(number, client), content)


def model_files(directory: Path) -> dict[tuple[int, int | None], Path]:
    """Return the files in models/ by (round, client). The client is None for a global model."""
    found: dict[tuple[int, int | None], Path] = {}
    for path in (directory / FOLDER).glob("*.pt"):
        if (name := NAME.fullmatch(path.name)) and path.is_file():
            found[int(name[1]), None if name[2] is None else int(name[2])] = path
    return found


def kept_rounds(directory: Path) -> list[int]:
    """Return the rounds whose global model is completely saved, in ascending order."""
    rounds = {model.round for model in from_checkpoints(directory)[0]}
    for (number, client), path in model_files(directory).items():
        if client is None and is_complete(path):
            rounds.add(number)
    return sorted(rounds)


def kept_clients(directory: Path, number: int) -> list[int]:
    """Return the clients whose local model from a round is completely saved, in ascending order."""
    files_of_round = {c: path for (n, c), path in model_files(directory).items() if n == number}
    return sorted(c for c, path in files_of_round.items() if c is not None and is_complete(path))


def local_rounds(directory: Path) -> list[int]:
    """Return the rounds with files of local models, in ascending order."""
    return sorted({number for number, client in model_files(directory) if client is not None})


def load(directory: Path, number: int | None = None, client: int | None = None) -> KeptModel:
    """Return a saved model of a run.

    number: the round, or None for the last round with a saved model. client: the client that
        trained the local model, or None for the global model after the round.

    Raises ConfigError if the model was not saved or its file is damaged.
    """
    kept, problems = from_checkpoints(directory) if client is None else ([], [])
    models = {model.round: model for model in reversed(kept)}
    paths = {n: path for (n, c), path in model_files(directory).items() if c == client}
    rounds = sorted(models.keys() | paths.keys())
    wanted = rounds[-1] if rounds and number is None else number
    if wanted in models:
        return models[wanted]
    if wanted in paths:
        return check_model(paths[wanted], storage.load_tree(paths[wanted]), wanted, client)
    if not rounds and problems:
        raise ConfigError("\n".join(problems))
    whose = "the global model" if client is None else f"the model of client {client}"
    of_round = "" if wanted is None else f" from round {wanted}"
    kept_here = f"; saved rounds: {format_numbers(rounds)}" if rounds else ""
    hint = HINT if client is None else LOCAL_HINT
    raise ConfigError(f"{directory}: {whose}{of_round} was not saved{kept_here}; {hint}")


def format_numbers(numbers: Sequence[int]) -> str:
    """Join at most the first 20 numbers with commas."""
    return ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")


def from_checkpoints(directory: Path) -> tuple[list[KeptModel], list[str]]:
    """Return the models in valid checkpoints, latest first, and messages about invalid ones."""
    models, problems = [], []
    for name in (files.CHECKPOINT, files.PREVIOUS):
        path = directory / name
        if not path.is_file():
            continue
        try:
            state = storage.load_tree(path)
            check_form(path, state)
            server = state["server"]
            models.append(KeptModel(state["round"], server["params"], server["buffers"]))
        except ConfigError as error:
            problems.append(str(error))
    return models, problems


def check_model(path: Path, state: object, number: int, client: int | None) -> KeptModel:
    """Return the model in the content `state` of a file.

    Raises ConfigError unless the content is the model from this round and client.
    """
    if not isinstance(state, dict) or state.get("round") != number:
        raise ConfigError(f"{path}: not the model from round {number}")
    if client is not None and state.get("client") != client:
        raise ConfigError(f"{path}: not the model of client {client}")
    if not {"params", "buffers"} <= state.keys():
        raise ConfigError(f"{path}: not a model")
    return KeptModel(number, state["params"], state["buffers"], client=client)


def is_complete(path: Path) -> bool:
    """Return whether the checksums of all records in a file match."""
    try:
        storage.check_tree(path)
    except ConfigError:
        return False
    return True
