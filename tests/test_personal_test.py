"""The personalised test: weighted class accuracies equal a slow test of weighted examples, and the
right models are tested."""

import numpy as np
import pytest
import torch

from fedexp.algorithms import heads
from fedexp.algorithms.ditto import Ditto
from fedexp.algorithms.fedala import FedALA
from fedexp.algorithms.fedbn import FedBN
from fedexp.algorithms.fedfomo import FedFOMO
from fedexp.algorithms.fedpac import FedPAC
from fedexp.algorithms.fedproto import FedProto
from fedexp.algorithms.fedrep import FedRep
from fedexp.algorithms.fedrod import FedRoD
from fedexp.config.build import build
from fedexp.config.values import resolve
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.data.held_out import Validation
from fedexp.engine.base import ClientRuntime
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.metrics.personal import Personal, own_mean, spread
from fedexp.metrics.record import Record
from fedexp.models.resnet import CifarResNet
from fedexp.training.evaluation import ModelTest, evaluate_personal
from fedexp.training.rounds import play_round
from test_views import full_run
from toy_federation import TWO_TASKS, Normed, composed, make_simulation, play

BOTH = ["global", "personal"]
PERSONAL = {
    "fedrod": FedRoD(gamma=1.0),
    "fedala": FedALA(eta=1.0, part=0.8, threshold=0.1, max_passes=3),
    "fedfomo": FedFOMO(models=2, validation=0.3, epsilon=0.0, epsilon_decay=0.05, distance="l1"),
    "fedpac": FedPAC(lambda_=1.0, head_lr=0.1, head_epochs=1),
    "fedrep": FedRep(head_epochs=1),
    "fedbn": FedBN(),
    "ditto": Ditto(lambda_=0.5),
    "fedproto": FedProto(lambda_=1.0),
}
MODELS = {"fedbn": Normed(), "ditto": Normed(), "fedfomo": Normed()}  # with running statistics
NAMES = [f"{name}{end}" for name in ("accuracy", "forgetting") for end in ("", "_std", "_worst")]


def answers(simulation, model):
    """Return (labels, predictions) of a model on the test set, one image at a time, in
    eval mode."""
    data = simulation.runtime.data
    found = []
    for i in range(len(data.y_test)):
        x, _ = simulation.runtime.load_test(torch.tensor([i]))
        found.append(int(simulation.runtime.net(model, x).logits.argmax()))
    return data.y_test.numpy(), np.array(found)


def slow_accuracy(simulation, model, counts):
    """Return the accuracy on a test set that repeats each image as often as the client has training
    examples of its class. The toy's test set is balanced."""
    labels, found = answers(simulation, model)
    rows = np.concatenate([np.repeat(i, counts[label]) for i, label in enumerate(labels)])
    return float((labels[rows] == found[rows]).mean())


# --- the measures


def test_personal_accuracy_is_weighted_by_client_distribution():
    simulation = make_simulation(participation=1.0)
    state = play(simulation, 2)
    counts = simulation.stages[0].partition.counts
    labels, found = answers(simulation, state.server["params"])
    classes = np.array([(found[labels == c] == c).mean() for c in range(4)])
    slow = [slow_accuracy(simulation, state.server["params"], row) for row in counts]
    assert own_mean(classes, counts) == pytest.approx(slow, abs=1e-12)


def test_personal_forgetting_equals_hand_calculation():
    """Two classes and three rounds. Drops: 0.8 - 0.5 = 0.3 and 0.6 - 0.4 = 0.2. Client 0 has 3 and
    1 examples: forgetting 0.75 * 0.3 + 0.25 * 0.2 = 0.275, accuracy 0.75 * 0.5 + 0.25 * 0.4 =
    0.475. Client 1 has only the second class: 0.2 and 0.4."""
    history = Record(np.array([[3, 1], [0, 2]]))
    for round, row in enumerate([[1.0, 1.0], [0.8, 0.2], [0.4, 0.6], [0.5, 0.4]]):
        history.add(round, np.array(row))
    values = Personal(own=False, local=False, tests_clients=False).round_values(history)
    assert values == pytest.approx(
        {
            "personal_accuracy": 0.4375,
            "personal_accuracy_std": 0.0375,
            "personal_accuracy_worst": 0.4,
            "personal_forgetting": 0.2375,
            "personal_forgetting_std": 0.0375,
            "personal_forgetting_worst": 0.275,
        }
    )


