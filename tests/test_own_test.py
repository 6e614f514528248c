"""Each client's own test: the measures by hand, and the models against a slow loop over images."""

import csv
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedexp
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.ditto import Ditto
from fedexp.algorithms.fedbn import FedBN
from fedexp.algorithms.fedproto import FedProto
from fedexp.algorithms.fedrep import FedRep
from fedexp.algorithms.local_only import LocalOnly
from fedexp.cli import main
from fedexp.config.build import build
from fedexp.core.errors import ConfigError
from fedexp.data.held_out import Validation
from fedexp.engine.sequential import ClientTraining
from fedexp.metrics.forgetting_metric import Metrics
from fedexp.metrics.own_test import OwnTest, own_results
from fedexp.metrics.record import Record
from fedexp.rundir.reader import RunDirectory
from fedexp.testing import ENGINES, record
from fedexp.training.checks import check_config
from fedexp.training.evaluation import personal_models
from fedexp.training.prepare import metrics_of
from fedexp.training.rounds import play_round
from quick_runs import SMALL
from test_personal_test import answers
from toy_federation import Normed, composed, make_simulation, play

OWN = ["global", "own"]
SIZES = (4, 5, 8, 9, 10)  # 1, 2, 2, 3 and 3 of them are test examples
NAN = float("nan")


def simulation_of(algorithm=None, **changes):
    given = {"sizes": SIZES, "test_per_client": 0.25, "evaluate": OWN, "participation": 0.6}
    return make_simulation(algorithm, **given | changes)


# --- the measures


def recorded(rounds, examples, **others):
    """A record of clients whose model `global` has these accuracies [K] after round 0, 1, ..."""
    history = Record(np.ones((len(examples), 2)))
    for number, row in enumerate(rounds):
        history.add(number, np.zeros(2))
        models = {name: np.array(values[number]) for name, values in others.items()}
        history.add_own({"global": np.array(row), **models}, np.array(examples))
    return history


def test_measures_of_own_tests_equal_hand_calculation():
    """The example of docs/metrics.md. Client 0 has 3 test examples, client 1 has 1, and client 2
    none, so it does not count. The initial model (1.0) does not count for forgetting."""
    history = recorded([[1, 1, NAN], [2 / 3, 0, NAN], [1 / 3, 1, NAN]], [3, 1, 0])
    metric = OwnTest(personal=False, tests_clients=False)
    found = metric.round_values(history)
    expected = {
        "own_accuracy": 2 / 3,
        "own_accuracy_weighted": 0.5,
        "own_accuracy_std": 1 / 3,
        "own_accuracy_worst": 1 / 3,
        "own_forgetting": -1 / 3,
        "own_forgetting_std": 2 / 3,
        "own_forgetting_worst": 1 / 3,
    }
    assert {k: v for k, v in found.items() if "local" not in k} == pytest.approx(expected)
    assert all(np.isnan(v) for k, v in found.items() if "local" in k)
    first = metric.round_values(history.upto(1))
    assert first["own_accuracy_weighted"] == pytest.approx(0.5)
    assert np.isnan(first["own_forgetting"]), "there is no earlier round"


def test_best_round_has_the_highest_weighted_mean():
    """Weighted means of rounds 1 to 3 by hand: 0.25, 0.75, 0.75. The initial model does not count,
    unless there is no other, and clients without test examples do not. The unweighted mean is
    highest in round 3."""
    history = recorded([[1, 1, NAN], [0, 1, NAN], [1, 0, NAN], [2 / 3, 1, NAN]], [3, 1, 0])
    metric = Metrics([OwnTest(personal=False, tests_clients=False)])
    found = metric.summary(history)
    assert found["best_own_accuracy_weighted"] == pytest.approx(0.75)
    assert (found["best_own_round"], type(found["best_own_round"])) == (2, int)
    assert metric.summary(history.upto(1))["best_own_accuracy_weighted"] == pytest.approx(0.25)
    assert metric.summary(history.upto(0))["best_own_round"] == 0
    personal = recorded(np.zeros((3, 2)), [1, 1], personal=[[0, 0], [0.5, 0.5], [0, 0]])
    found = OwnTest(personal=True, tests_clients=False).summary(personal)
    assert (found["best_own_accuracy_weighted"], found["best_own_round"]) == (0.5, 1)
    nobody = metric.summary(recorded([[NAN], [NAN]], [0]))
    assert np.isnan([nobody["best_own_accuracy_weighted"], nobody["best_own_round"]]).all()


