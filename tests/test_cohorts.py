"""Who takes part: cohorts from a file with a message for every error in it, and the other laws."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedexp.config.build import build
from fedexp.config.cohorts import Clients, Cohorts, Uniform
from fedexp.config.participation import Cyclic, Markov, PowerLaw, RoundRobin, Windows
from fedexp.config.settings import Seeds
from fedexp.core.errors import ConfigError
from fedexp.training.exchange import sample
from fedexp.training.folder import check_cohorts
from fedexp.training.prepare import centralized_config
from fedexp.training.rounds import play_round
from toy_federation import composed, make_simulation


def clients(rounds, number, size, seed=0, labels=None):
    """Clients that each have one class. labels: the class of each client."""
    labels = np.zeros(number, dtype=int) if labels is None else np.array(labels)
    return Clients(rounds, size, np.eye(labels.max() + 1, dtype=int)[labels], seed)


def read(path, rounds=3):
    return Uniform(path=str(path)).plan(clients(rounds, 5, 4))


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
    assert Uniform().plan(clients(3, 5, 4)) is None


def test_draw_by_round_number_equals_numpy():
    """Before every draw, numpy's global generator is seeded with the round number from 0. The run's
    seed does not matter."""
    expected = {}
    for number in (1, 2, 3):
        np.random.seed(number - 1)  # noqa: NPY002
        expected[number] = sorted(np.random.choice(100, 10, replace=False).tolist())  # noqa: NPY002
    cohorts = Uniform(draw="round")
    assert cohorts.plan(clients(3, 100, 10)) == expected
    assert expected[1] == [2, 16, 26, 54, 55, 73, 75, 86, 93, 95]
    for other in (5, 6):
        simulation = make_simulation(
            cohorts=cohorts, seeds=Seeds(partition=0, sampling=other, training=0)
        )
        assert (
            sample(simulation, 1) == cohorts.plan(clients(1, simulation.settings.num_clients, 4))[1]
        )
    with pytest.raises(
        ConfigError, match=r"cohorts.draw=round: must be seed if cohorts.path is set"
    ):
        Uniform(path="a.json", draw="round")


FOUR = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.json", None, "cannot be read .No such file"),
        ("file.txt", "1", "json or .csv"),
        ("file.json", "{", "maps each round to a list of clients"),
        ("file.json", {"1": FOUR, "3": FOUR}, "round 2 is missing.*3 rounds"),
        ("file.json", '{"1": [0, 1, 2, 3], "1": [0, 1, 2, 4]}', "1 appears twice"),
        ("file.json", '{"1": [0, 1, 2, 3], "01": [0, 1, 2, 4]}', "a round appears twice"),
        ("file.json", {str(k): FOUR for k in range(4)}, "round 0: rounds are counted from 1"),
        (
            "file.csv",
            "round,client\n" + "".join(f"{k // 4},{k % 4}\n" for k in range(16)),
            "round 0: rounds are counted from 1, .*; add 1 to each round",
        ),
        (
            "file.json",
            GOOD | {"2": [0, 1, 2, 5]},
            "round 2: client 5 must be an integer from 0 to 4",
        ),
        ("file.json", GOOD | {"2": [0, 1, 2, True]}, "round 2: client true must be an integer"),
        ("file.json", GOOD | {"2": [0, 1, 1, 2]}, "round 2: client 1 appears twice"),
        ("file.json", GOOD | {"2": []}, "round 2: has no client"),
        ("file.json", [[0, 1, 2]] * 3, "each round has 3 clients, .*have 4.*use participation=0.6"),
        ("file.csv", "round,who\n1,2\n", "columns round and client"),
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


def test_cohorts_of_a_file_may_have_different_sizes(tmp_path):
    """As those of a run with cohorts.size=binomial. `participation` has no effect then."""
    path = write(tmp_path / "file.json", [[2], [0, 1, 2, 3, 4], [4, 1]])
    assert read(path) == {1: [2], 2: [0, 1, 2, 3, 4], 3: [1, 4]}
    for engine in ("sequential", "vectorised"):
        simulation = make_simulation(cohorts=Uniform(path=str(path)), engine=engine)
        state = simulation.initial_state()
        for number in (1, 2, 3):
            result = play_round(simulation, state)
            assert list(result.cohort.clients) == read(path)[number]
            state.advance(result)


class Planned(Cohorts):
    """An own option whose plan the test gives."""

    rounds: Any

    def plan(self, clients: Clients) -> Any:
        return self.rounds


def test_own_plan_may_be_unordered_and_have_numpy_integers():
    given = {1: np.array([3, 0]), 2: [2, 1], 3: [4]}
    simulation = make_simulation(cohorts=Planned(rounds=given))
    assert [sample(simulation, number) for number in (1, 2, 3)] == [[0, 3], [1, 2], [4]]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ([1, 1], "client 1 appears twice"),
        ([1, 9], "client 9 must be an integer from 0 to 4"),
        ([1.0], "client 1.0 must be an integer"),
        (np.array([True, False]), 'client "True" must be an integer'),
        ([], "has no client"),
        (None, "is missing, but the run has 3 rounds"),
    ],
)
def test_wrong_own_plan_is_rejected(second, words):
    given = {1: [0], 2: second, 3: [0]}
    if second is None:
        del given[2]
    with pytest.raises(ConfigError, match=f"^cohorts: plan of Planned: round 2:? {words}"):
        make_simulation(cohorts=Planned(rounds=given))


def test_resumed_run_keeps_cohorts():
    before = {round: ASCENDING[round] for round in (1, 2)}
    check_cohorts(Path("run"), ASCENDING, before)
    check_cohorts(Path("run"), {}, before)
    with pytest.raises(ConfigError, match="would take part in round 2"):
        check_cohorts(Path("run"), ASCENDING | {2: [0, 2, 3, 4]}, before)


# --- laws of participation


def times(plan, number):
    """How often each client takes part."""
    return np.bincount(np.concatenate([*plan.values()]), minlength=number)


def test_round_robin_gives_everyone_the_same_number_of_turns():
    plan = RoundRobin().plan(clients(5, 10, 4))
    assert [len(set(cohort)) for cohort in plan.values()] == [4] * 5
    assert times(plan, 10).tolist() == [2] * 10  # 5 rounds of 4 clients are 2 turns of all 10
    first_turn = plan[1] + plan[2] + plan[3]
    assert set(first_turn) == set(range(10))
    assert RoundRobin().plan(clients(5, 10, 4, seed=1)) != plan


def test_cyclic_groups_have_similar_labels_and_alternate():
    """Sorted by class, the clients are 1 3 5 | 0 2 4: classes 0 0 1 | 1 2 2."""
    who = clients(6, 6, 2, labels=[1, 0, 2, 0, 2, 1])
    plan = Cyclic(groups=2, period=2).plan(who)
    for number, group in enumerate([{1, 3, 0}, {1, 3, 0}, {5, 2, 4}, {5, 2, 4}, {1, 3, 0}], 1):
        assert set(plan[number]) <= group
    assert len(set(np.concatenate([*plan.values()]))) > 4
    with pytest.raises(ConfigError, match=r"cohorts.groups=4: must be at most 3.*2 clients"):
        Cyclic(groups=4).plan(who)


def test_markov_clients_change_state_as_often_as_stated():
    """All available clients take part. Of 400 x 200 transitions, 0.9 and 0.7 keep their state, with
    a standard error below 0.003."""
    rounds, number = 401, 200
    who = clients(rounds, number, number)
    plan = Markov(stay_available=0.9, stay_away=0.7).plan(who)
    there = np.zeros((rounds, number), dtype=bool)
    for t, cohort in plan.items():
        there[t - 1, cohort] = True
    before, after = there[:-1], there[1:]
    assert after[before].mean() == pytest.approx(0.9, abs=0.01)
    assert 1 - after[~before].mean() == pytest.approx(0.7, abs=0.01)
    assert there[1:].mean() == pytest.approx(0.3 / (0.1 + 0.3), abs=0.02)  # stationary


def test_markov_round_without_available_clients_has_one_client():
    plan = Markov(stay_available=0.0, stay_away=1.0).plan(clients(5, 8, 4))
    assert [len(plan[number]) for number in (2, 3, 4, 5)] == [1] * 4


def test_windows_clients_come_once_and_do_not_come_back():
    rounds, number = 60, 40
    plan = Windows(late=0.5, early=0.25).plan(clients(rounds, number, number))
    first = [min(t for t in plan if k in plan[t]) for k in range(number)]
    last = [max(t for t in plan if k in plan[t]) for k in range(number)]
    assert times(plan, number).tolist() == [b - a + 1 for a, b in zip(first, last, strict=True)]
    assert 18 <= sum(each > 1 for each in first) <= 20  # half of 40; a late one may come in round 1
    assert 8 <= sum(each < rounds for each in last) <= 10  # a quarter of 40
    everyone = Windows(late=0.0, early=0.0).plan(clients(3, 6, 6))
    assert everyone == {key: list(range(6)) for key in (1, 2, 3)}


def test_windows_may_end_in_any_round_since_their_start():
    """The last round is one of them: in two rounds, half of the 400 clients stay (standard error
    0.025), and a client that arrives in the last round is there."""
    plan = Windows(late=0.0, early=1.0).plan(clients(2, 400, 400))
    assert len(plan[1]) == 400
    assert len(plan[2]) / 400 == pytest.approx(0.5, abs=0.075)
    assert Windows(late=1.0, early=1.0).plan(clients(1, 4, 4)) == {1: [0, 1, 2, 3]}


def test_power_law_first_client_of_a_cohort():
    """With cohorts of one client and exponent 1, three clients have the shares 6/11, 3/11, 2/11."""
    rounds = 2750
    found = np.sort(times(PowerLaw(exponent=1.0).plan(clients(rounds, 3, 1)), 3) / rounds)
    assert found == pytest.approx([2 / 11, 3 / 11, 6 / 11], abs=0.03)  # 3 standard errors
    with pytest.raises(ConfigError, match=r"cohorts.exponent=400: must be smaller, because 20\^"):
        PowerLaw(exponent=400).plan(clients(2, 20, 10))


@pytest.mark.parametrize("law", [Uniform, PowerLaw, Cyclic, Markov, Windows])
def test_binomial_sizes(law):
    """The size of a cohort has the mean 0.2 x 50 = 10 and the variance 50 x 0.2 x 0.8 = 8, unless
    fewer clients are available; it is the same for all laws."""
    who = clients(300, 50, 10)
    sizes = np.array([len(cohort) for cohort in law(size="binomial").plan(who).values()])
    free = np.array([len(cohort) for cohort in Uniform(size="binomial").plan(who).values()])
    assert (sizes <= free).all()
    assert (sizes == free).mean() > 0.7
    assert free.mean() == pytest.approx(10, abs=0.5)
    assert free.var() == pytest.approx(8, abs=2)
    alone = Uniform(size="binomial").plan(clients(50, 5, 1))
    assert min(map(len, alone.values())) == 1  # an empty cohort is drawn again


def test_cohorts_of_changing_size_are_trained():
    law = Markov(stay_available=0.5, stay_away=0.5)
    assert [len(cohort) for cohort in law.plan(clients(3, 5, 4)).values()] == [1, 2, 3]
    for engine in ("sequential", "vectorised"):
        simulation = make_simulation(cohorts=law, participation=0.8, engine=engine)
        state = simulation.initial_state()
        for number in (1, 2, 3):
            result = play_round(simulation, state)
            assert list(result.cohort.clients) == simulation.cohorts[number]
            state.advance(result)


@pytest.mark.parametrize(
    "given", ["cohorts=markov", "cohorts.size=binomial", "cohorts.path=a.json"]
)
def test_centralized_run_has_no_law_of_participation(given):
    run = ("algorithm=cfed_c",)
    with pytest.raises(ConfigError, match=r"cohorts: must be uniform.*only one client"):
        centralized_config(build(composed(*run, given)))
    drawn = centralized_config(build(composed(*run, "cohorts.draw=round")))
    assert drawn.settings.num_clients == 1