def test_forgetting_of_personal_models_equals_hand_calculation():
    """Client 0 has one class with accuracies 0.9, 0.5, 0.6: 0.9 - 0.6 = 0.3. Client 1: 0.2, 0.4,
    0.8, so -0.4. The initial model (1.0) does not count; forgetting is defined from round 2 on."""
    history = Record(np.array([[2, 0], [0, 2]]))
    metric = Personal(own=True, local=False, tests_clients=False)
    for round, (one, two) in enumerate([(1.0, 1.0), (0.9, 0.2), (0.5, 0.4), (0.6, 0.8)]):
        history.add(round, np.array([0.5, 0.5]))
        history.add_personal(round, np.array([[one, np.nan], [np.nan, two]]))
        if round < 2:
            assert np.isnan(metric.round_values(history)["personal_forgetting"])
    values = metric.round_values(history)
    assert values["personal_accuracy"] == pytest.approx(0.7)
    assert values["personal_forgetting"] == pytest.approx(-0.05)
    assert values["personal_forgetting_worst"] == pytest.approx(0.3)
    assert values["personal_global_accuracy"] == 0.5
    assert values["personal_global_forgetting"] == 0.0
    assert history.upto(3).personal_accuracy is history.personal_accuracy
    assert history.upto(2).personal_accuracy is None, "those of round 3 are not round 2's"


def test_forgetting_of_local_models_equals_hand_calculation():
    """The global model of round 1 has the accuracies 0.8 and 0.6. In round 2, client 0 has 3 and 1
    examples, and its model 0.4 and 0.7: drops 0.4 and 0, so (3 * 0.4 + 1 * 0) / 4 = 0.3, and
    accuracy (3 * 0.4 + 1 * 0.7) / 4 = 0.475. Client 2 has only the second class, and its model 0.9
    and 0.5: 0.1 and 0.5. Client 1 does not take part."""
    history = Record(np.array([[3, 1], [5, 5], [0, 2]]))
    metric = Personal(own=False, local=True, tests_clients=False)
    history.add(0, np.array([1.0, 1.0]))
    for round, row, local in (
        (1, [0.8, 0.6], [[0.3, 0.3], [0.3, 0.3]]),
        (2, [0.1, 0.1], [[0.4, 0.7], [0.9, 0.5]]),
    ):
        history.add(round, np.array(row))
        history.add_local(round, np.array([0, 2]), np.array(local))
    found = metric.local_values(history, 1)
    assert found["personal_local_forgetting"].tolist() == pytest.approx([0.3, 0.1])
    assert found["personal_local_accuracy"].tolist() == pytest.approx([0.475, 0.5])
    assert np.isnan(metric.local_values(history, 0)["personal_local_forgetting"]).all()
    values = metric.round_values(history)
    assert values["personal_local_forgetting"] == pytest.approx(0.2)
    assert values["personal_local_forgetting_worst"] == pytest.approx(0.3)


def test_accuracy_of_the_worst_tenth_of_clients_equals_hand_calculation():
    values = np.arange(25) / 25
    assert spread(values, True)[2] == pytest.approx((0 + 1 + 2) / 75)  # ceil(2.5) = 3 clients
    assert spread(values, False)[2] == pytest.approx((22 + 23 + 24) / 75)
    assert spread(np.arange(20.0), True)[2] == 0.5  # ceil(2) = 2
    assert spread(np.array([np.nan, 3.0, 1.0]), True) == (2.0, 1.0, 1.0)
    assert all(np.isnan(spread(np.array([np.nan]), True)))


def test_class_without_test_examples_is_left_out():
    accuracy, counts = np.array([0.5, np.nan, 1.0]), np.array([[1, 2, 1], [0, 3, 0]])
    assert own_mean(accuracy, counts)[0] == pytest.approx(0.75)
    assert np.isnan(own_mean(accuracy, counts)[1])