def test_local_model_is_compared_with_earlier_rounds_of_its_client():
    """Client 0 trains in rounds 1 and 3 (0.75, then 0.25), client 1 in rounds 2 and 3 (0.5, 1)."""
    local = [[NAN, NAN], [0.75, NAN], [NAN, 0.5], [0.25, 1.0]]
    history = recorded(np.zeros((4, 2)), [4, 2], local=local, personal=np.ones((4, 2)))
    accuracy, forgotten = own_results(history)["own_local"]
    assert accuracy.tolist() == [0.25, 1.0]
    assert forgotten.tolist() == [0.5, -0.5]
    assert np.isnan(own_results(history.upto(2))["own_local"][1]).all()
    assert [*own_results(history)] == ["own", "own_global", "own_local"]
    values = OwnTest(personal=True, tests_clients=False).round_values(history)
    assert values["own_local_accuracy_weighted"] == pytest.approx((4 * 0.25 + 2 * 1) / 6)
    assert values["own_accuracy"] == 1
    assert values["own_global_accuracy"] == 0


# --- the models


def slow_tests(simulation, models):
    """Return the accuracy of each client's model on its own examples, one image at a time. The
    test set are the held-out training examples, in their order; a client's are found by its part
    of the whole."""
    federation, test = simulation.stages[0].federation, simulation.stages[0].partition.test
    held = dict(zip(test.tolist(), range(len(test)), strict=True))
    whole = make_simulation(sizes=SIZES).stages[0].federation.parts
    found = {}
    for client, model in models.items():
        labels, predicted = answers(simulation, model)
        own = [held[i] for i in set(whole[client]) - set(federation.parts[client])]
        assert len(own) == [1, 2, 2, 3, 3][client]
        found[client] = np.mean([labels[i] == predicted[i] for i in own])
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), Ditto(lambda_=0.5), FedBN(), FedRep(head_epochs=1)],
    ids=lambda each: type(each).__name__,
)
def test_own_tests_equal_slow_loop(algorithm, engine, monkeypatch):
    """Three of five clients take part in each of two rounds; the models have running statistics."""
    simulation = simulation_of(algorithm, model=Normed())
    simulation = replace(simulation, engine=ENGINES[engine])
    before, state = play(simulation, 1), play(simulation, 2)
    tests = play_round(simulation, before).tests["plain"]
    own = tests.own
    assert tests.own_examples.tolist() == [1, 2, 2, 3, 3]
    expected = {"global": dict.fromkeys(range(5), state.server["params"])}
    if type(algorithm) is not FedAvg:
        personal = personal_models(simulation, state.server, state.clients, 2)
        expected["personal"] = dict(enumerate(personal))
    expected["local"] = local_models(simulation, before, monkeypatch)
    simulation.runtime.net.set_buffers(state.server["buffers"])
    assert sorted(own) == sorted(expected)
    assert len(expected["local"]) == 3
    for name, models in expected.items():
        slow = slow_tests(simulation, models)
        wanted = [slow.get(client, NAN) for client in range(5)]
        np.testing.assert_allclose(own[name], wanted, rtol=0, atol=1e-12)


def local_models(simulation, before, monkeypatch):
    """Return the model of each client of round 2 when its training of the whole model ends, with
    its running statistics. (Ditto's clients also train a personal model, which is another one.)"""
    found, finish = {}, ClientTraining.finish

    def watched(self, trained):
        if self.algorithm.trains_model:
            found[self.client] = {**trained, **self.live.buffers()}
        return finish(self, trained)

    with monkeypatch.context() as patch:
        patch.setattr(ClientTraining, "finish", watched)
        play_round(replace(simulation, engine=ENGINES["sequential"]), before)
    return found


def test_engines_agree_on_own_tests():
    """Bit for bit: they count correct predictions."""
    found = []
    for engine in ENGINES.values():
        simulation = replace(simulation_of(FedRep(head_epochs=1)), engine=engine)
        found.append(play(simulation, 3).records["plain"].own)
    for others in found[1:]:
        np.testing.assert_equal(others, found[0])
    assert len(found[0]) == 3


