"""Choose the clients that take part in each round (config group `cohorts`).

Reading the clients from a file makes it possible to repeat the cohorts of another program. The
other laws of participation are in participation.py.
"""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Checked, OpenShare, Share, ShareBelow1
from fedexp.core.rng import generator_for
from fedexp.core.storage import without_repetitions

Rounds = dict[int, list[int]]  # round (from 1) -> its clients in ascending order


@dataclass(frozen=True)
class Clients:
    """What a law of participation knows about a run."""

    rounds: int
    size: int  # the cohort size that `participation` gives
    counts: np.ndarray  # int [K, C]: training labels per client and class in the first round
    seed: int  # seeds.sampling

    @property
    def number(self) -> int:
        return len(self.counts)


class Cohorts(Checked, ABC, prefix="cohorts."):
    """Base class of the options of the config group `cohorts`.

    dropout: the probability that a client of the cohort drops out in a round. Each draw depends
    only on the seed, the round and the client, and clients that drop out with a probability also
    drop out with any higher one.
    dropout_at: when a client drops out. `start`: it never starts, so it receives nothing and keeps
    its state. `upload`: it trains and may change its state, but its messages are lost.
    stragglers: the fraction of clients, rounded to a whole number, that do less local training.
    straggler_work: the fraction of local training that they do, at least one step. None: each does
    a whole number of epochs, drawn from 1 to `local.epochs` with equal probabilities (T. Li et al.,
    MLSys 2020, section 5.2); with `local.steps`, of steps.
    stragglers_drawn: `round`: which clients of a cohort are stragglers, and how much they do, is
    drawn anew in each round. `client`: once, from all clients.
    """

    dropout: ShareBelow1 = field(default=0.0, metadata={"neutral": 0.0})
    dropout_at: Literal["start", "upload"] = field(default="start", metadata={"neutral": "start"})

    stragglers: Share = field(default=0.0, metadata={"neutral": 0.0})
    straggler_work: OpenShare | None = field(default=None, metadata={"neutral": None})
    stragglers_drawn: Literal["round", "client"] = field(
        default="round", metadata={"neutral": "round"}
    )

    def slow(
        self, seed: int, number: int, cohort: Sequence[int], num_clients: int, usual: int
    ) -> dict[int, float]:
        """Return the fraction of local training that each straggler of a cohort does.

        seed: seeds.sampling. number: the round. usual: local.epochs or local.steps.
        """
        everyone, drawn = np.asarray(cohort), number
        if self.stragglers_drawn == "client":
            everyone, drawn = np.arange(num_clients), 0
        order = generator_for(seed, "slow clients", drawn).permutation(everyone)
        chosen = order[: round(self.stragglers * len(everyone))].tolist()
        found = {}
        for client in sorted({*chosen} & {*cohort}):
            draw = generator_for(seed, "work of slow clients", drawn, client).random()
            found[client] = self.straggler_work or (1 + int(draw * usual)) / usual
        return found

    def dropped(self, seed: int, number: int, clients: Sequence[int]) -> list[int]:
        """Return those of the clients that drop out in round `number`. seed: seeds.sampling."""
        if not self.dropout:
            return []
        draws = {each: generator_for(seed, "dropout", number, each).random() for each in clients}
        return [each for each, draw in draws.items() if draw < self.dropout]

    @abstractmethod
    def plan(self, clients: Clients) -> Rounds | None:
        """Return the cohorts of all rounds, with clients in ascending order.

        If the result is None, `fedexp.training.exchange.sample` draws them.
        """


Size = Literal["fixed", "binomial"]


def draw_size(size: Size, clients: Clients, number: int) -> int:
    """Return the size of a round's cohort.

    With `binomial`, each client takes part independently with the same probability, so the size
    has a binomial distribution. Empty cohorts are drawn again.
    """
    if size == "fixed":
        return clients.size
    rng, drawn = generator_for(clients.seed, "cohort size", number), 0
    while not drawn:
        drawn = int(rng.binomial(clients.number, clients.size / clients.number))
    return drawn


