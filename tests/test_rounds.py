"""How a round moves the state, and which cells of rounds.csv a round fills."""

import csv
from dataclasses import replace

from fedexp.rundir import files
from fedexp.training.recorder import Recorder
from fedexp.training.rounds import play_round, run_rounds
from toy_federation import make_simulation


def test_two_results_add_up_in_the_state():
    """Rounds of 10 and 7 examples, 1 + 2 and 0.5 + 4 seconds: 17 examples, 1.5 seconds of training
    and 7.5 in all."""
    simulation = make_simulation(rounds=3)
    state = simulation.initial_state()
    first = replace(
        play_round(simulation, state), examples=10, seconds={"train": 1.0, "evaluation": 2.0}
    )
    state.advance(first)
    assert (state.examples, state.train_seconds, state.seconds) == (10, 1.0, 3.0)
    second = replace(
        play_round(simulation, state), examples=7, seconds={"train": 0.5, "evaluation": 4.0}
    )
    state.advance(second)
    assert (state.round, state.status) == (2, "running")
    assert (state.examples, state.train_seconds, state.seconds) == (17, 1.5, 7.5)


def test_a_run_that_diverges_in_its_last_round_is_not_complete():
    simulation = make_simulation(rounds=1)
    state = simulation.initial_state()
    result = play_round(simulation, state)
    assert result.is_last
    state.advance(replace(result, not_finite=[2]))
    assert (state.status, state.not_finite) == ("diverged", [2])


def test_a_round_that_is_not_evaluated_has_no_test_values(tmp_path):
    simulation = make_simulation(rounds=4, eval_interval=2)
    recorder = Recorder(tmp_path, simulation, [], None)
    run_rounds(simulation, simulation.initial_state(), recorder)
    recorder.close()
    with open(tmp_path / files.ROUNDS, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for name in ("test_accuracy", "test_loss"):
        assert [bool(row[name]) for row in rows] == [True, False, True, False, True], name
    assert not rows[3]["forgetting"]
    assert rows[4]["forgetting"]
    assert all(row["train_loss"] for row in rows[1:])