# --- the models


def own_model(name, simulation, state, client):
    """Return a client's personal model after some rounds, written out. Before a client first takes
    part, it is the global model (FedRoD, FedALA), or the initial model for the part that is never
    sent."""
    params, kept = state.server["params"], state.clients.get(client)
    if name == "fedpac":
        return params | tree.row(state.server["heads"], client)
    if kept is None:
        initial = simulation.initial | simulation.initial_buffers
        own = {"fedrod": (), "fedala": (), "fedrep": heads.HEAD}.get(name, initial)
        own = [k for k in own if "norm" in k] if name == "fedbn" else own
        return params | {k: initial[k] for k in own}
    if name == "fedrod":
        return params | {k: params[k] + kept[k] for k in heads.HEAD}
    if name == "fedala":
        old = kept["head"]
        return params | {
            k: (1 - kept["W"][k]) * old[k] + kept["W"][k] * params[k] for k in heads.HEAD
        }
    if name in ("fedrep", "fedbn"):
        return params | kept
    return kept["params"] if name == "fedfomo" else kept


@pytest.mark.parametrize("name", [name for name in PERSONAL if name != "fedproto"])
def test_every_personal_model_is_tested(name):
    """Two of five clients take part in each of two rounds. The accuracy of a class is the number of
    correct predictions in the view over the view's number of examples n_c. 11 of the 40 training
    examples are held out, so n_c differs from the 5 test examples of each class."""
    held_out = Validation(fraction=0.275, per_client=False)
    simulation = make_simulation(
        PERSONAL[name],
        model=MODELS.get(name),
        participation=0.4,
        evaluate=BOTH,
        evaluate_on="both",
        validation=held_out,
    )
    state, runtime = play(simulation, 2), simulation.runtime
    assert name == "fedpac" or 0 < len(state.clients) < 5
    counts, validation = simulation.stages[0].partition.counts, runtime.data.validation
    sets = {
        "plain": (runtime.load_test, torch.arange(20)),
        "validation": (lambda i: runtime.load_train(i, None), validation),
    }
    assert len(validation) == 11
    for view, (load, numbers) in sets.items():
        found = evaluate_personal(simulation, state.server, state.clients, view, 2)
        x, y = load(numbers)
        for client in range(5):
            model = own_model(name, simulation, state, client)
            right = runtime.net(model, x).logits.argmax(1) == y
            slow = [
                float(right[y == c].double().mean()) if counts[client, c] else np.nan
                for c in range(4)
            ]
            np.testing.assert_allclose(found[client], slow, rtol=0, atol=1e-12)


def test_fedproto_predicts_nearest_prototype():
    """argmin_c ||f(x) - C^c|| over the classes with a prototype, with the features of the client's
    model (the initial model before the client first takes part)."""
    simulation = make_simulation(PERSONAL["fedproto"], participation=0.4, evaluate=BOTH)
    state = play(simulation, 1)
    known, mean = (state.server["prototypes"][k] for k in ("known", "mean"))
    assert 0 < known.sum() <= 4
    x, y = simulation.runtime.load_test(torch.arange(20))
    federation = simulation.stages[0].federation
    counts = simulation.stages[0].partition.counts
    found = evaluate_personal(simulation, state.server, state.clients, "plain", 1)
    for client in range(5):
        kept = state.clients.get(client, simulation.initial)
        model = simulation.algorithm.personal_model(state.server, client, kept, federation)
        distances = torch.cdist(simulation.runtime.net(kept, x).features, mean[known > 0])
        nearest = torch.nonzero(known).flatten()[distances.argmin(1)]
        assert torch.equal(simulation.runtime.net(model, x).logits.argmax(1), nearest)
        right = [float((nearest[y == c] == c).double().mean()) for c in range(4)]
        # a class without one is far away, not at 0
        few = state.server["prototypes"] | {"known": torch.tensor([0.0, 0, 1, 0]).double()}
        model = simulation.algorithm.personal_model({"prototypes": few}, client, kept, federation)
        assert simulation.runtime.net(model, x).logits.argmax(1).tolist() == [2] * 20
        assert np.array_equal(found[client], np.where(counts[client] > 0, right, np.nan), True)