class Uniform(Cohorts):
    """All clients are equally likely to take part. The cohorts can also be read from a file.

    path: a .json file contains `{"1": [clients], ...}`, or a list of lists that begins with round
    1. A .csv file has the columns `round` and `client`, as in the clients.csv of an earlier run.
    Rounds in the file after the run's last round are ignored.
    draw: how random cohorts are drawn. `seed` uses the seed seeds.sampling. `round` seeds numpy's
    legacy generator (RandomState) with the number of the round, counted from 0, as FedNTD's
    released code and FedML do. The cohorts are then the same in all runs that have the same number
    of clients and the same cohort size.
    """

    path: str | None = None
    draw: Literal["seed", "round"] = "seed"
    size: Size = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.path is None or self.draw == "seed"
        require(good, "cohorts.draw", self.draw, "seed if cohorts.path is set")
        good = self.size == "fixed" or (self.path is None and self.draw == "seed")
        wanted = "fixed if cohorts.path is set or cohorts.draw=round"
        require(good, "cohorts.size", self.size, wanted)

    def plan(self, clients: Clients) -> Rounds | None:
        """Return the cohorts of all rounds, or None if seeds.sampling draws them in each round.

        The cohorts in a file may have different sizes. Raises ConfigError if a round is missing or
        has no client, if all cohorts have one size that is not that of `participation`, or if a
        client is out of range or appears twice. The message names the file, the round and the
        client.
        """
        numbers = range(1, clients.rounds + 1)
        if self.draw == "round":
            return {number: draw_round(number, clients.number, clients.size) for number in numbers}
        if self.path is not None:
            return self.read(Path(self.path), clients)
        if self.size == "fixed":
            return None
        return {number: self.draw_binomial(number, clients) for number in numbers}

    def draw_binomial(self, number: int, clients: Clients) -> list[int]:
        rng = generator_for(clients.seed, "cohort", number)
        size = draw_size(self.size, clients, number)
        return sorted(rng.choice(clients.number, size, replace=False).tolist())

    def read(self, path: Path, clients: Clients) -> Rounds:
        found = check_plan(str(path), read_rounds(path), clients)
        sizes = {len(cohort) for cohort in found.values()}
        if len(sizes) == 1 and sizes != {clients.size}:
            size = min(sizes)
            raise ConfigError(
                f"{path}: each round has {size} clients, but must have {clients.size}"
                f" (participation times num_clients={clients.number}); use"
                f" participation={size / clients.number:g}"
            )
        return found


def draw_round(number: int, num_clients: int, size: int) -> list[int]:
    drawn = np.random.RandomState(number - 1).choice(num_clients, size, replace=False)
    return sorted(drawn.tolist())


def check_plan(where: str, plan: Mapping[int, Sequence[Any]], clients: Clients) -> Rounds:
    """Return the cohorts of all rounds of a run, with clients in ascending order.

    Raises ConfigError if a round is missing or has no client, or if a client is out of range or
    appears twice. where: the origin of the plan, for the message.
    """
    for number in range(1, clients.rounds + 1):
        if number not in plan:
            raise ConfigError(
                f"{where}: round {number} is missing, but the run has {clients.rounds} rounds"
            )
        check_clients(f"{where}: round {number}", plan[number], clients.number)
    return {number: sorted(map(int, plan[number])) for number in range(1, clients.rounds + 1)}


def check_clients(where: str, clients: Sequence[Any], num_clients: int) -> None:
    """Raise ConfigError unless a cohort has different clients from 0 to num_clients - 1."""
    for client in clients:
        is_integer = isinstance(client, int | np.integer) and not isinstance(client, bool)
        if not is_integer or not 0 <= client < num_clients:
            raise ConfigError(
                f"{where}: client {json.dumps(client, default=str)} must be an integer from 0 to"
                f" {num_clients - 1} (num_clients={num_clients})"
            )
    given = [*clients]
    for client in given:
        if given.count(client) > 1:
            raise ConfigError(f"{where}: client {client} appears twice")
    if not given:
        raise ConfigError(f"{where}: has no client")


def read_rounds(path: Path) -> Rounds:
    """Read the clients of each round from a file. Raises ConfigError if the file cannot be read."""
    if path.suffix not in (".json", ".csv"):
        raise ConfigError(f"cohorts.path={path}: must be a .json or .csv file")
    try:
        text = path.read_text(encoding="utf-8")
        found = from_json(text) if path.suffix == ".json" else from_csv(text)
    except OSError as error:
        raise ConfigError(f"cohorts.path={path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        forms = {
            ".json": "a JSON object that maps each round to a list of clients, or a list of lists",
            ".csv": "a csv table with integers in the columns round and client",
        }
        raise ConfigError(f"{path}: must be {forms[path.suffix]} ({error})") from None
    if (first := min(found, default=1)) < 1:
        raise ConfigError(
            f"{path}: round {first}: rounds are counted from 1, so a file that counts them from 0"
            " would shift every cohort; add 1 to each round"
        )
    return found


def from_json(text: str) -> Rounds:
    """Parse a JSON object, or a list of lists, that gives the clients of each round."""
    table = json.loads(text, object_pairs_hook=without_repetitions)
    if isinstance(table, list):
        table = dict(enumerate(table, 1))
    found = {int(number): list(clients) for number, clients in table.items()}
    if len(found) < len(table):
        raise ValueError("a round appears twice")
    return found


def from_csv(text: str) -> Rounds:
    """Parse a csv table that gives the clients of each round.

    Raises ValueError if clients have different roles, since such cohorts are always drawn.
    """
    rows = list(csv.DictReader(text.splitlines()))
    roles = {row["role"] for row in rows if row.get("role")}
    if len(roles) > 1:
        raise ValueError(f"the clients have different roles: {', '.join(sorted(roles))}")
    found: Rounds = {}
    for row in rows:
        found.setdefault(int(row["round"]), []).append(int(row["client"]))
    return found
