"""Cohorts of each round, read from a file (config node `cohorts`): to repeat another program's
cohorts."""

import csv
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Checked
from fedexp.rundir import files

Rounds = dict[int, list[int]]  # round from 1 -> its clients, ascending


class Cohorts(Checked, prefix="cohorts."):
    """The cohorts of a run, from `path` or, without one, drawn as `draw` says.

    draw: `seed`, by seeds.sampling. `round`, by numpy's generator of the old kind seeded with the
    number of the round, counted from 0, so that they are the same in all runs with as many clients:
    so do FedNTD's released code and FedML.

    .json: `{"1": [clients], ...}` or a list of lists, which begins with round 1. .csv: columns
    `round` and `client`, such as the clients.csv of an earlier run. Rounds after the last one of
    the run are not used.
    """

    path: str | None
    draw: Literal["seed", "round"] = "seed"

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.path is None or self.draw == "seed"
        require(good, "cohorts.draw", self.draw, "seed, or cohorts.path=null")

    def read(self, rounds: int, num_clients: int, size: int) -> Rounds | None:
        """Return the cohorts of rounds 1 to `rounds`; None for a draw by the seed. size: clients
        that each must have.

        Raises ConfigError that names the file, the round and the client for what is missing, of
        another size, out of range or there twice.
        """
        if self.draw == "round":
            return {number: _of_round(number, num_clients, size) for number in range(1, rounds + 1)}
        if self.path is None:
            return None
        path = Path(self.path)
        table = read_rounds(path)
        for number in range(1, rounds + 1):
            if number not in table:
                raise ConfigError(
                    f"{path}: round {number} is missing, and the run has {rounds} rounds"
                )
            check_clients(path, number, table[number], num_clients, size)
        return {number: sorted(table[number]) for number in range(1, rounds + 1)}


def _of_round(number: int, num_clients: int, size: int) -> list[int]:
    drawn = np.random.RandomState(number - 1).choice(num_clients, size, replace=False)
    return sorted(drawn.tolist())


SAMPLED = Cohorts(path=None)


def check_clients(path: Path, number: int, clients: list[Any], num_clients: int, size: int) -> None:
    """Raise ConfigError for a cohort that a run of so many clients cannot have."""
    where = f"{path}: round {number}"
    for client in clients:
        if type(client) is not int:
            raise ConfigError(f"{where}: client {json.dumps(client)} is not an integer")
        if not 0 <= client < num_clients:
            raise ConfigError(
                f"{where}: client {client} is out of range 0 to {num_clients - 1} (num_clients)"
            )
    for client in clients:
        if clients.count(client) > 1:
            raise ConfigError(f"{where}: client {client} appears twice")
    if len(clients) != size:
        raise ConfigError(
            f"{where}: has {len(clients)} clients, and participation times"
            f" num_clients={num_clients} is {size}"
            + (f"; use participation={len(clients) / num_clients:g}" if clients else "")
        )


def check_begun(directory: Path, cohorts: Rounds | None, rounds: int) -> None:
    """Raise ConfigError where the file now names other clients for the rounds that a run has behind
    it."""
    if cohorts is None or not rounds:
        return
    before = read_rounds(directory / files.CLIENTS)
    for number in range(1, rounds + 1):
        if before.get(number) != cohorts[number]:
            raise ConfigError(
                f"resume={directory}: cohorts.path now names other clients for round {number}"
            )


def read_rounds(path: Path) -> Rounds:
    """Return round -> clients as they stand in a file. Raises ConfigError."""
    if path.suffix not in (".json", ".csv"):
        raise ConfigError(f"cohorts.path={path}: must be a .json or .csv file")
    try:
        text = path.read_text(encoding="utf-8")
        return from_json(text) if path.suffix == ".json" else from_csv(text)
    except OSError as error:
        raise ConfigError(f"cohorts.path={path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        forms = {
            ".json": "an object of round -> clients or a list of lists",
            ".csv": "a table with integers in the columns round and client",
        }
        raise ConfigError(f"{path}: must be {forms[path.suffix]} ({error})") from None


def from_json(text: str) -> Rounds:
    """Return what an object of round -> clients or a list of lists says."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a round appears twice")
        return found

    table = json.loads(text, object_pairs_hook=unique)
    if isinstance(table, list):
        table = dict(enumerate(table, 1))
    return {int(number): list(clients) for number, clients in table.items()}


def from_csv(text: str) -> Rounds:
    """Return what the columns `round` and `client` say. Raises ValueError for clients of several
    roles, which a run draws by itself."""
    rows = list(csv.DictReader(text.splitlines()))
    roles = {row["role"] for row in rows if row.get("role")}
    if len(roles) > 1:
        raise ValueError(f"its clients have different roles, {', '.join(sorted(roles))}")
    found: Rounds = {}
    for row in rows:
        found.setdefault(int(row["round"]), []).append(int(row["client"]))
    return found
