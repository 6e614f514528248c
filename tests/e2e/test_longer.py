"""Runs that stop early (`stop`), and runs that are extended."""

import json

import pandas as pd
import pytest
import yaml
from helpers import SMALL, add_class, assert_same_run, summary_of, table

from fedexp.training import rounds

RUN = ("algorithm=scaffold", *SMALL, "local.batch_size=200")  # one step a client


def test_extended_run_equals_longer_run(fedexp, tmp_path):
    fedexp.done(*RUN, "rounds=3", "hydra.run.dir=whole")
    fedexp.done(*RUN, "rounds=1", "hydra.run.dir=run")
    answer = fedexp.done("resume=run", "rounds=3")
    assert "the run now has rounds=3" in answer.err
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    run, whole = (summary_of(tmp_path / name) for name in ("run", "whole"))
    assert run["rounds"] == 3
    compared = "status identity accuracy best_accuracy forgetting rounds_to_target"
    for key in compared.split():
        assert run[key] == whole[key]
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["rounds"] == 3
    again = fedexp.done("resume=run")
    assert "complete (3 rounds); nothing to do" in again.err
    # with a further value but no further round
    fedexp.done("resume=run", "stop.patience=9", "stop.metric=test_accuracy")
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["stop"]["patience"] == 9
    origin = json.loads((tmp_path / "run/origin.json").read_text())
    assert summary_of(tmp_path / "run")["identity"] == origin["identity"] != whole["identity"]


def test_rounds_beside_rounds_per_task_are_refused_for_a_longer_run(fedexp, tmp_path):
    """Without tasks, too, scenario.rounds_per_task is the number of rounds."""
    per_task = ("rounds=4", "scenario.rounds_per_task=2")
    late = fedexp(*RUN, *per_task, "schedule.classes={3: {3: 0}}", "hydra.run.dir=late")
    assert late.code == 2
    assert "a change is scheduled for round 3, but the run has only 2 rounds" in late.err
    fedexp.done(*RUN, *per_task, "hydra.run.dir=run")
    answer = fedexp("resume=run", "rounds=6")
    assert answer.code == 2
    assert "rounds=6: has no effect, because scenario.rounds_per_task=2 is" in answer.err
    fedexp.done("resume=run", "scenario.rounds_per_task=3")
    assert summary_of(tmp_path / "run")["rounds"] == 3


def test_a_key_that_the_partition_refers_to_is_refused_for_a_longer_run(fedexp, tmp_path):
    """The partition of a run is stored with the value, which was 0.5."""
    fedexp.done(*RUN, "alpha=0.5", "rounds=1", "hydra.run.dir=run")
    before = (tmp_path / "run/config.yaml").read_bytes()
    for more in ((), ("rounds=2",)):
        answer = fedexp("resume=run", "alpha=9", *more)
        assert answer.code == 2
        assert "partition.alpha: 0.5 in the run, 9 now" in answer.err
    assert (tmp_path / "run/config.yaml").read_bytes() == before
    fedexp.done("resume=run", "alpha=0.5", "rounds=2")
    assert summary_of(tmp_path / "run")["rounds"] == 2


def test_resumed_run_may_switch_its_figures_on_and_off(fedexp, tmp_path):
    """The run was started with figures=false, which SMALL has."""

    def figures_of_resumed(*options):
        fedexp.done("resume=run", *options)
        found = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["figures"]
        return found["draw"], found["format"], len(list(tmp_path.glob("run/figures/*.svg")))

    fedexp.done(*RUN, "rounds=1", "hydra.run.dir=run")
    assert figures_of_resumed("figures=false", "rounds=2") == (False, ["png"], 0)
    on = ("figures.draw=true", "figures.format=[svg]", "rounds=3")
    drawn, form, count = figures_of_resumed(*on)
    assert (drawn, form, count > 0) == (True, ["svg"], True)
    assert figures_of_resumed("figures=false", "rounds=4")[:2] == (False, ["svg"])


