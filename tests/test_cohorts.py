"""Cohorts from a file: its clients take part, and every error in the file gives one message."""

import json

import numpy as np
import pytest

from fedexp.config.cohorts import Cohorts, check_completed_rounds
from fedexp.config.settings import Seeds
from fedexp.core.errors import ConfigError
from fedexp.training.exchange import sample
from fedexp.training.rounds import play_round
from toy_federation import make_simulation


def read(path, rounds=3):
    return Cohorts(path=str(path)).read(rounds, 5, 4)


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


GOOD = {"1": [3, 0, 1, 2], "2": [4, 3, 2, 1], "3": [0, 1, 2, 4], "4": [9]}
ASCENDING = {1: [0, 1, 2, 3], 2: [1, 2, 3, 4], 3: [0, 1, 2, 4]}


def test_cohort_file_formats_agree(tmp_path):
    rows = [
        "round,client,examples",
        *(f"{r},{c},7" for r, clients in GOOD.items() for c in clients),
    ]
    forms = {"a.json": GOOD, "b.json": list(GOOD.values()), "c.csv": "\n".join(rows)}
    for name, content in forms.items():
        assert read(write(tmp_path / name, content)) == ASCENDING
    assert Cohorts(path=None).read(3, 5, 4) is None


def test_draw_by_round_number_equals_numpy():
    """Before every draw, numpy's global generator is seeded with the round number from 0. The run's
    seed does not matter."""
    expected = {}
    for number in (1, 2, 3):
        np.random.seed(number - 1)  # noqa: NPY002
        expected[number] = sorted(np.random.choice(100, 10, replace=False).tolist())  # noqa: NPY002
    cohorts = Cohorts(path=None, draw="round")
    assert cohorts.read(3, 100, 10) == expected
    assert expected[1] == [2, 16, 26, 54, 55, 73, 75, 86, 93, 95]
    for other in (5, 6):
        simulation = make_simulation(
            cohorts=cohorts, seeds=Seeds(partition=0, sampling=other, training=0)
        )
        assert sample(simulation, 1) == cohorts.read(1, simulation.settings.num_clients, 4)[1]
    with pytest.raises(
        ConfigError, match=r"cohorts.draw=round: must be seed if cohorts.path is set"
    ):
        Cohorts(path="a.json", draw="round")
    with pytest.raises(ConfigError, match=r"cohorts.draw='?dice"):
        Cohorts(path=None, draw="dice")


def test_clients_listed_in_the_file_are_trained(tmp_path):
    simulation = make_simulation(cohorts=Cohorts(path=str(write(tmp_path / "cohorts.json", GOOD))))
    state = simulation.initial_state()
    for number in (1, 2, 3):
        result = play_round(simulation, state)
        assert list(result.cohort.clients) == ASCENDING[number]
        state.advance(result)
    drawn = make_simulation()
    assert [sample(drawn, number) for number in (1, 2, 3)] != list(ASCENDING.values())


FOUR = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.json", None, "cannot be read .No such file"),
        ("file.txt", "1", "json or .csv"),
        ("file.json", "{", "maps each round to a list of clients"),
        ("file.json", "3", "maps each round to a list of clients"),
        ("file.json", {"1": FOUR, "3": FOUR}, "round 2 is missing.*3 rounds"),
        ("file.json", {"0": FOUR}, "round 1 is missing"),
        ("file.json", '{"1": [0, 1, 2, 3], "1": [0, 1, 2, 4]}', "a round appears twice"),
        ("file.json", GOOD | {"2": 4}, "maps each round to a list of clients"),
        (
            "file.json",
            GOOD | {"2": [0, 1, 2, 5]},
            "round 2: client 5 must be an integer from 0 to 4",
        ),
        (
            "file.json",
            GOOD | {"2": [0, 1, 2, -1]},
            "round 2: client -1 must be an integer from 0 to 4",
        ),
        ("file.json", GOOD | {"2": [0, 1, 2, True]}, "round 2: client true must be an integer"),
        ("file.json", GOOD | {"2": [0, 1, 1, 2]}, "round 2: client 1 appears twice"),
        ("file.json", GOOD | {"2": [0, 1, 2]}, "round 2: has 3 clients.*have 4.*participation=0.6"),
        ("file.csv", "round,who\n1,2\n", "columns round and client"),
        ("file.csv", "round,client\n1,two\n", "columns round and client.*two"),
        (
            "file.csv",
            "round,client,role\n1,0,cfed\n1,1,review\n",
            "different roles: cfed, review",
        ),
    ],
)
def test_invalid_cohort_file_is_rejected(tmp_path, name, content, words):
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=words) as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


def test_resumed_run_keeps_cohorts(tmp_path):
    table = "round,client,examples\n" + "".join(
        f"{r},{c},7\n" for r in (1, 2) for c in ASCENDING[r]
    )
    write(tmp_path / "clients.csv", table)
    check_completed_rounds(tmp_path, ASCENDING, 2)
    check_completed_rounds(tmp_path, None, 2)
    with pytest.raises(ConfigError, match="the clients of round 2"):
        check_completed_rounds(tmp_path, ASCENDING | {2: [0, 2, 3, 4]}, 2)