def test_pooled_accuracy_is_the_weighted_mean_of_the_global_model():
    """The own test sets are the parts of the test set, so the pooled test stays as it is."""
    whole = play(make_simulation(sizes=SIZES, test_per_client=0.25), 2).records["plain"]
    state = play(simulation_of(participation=0.8), 2).records["plain"]
    np.testing.assert_equal(state.matrix, whole.matrix)
    assert not whole.own
    for accuracy, own in zip(state.accuracy, state.own, strict=True):
        assert accuracy == pytest.approx(float(own[0] @ [1, 2, 2, 3, 3]) / 11, abs=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "empty"),
    [
        (FedAvg(), {"personal"}),
        (LocalOnly(), {"global", "local"}),
        (FedProto(lambda_=1.0), set()),
    ],
)
def test_model_that_does_not_exist_has_empty_cells(algorithm, empty, tmp_path):
    record(simulation_of(algorithm, rounds=2), tmp_path)
    rows = rows_of(tmp_path / "own_accuracy.csv")
    assert [*rows[0]] == ["round", "client", "examples", "global", "local", "personal"]
    assert len(rows) == 3 * 5
    last = [row for row in rows if row["round"] == "2"]
    filled = {name for row in last for name in ("global", "local", "personal") if row[name]}
    assert filled == {"global", "local", "personal"} - empty
    values = rows_of(tmp_path / "rounds.csv")[-1]
    assert values["own_accuracy"]
    assert ("own_global_accuracy" in values) == ("personal" in filled and "global" in filled)


def rows_of(path):
    with path.open() as file:
        return [*csv.DictReader(file)]


# --- the option


def test_validation_set_is_divided_among_the_clients():
    """A client's own validation examples are those that it holds out, not those of its own test."""
    held_out = Validation(fraction=0.25, per_client=True)
    simulation = simulation_of(validation=held_out, evaluate_on="both")
    state, data = play(simulation, 1), simulation.runtime.data
    whole = make_simulation(sizes=SIZES).stages[0].federation.parts
    parts = simulation.stages[0].federation.parts
    test = set(simulation.stages[0].partition.test.tolist())
    assert not test & set(data.validation.tolist())
    for client, part in enumerate(whole):
        rest = set(part) - set(parts[client]) - test
        own = data.validation[data.validation_clients == client].tolist()
        assert rest == set(own)
    # floor(n / 4) of the 3, 3, 6, 6 and 7 training examples
    examples = state.records["validation"].own_examples
    assert examples.tolist() == [0, 0, 1, 1, 1]
    assert np.isnan(state.records["validation"].own[-1][0, :2]).all()
    found = OwnTest(personal=False, tests_clients=False).round_values(state.records["validation"])
    assert not np.isnan(found["own_accuracy_weighted"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "the test set of dataset=digits is not divided among the clients; set test_per_cl"),
        (["partition=natural"], "set test_per_client=0.25"),
        (["validation.fraction=0.1"], "the validation set is not divided among the clients; set v"),
        (["scenario=class_incremental"], "evaluate=own: can only be used with scenario=none"),
    ],
)
def test_own_tests_need_test_examples_of_the_clients(overrides, message):
    built = build(composed("tracker=none", "evaluate=own", *overrides))
    with pytest.raises(ConfigError, match=message):
        check_config(built, metrics_of(built))


def test_run_writes_tables_and_figure(here, capsys):
    """The weighted mean over the clients is the share of correct predictions of all; the figure
    and the table of clients come from own_accuracy.csv."""
    given = [*SMALL, "rounds=3", "test_per_client=0.25", "evaluate=own"]
    run = fedexp.run([*given, "figures=true"], directory=here / "run")
    table = pd.read_csv(here / "run" / "own_accuracy.csv")
    last = table[table["round"] == 3].set_index("client")
    assert run.summary["own_accuracy_weighted"] == pytest.approx(run.summary["accuracy"])
    assert run.summary["own_accuracy"] == pytest.approx(last["global"].mean())
    assert run.summary["own_accuracy_worst"] == last["global"].min()
    curve = pd.read_csv(here / "run" / "rounds.csv")["own_accuracy_weighted"][1:]
    assert run.summary["best_own_accuracy_weighted"] == curve.max()
    assert run.summary["best_own_round"] == curve.idxmax()
    best = table[table["round"].isin([1, 2])].groupby("client")["global"].max()
    assert run.summary["own_forgetting"] == pytest.approx((best - last["global"]).mean())
    assert (here / "run" / "figures" / "own_tests.png").exists()
    assert not (here / "run" / "figures" / "clients.png").exists()
    assert main.main(["report", "run", "--no-figures"]) == 0
    results = pd.read_csv(here / "run" / "client_results.csv")
    assert results["own_accuracy"].tolist() == last["global"].tolist()
    np.testing.assert_allclose(results["own_forgetting"], best - last["global"], atol=1e-12)
    assert "| worst tenth |" in capsys.readouterr().out
    restored = RunDirectory(here / "run").record()
    assert restored.own_examples.tolist() == last["examples"].tolist()
    assert restored.upto(1).own_matrix("global").shape == (2, 8)