METRIC = """
from fedexp.metrics.forgetting_metric import ForgettingMetric


class Odd(ForgettingMetric):
    columns = {"mine": "max"}
    name: str = "mine"

    def round_values(self, history):
        return {self.name: 1.0} | ({"late": 2.0} if history.rounds[-1] > 2 else {})
"""


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Return the options of a metric that has another column from round 3 on."""
    add_class(tmp_path, "forgetting_metric", "odd", METRIC, "name: mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "--config-dir", "own", "forgetting_metric=odd"


def test_error_after_first_round_is_recorded_as_failure(fedexp, tmp_path, odd):
    answer = fedexp(*odd, *SMALL, "rounds=4", "hydra.run.dir=run")
    assert answer.code == 1, answer.err
    assert "Odd returns {'late': 2.0, 'mine': 1.0}, but must return a dict" in answer.err
    found = summary_of(tmp_path / "run")
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert "'late': 2.0" in (tmp_path / "run/error.txt").read_text()
    assert pd.read_csv(tmp_path / "run/rounds.csv")["round"].tolist() == [0, 1, 2]


def test_failed_extension_restores_complete_run(fedexp, tmp_path, odd):
    fedexp.done(*odd, *SMALL, "rounds=2", "hydra.run.dir=run")
    names = "summary.json config.yaml .hydra/overrides.yaml origin.json rounds.csv clients.csv"
    before = {name: (tmp_path / "run" / name).read_bytes() for name in names.split()}
    answer = fedexp(*odd[:2], "resume=run", "rounds=5")
    assert answer.code == 1, answer.err
    assert "Odd returns" in answer.err
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before
    again = fedexp.done(*odd[:2], "resume=run")
    assert "complete (2 rounds); nothing to do" in again.err


def test_extended_run_that_lost_rounds_is_not_complete(fedexp, tmp_path, monkeypatch):
    """The rows of round 2 are cut before round 3, so summary.json must not say that it exists."""
    fedexp.done(*RUN, "rounds=3", "hydra.run.dir=whole")
    fedexp.done(*RUN, "rounds=2", "hydra.run.dir=run")
    latest = tmp_path / "run/checkpoint/latest.pt"
    latest.write_bytes(latest.read_bytes()[:-100])

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedexp.training.rounds.play_round", interrupted)
        answer = fedexp("resume=run", "rounds=3")
    assert answer.code == 130, answer.err
    assert "The state after round 1 was saved" in answer.err
    assert not (tmp_path / "run/summary.json").exists()
    fedexp.done("resume=run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_extended_run_keeps_evaluation_of_old_last_round(fedexp, tmp_path):
    fedexp.done(*RUN, "rounds=1", "eval_interval=2", "hydra.run.dir=run")
    fedexp.done("resume=run", "rounds=2")
    assert pd.read_csv(tmp_path / "run/rounds.csv")["test_accuracy"].notna().all()


def test_cosine_schedule_rejects_more_rounds(fedexp, tmp_path):
    """The rates of two rounds are 0.05 and 0.025; with four rounds, the first two would be 0.05 and
    0.0427."""
    fedexp.done(*RUN, "rounds=2", "local.schedule=cosine", "hydra.run.dir=run")
    rates = pd.read_csv(tmp_path / "run/rounds.csv")["lr"].iloc[1:]
    assert rates.to_list() == pytest.approx([0.05, 0.025], abs=1e-12)
    before = (tmp_path / "run/config.yaml").read_bytes()
    answer = fedexp.rejected("resume=run", "rounds=4")
    assert (
        "with local.schedule=cosine, all learning rates depend on the number of rounds (2)"
        in answer.err
    )
    assert (tmp_path / "run/config.yaml").read_bytes() == before


def test_cohorts_that_depend_on_the_rounds_reject_more_of_them(fedexp, tmp_path):
    fedexp.done(*RUN, "cohorts=windows", "rounds=2", "hydra.run.dir=run")
    said = fedexp.rejected("resume=run", "rounds=8").err
    assert "other clients than before would take part in round" in said
    assert summary_of(tmp_path / "run")["rounds"] == 2


@pytest.mark.slow
def test_extended_job_stays_in_its_sweep(fedexp, tmp_path):
    """The sweep's command counts the extended job."""
    seeds = (*RUN, "seed=0,1")
    sweep = ("--multirun", *seeds, "hydra.sweep.dir=multirun/a")
    assert fedexp(*sweep, "rounds=1").code == 0
    first = min(path.parent for path in (tmp_path / "multirun/a").glob("*/rounds.csv"))
    answer = fedexp(f"resume={first}", "rounds=2")
    assert answer.code == 0, answer.err
    extended = summary_of(first)
    assert (extended["rounds"], extended["sweep"]) == (2, "a")
    same = fedexp.done(*sweep, "rounds=1")
    assert (
        f"{first.name}: the run was extended, but still counts as a job of this sweep: rounds: 2"
        in same.err
    )
    assert summary_of(first)["rounds"] == 2
    means = pd.read_csv(tmp_path / "multirun/a/table.csv")
    assert means["n"].tolist() == [1, 1]
    assert [row.split()[-1] for row in means["method"]] == ["rounds=2", "rounds=1"]