def test_batch_statistics_use_batches_of_global_test():
    """Predictions depend on the other images of a batch. A copy of the global model has its correct
    predictions for the client's classes. Batches of 7 split the 20 test images unevenly. Testing
    each class separately gives other predictions."""

    class SmallBatches(ClientRuntime):
        evaluation_batch = 7

    simulation = make_simulation(model=CifarResNet(widths=(4, 8)), participation=1.0)
    state = play(simulation, 2)
    runtime, params = SmallBatches(**vars(simulation.runtime)), state.server["params"]
    copied = {name: value.clone() for name, value in params.items()}
    everywhere = runtime.evaluate(params).class_correct
    test, found = ModelTest(runtime, state.server, None), []
    for c in range(4):
        own = np.arange(4) == c
        found.append(int(test.count_correct(copied, own)[c]))
        assert torch.equal(test.count_correct(copied, own), everywhere * torch.from_numpy(own))
        assert torch.equal(test.count_correct(copied, ~own), everywhere * torch.from_numpy(~own))
    x, y = runtime.load_test(torch.arange(20))
    apart = [int((runtime.net(params, x[y == c]).logits.argmax(1) == c).sum()) for c in range(4)]
    assert apart != found == everywhere.tolist()


# --- in a run


def test_local_models_have_personal_columns(tmp_path):
    simulation = make_simulation(
        evaluate=BOTH, forgetting_metric=RoundDrop(local=True), participation=1.0
    )
    rows, _ = full_run(simulation, tmp_path)
    assert [name for name in rows[0] if "personal_local" in name] == [
        f"personal_local_{name}" for name in NAMES
    ]
    state = play(simulation, 2)
    found = play_round(simulation, state)
    local = found.tests["plain"].local
    counts = simulation.stages[0].partition.counts
    shares = (local * counts).sum(1) / counts.sum(1)
    assert float(rows[3]["personal_local_accuracy"]) == pytest.approx(shares.mean(), abs=1e-12)
    assert rows[1]["personal_local_forgetting"] == ""
    received = simulation.runtime.evaluate(state.server["params"]).class_correct.numpy() / 5
    lost = (counts * np.maximum(0, received - local)).sum(1) / counts.sum(1)
    assert float(rows[3]["personal_local_forgetting"]) == pytest.approx(lost.mean(), abs=1e-12)


def test_personal_accuracy_weights_all_tasks_so_far(tmp_path):
    """Two tasks of two classes: in the first task only its classes count, in the second
    all four."""
    simulation = make_simulation(
        scenario=TWO_TASKS, sizes=(3, 4, 5), rounds=2, participation=1.0, evaluate=BOTH
    )
    rows, _ = full_run(simulation, tmp_path)
    first, second = (stage.partition.counts for stage in simulation.stages)
    for number, counts in ((2, first), (4, first + second)):
        params = play(simulation, number).server["params"]
        slow = [slow_accuracy(simulation, params, row) for row in counts]
        assert float(rows[number]["personal_accuracy"]) == pytest.approx(np.mean(slow), abs=1e-12)
    assert not first[:, 2:].any()
    assert second[:, 2:].any()
    # a client's own model is tested on the classes that it holds in any task
    own = make_simulation(PERSONAL["fedrod"], scenario=TWO_TASKS, sizes=(3, 4, 5), rounds=2)
    found = evaluate_personal(own, own.initial_state().server, {}, "plain", 1)
    assert np.array_equal(np.isnan(found), first + second == 0)
    assert (first + second == 0).any()


# --- the option


@pytest.mark.parametrize(("word", "listed"), [("personal", BOTH), ("global", ["global"])])
def test_single_word_for_evaluate_equals_list(word, listed):
    """The configuration is the same."""
    one, other = (
        resolve(composed(f"evaluate={value}")) for value in (word, f"[{','.join(listed)}]")
    )
    assert one == other
    assert one["evaluate"] == listed
    with pytest.raises(ConfigError, match=r"evaluate=personel.*nearest: 'personal'"):
        build(composed("evaluate=personel"))