def test_patience_stops_run_and_resume_continues_it(fedexp, tmp_path):
    # With this rate, the accuracy never rises.
    held_out = ("validation.fraction=0.2", "evaluate_on=both", "local.lr=1e-9")
    fedexp.done(*RUN, *held_out, "rounds=4", "hydra.run.dir=whole")
    answer = fedexp.done(*RUN, *held_out, "rounds=4", "stop.patience=2", "hydra.run.dir=run")
    values = (
        pd.read_csv(tmp_path / "whole/rounds.csv").set_index("round")["validation_accuracy"].loc[1:]
    )
    # the first maximum counts
    expected = next(r for r in values.index if r - values.loc[:r].idxmax() >= 2)
    stopped = summary_of(tmp_path / "run")
    assert stopped["status"] == "stopped"
    assert stopped["rounds"] == expected < 4
    assert stopped["stopped"] == {"by": "patience", "patience": 2}
    assert (
        f"stopped after round {expected} by stop.patience=2. Continue with:  fedexp resume=run"
        in answer.err
    )
    same = fedexp("resume=run")
    assert (same.code, "nothing to do" in same.err) == (0, True)
    # as if killed after the last round, before the results were written
    (tmp_path / "run/summary.json").unlink()
    fedexp.done("resume=run")
    again = summary_of(tmp_path / "run")
    assert (again["rounds"], again["stopped"]) == (expected, stopped["stopped"])
    fedexp.done("resume=run", "stop.patience=null")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert summary_of(tmp_path / "run")["identity"] == summary_of(tmp_path / "whole")["identity"]


def test_patience_ends_a_resumed_run_where_it_ends_an_undisturbed_one(fedexp, tmp_path):
    """Otherwise, runs of one identity would have other results."""
    still = (*RUN, "local.lr=1e-9")  # the accuracy never rises, so the first round is the best
    patient = ("stop.patience=2", "stop.metric=test_accuracy")
    fedexp.done(*still, "rounds=5", *patient, "hydra.run.dir=undisturbed")
    fedexp.done(*still, "rounds=4", *patient, "hydra.run.dir=run")
    answer = fedexp.done("resume=run", "rounds=5")
    command = "Continue with:  fedexp resume=run stop.patience=null"
    assert f"stopped after round 3 by stop.patience=2. {command}" in answer.err
    names = ("run", "undisturbed")
    run, undisturbed = (summary_of(tmp_path / name) for name in names)
    for key in ("status", "stopped", "rounds", "accuracy", "identity"):
        assert run[key] == undisturbed[key]
    pd.testing.assert_frame_equal(*(table(tmp_path / name, "rounds.csv") for name in names))
    before = (tmp_path / "run/origin.json").read_bytes()
    said = fedexp.rejected("resume=run", "stop.patience=1").err
    assert "stop.patience=1 would have ended the run after round 2, but it has 3 rounds" in said
    assert (tmp_path / "run/origin.json").read_bytes() == before


def test_resumed_run_stops_where_it_was_decided_to_stop(fedexp, tmp_path, monkeypatch):
    """The time is over after round 1, which is not tested, so round 2 is tested and the last."""
    rare, play = ("rounds=9", "eval_interval=9"), rounds.play_round

    def interrupted(simulation, state, *others):
        if state.round == 1:
            raise KeyboardInterrupt
        return play(simulation, state, *others)

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "play_round", interrupted)
        assert fedexp(*RUN, *rare, "stop.minutes=1e-6", "hydra.run.dir=run").code == 130
    fedexp.done("resume=run")
    fedexp.done(*RUN, "rounds=2", "eval_interval=9", "hydra.run.dir=whole")
    run, whole = (summary_of(tmp_path / name) for name in ("run", "whole"))
    assert run["stopped"] == {"by": "minutes", "minutes": 1e-6}
    assert (run["rounds"], run["accuracy"]) == (2, whole["accuracy"])


def test_patience_uses_test_data_only_on_request(fedexp):
    answer = fedexp.rejected(*RUN, "rounds=3", "stop.patience=1", "hydra.run.dir=run")
    assert (
        "needs a validation set; set validation.fraction, such as 0.1, or use the test set with"
        " stop.metric=test_accuracy" in answer.err
    )
    fedexp.done(
        *RUN, "rounds=3", "stop.patience=1", "stop.metric=test_accuracy", "hydra.run.dir=run"
    )


def test_resume_command_repeats_config_directory(fedexp, tmp_path):
    (tmp_path / "mine dir").mkdir()
    answer = fedexp.done(
        "--config-dir=mine dir", *RUN, "rounds=3", "stop.minutes=1e-6", "hydra.run.dir=run"
    )
    assert "Continue with:  fedexp '--config-dir=mine dir' resume=run" in answer.err
