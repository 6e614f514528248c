"""Methods that keep examples chosen by a model: GLFC and FedCBDR compared with loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.interfaces import Batch
from fedexp.engine.network import LiveNetwork
from fedexp.testing import set_up_client, train
from fedexp.training.rounds import begin_task
from fedexp_continual.algorithms.exemplars import numbers_in
from fedexp_continual.algorithms.fedcbdr import FedCBDR, leverage
from fedexp_continual.algorithms.glfc import GLFC, herding
from method_rows import stream
from test_skew_methods import Table
from toy_federation import assemble, assert_close, broadcast, context, describe, play, random

CBDR = FedCBDR(
    samples=6, tau_old=0.8, tau_new=1.4, omega_old=1.2, omega_new=0.6, selection="leverage"
)
GLFC_ = GLFC(memory=4, lambda_gc=0.7, lambda_rd=0.4, compensation=True, proxy=True)
# Classes 0 and 2 are old, 1 is new, 3 is to come; the last example is padding.
OLD, NEW = (torch.tensor(row, dtype=torch.float64) for row in ([1, 0, 1, 0], [0, 1, 0, 0]))
LABELS, MASK = (
    torch.tensor([2, 1, 0, 1, 1, 2]),
    torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.float64),
)


def objective(algorithm, params, **server):
    ctx = context(server={"params": params} | server)
    return algorithm.objective(Table(), params, Batch(torch.arange(6), LABELS, MASK, 0), ctx)


# --- GLFC


@pytest.mark.parametrize("compensation", [True, False])
def test_glfc_loss_equals_released_code(compensation):
    """The released code sums over three outputs. Here the future class 3 adds one more negative.
    The weights have no gradient."""
    z, before = random(6, 4).requires_grad_(), random(6, 4, seed=1)
    loss = objective(
        replace(GLFC_, compensation=compensation), {"z": z}, old={"z": before}, known=OLD, new=NEW
    )
    examples, sigmoid = range(5), lambda v: 1 / (1 + (-v).exp())
    g = [1 - sigmoid(z[i, LABELS[i]]).detach() for i in examples]
    kinds = {kind: [i for i in examples if bool(OLD[LABELS[i]]) is kind] for kind in (True, False)}
    assert {kind: len(of) for kind, of in kinds.items()} == {True: 2, False: 3}
    expected = 0.0
    for i in examples:
        kind = kinds[bool(OLD[LABELS[i]])]
        weight = g[i] / (sum(g[j] for j in kind) / len(kind)) if compensation else 1.0
        for c in range(4):
            label = float(LABELS[i] == c)
            target = sigmoid(before[i, c]) if OLD[c] else label
            p = sigmoid(z[i, c])
            learning, distilling = (
                -(t * p.log() + (1 - t) * (1 - p).log()) / 3 for t in (label, target)
            )
            expected = expected + (0.7 * weight * learning + 0.4 * distilling) / 5
    assert_close(loss, expected)
    assert_close(torch.autograd.grad(loss, z), torch.autograd.grad(expected, z))


def test_herding_equals_hand_calculation():
    """Features are at 0, 20, 40 and 100 degrees. Their mean points to 38.9 degrees and has length
    0.82, so the closest single feature is at 40. The closest mean of two includes the one at 20:
    it is at 30 degrees, has length 0.98, and is 0.20 away. With 100 (at 70, length 0.87) it would
    be 0.46 away, and with 0 (at 20, length 0.94) 0.31.
    """
    angles = torch.deg2rad(torch.tensor([0.0, 20, 40, 100], dtype=torch.float64))
    features = 3 * torch.stack([angles.cos(), angles.sin()], 1)
    assert herding(features, 2).tolist() == [2, 1]
    assert sorted(herding(features, 9).tolist()) == [0, 1, 2, 3]


def test_prototypes_are_the_images_closest_to_the_class_mean():
    """If a class has two examples, both are equally far from the mean, and the one trained on
    first is chosen.
    """
    simulation = stream(GLFC_, augment=False, sizes=(1, 3, 5, 2))
    state, net = simulation.initial_state(), simulation.runtime.net
    cohort, parts = assemble(simulation, state, 1), simulation.stages[0].federation.parts
    position = int(np.argmax([len(parts[c]) for c in cohort.clients]))
    client = set_up_client(simulation, state, position)
    sent, data, part = client.ctx.server, client.data, parts[client.client]
    found = simulation.algorithm.prototypes(net, sent["params"], data, client.ctx)
    passed = cohort.schedules[position].index.flatten().tolist()
    part = sorted(part, key=passed.index)
    x, y = data.take(torch.as_tensor(part))
    features = F.normalize(net(sent["params"], x).features)
    assert found["is_there"].tolist() == [float(c in y.tolist()) for c in range(4)]
    for c in set(y.tolist()):
        apart = (features[y == c] - features[y == c].mean(0)).norm(dim=1)
        chosen = [bool((image == found["x"][c]).all()) for image in x[y == c]].index(True)
        assert apart[chosen] <= apart.min() + 1e-4
        assert chosen == 0 or len(apart) != 2
    assert 2 in y.bincount()


def test_proxy_server_sends_the_best_model_of_the_task():
    """A model with lower accuracy on the prototypes does not replace the best model; one with
    equal accuracy does.
    """
    simulation = stream(GLFC_)
    state = play(simulation, 1)
    prototypes, net = state.server["prototypes"], LiveNetwork(simulation.runtime.net)
    answers = net(state.server["params"], prototypes["x"]).logits.argmax(1)
    right = (answers == prototypes["y"]).double().mean()
    assert_close(state.server["score"], right)
    for score, replaced in ((float(right), True), (float(right) + 0.1, False)):
        given = state.server | {
            "score": torch.tensor(score, dtype=torch.float64),
            "best": {"another": right},
        }
        refined = simulation.algorithm.refine(net, given, {}, None)
        assert (refined["best"].keys() == state.server["params"].keys()) is replaced
    begun = begin_task(simulation, given, 3)
    assert begun["old"] == {"another": right}
    assert not begun.keys() & {"best", "score", "prototypes"}
    assert "asks" in simulation.algorithm.broadcast(begun)
    assert "asks" not in broadcast(simulation, state)
    # no message arrived in the whole task
    alone = {name: each for name, each in given.items() if name not in ("best", "score")}
    old = begin_task(simulation, alone, 3)["old"]
    assert_close(old, state.server["params"] | state.server["buffers"])


# --- FedCBDR


def test_leverage_equals_projection_diagonal():
    """The projection is X (X^T X)^-1 X^T. A linearly dependent column changes nothing. With all n
    columns of U, as Eq. (4) is printed, every score is 1.
    """
    x = random(7, 3)
    expected = (x @ torch.linalg.inv(x.T @ x) @ x.T).diagonal()
    assert_close(leverage(x), expected)
    assert_close(leverage(torch.cat([x, x[:, :1] - x[:, 1:2]], 1)), expected)
    assert leverage(torch.zeros(4, 2)).tolist() == [1.0] * 4
    assert_close(torch.linalg.svd(x)[0].square().sum(1), torch.ones(7).double())


def test_fedcbdr_draws_by_leverage_over_all_clients():
    """Four examples share a direction (tau = 1/4 each), and two have separate directions (tau =
    1), so p = 1/12 and 1/3. A single draw is one of the two with probability 2/3: 400 of 600, with
    a standard deviation of 11.5. An example with zero features is never drawn.
    """
    points = torch.zeros(7, 3, dtype=torch.float64)
    points[:4, 0], points[4, 1], points[5, 2] = 1, 5, 0.1
    kept, own = [np.array([9]), np.zeros(0, int)], [np.array([0, 1, 4]), np.array([2, 3, 5, 6])]
    lonely = 0
    for seed in range(600):
        drawn = replace(CBDR, samples=1).choose(
            kept, own, points.__getitem__, None, np.random.default_rng(seed)
        )
        fresh = sorted({*drawn[0], *drawn[1]} - {9})
        assert len(fresh) == 1
        assert 9 in drawn[0]
        assert 6 not in fresh
        lonely += fresh[0] in (4, 5)
    assert abs(lonely - 400) < 5 * 11.5
    every = replace(CBDR, samples=50).choose(
        kept, own, points.__getitem__, None, np.random.default_rng(0)
    )
    assert [numbers.tolist() for numbers in every] == [[0, 1, 4, 9], [2, 3, 5]]


def test_fedcbdr_loss_equals_loops():
    """Eq. (7) with two old and three new examples. Classes 1 and 3 have the temperature of new
    classes.
    """
    z = random(6, 4)
    loss = objective(CBDR, {"z": z}, known=OLD)
    expected = 0.0
    for i in range(5):
        scaled = torch.stack([z[i, c] / (0.8 if OLD[c] else 1.4) for c in range(4)])
        p = scaled[LABELS[i]].exp() / scaled.exp().sum()
        expected = expected - p.log() * (1.2 / 2 if OLD[LABELS[i]] else 0.6 / 3)
    assert_close(loss, expected)
    assert_close(objective(CBDR, {"z": z}), F.cross_entropy(z[:5], LABELS[:5]))


# --- both


@pytest.mark.parametrize("algorithm", [CBDR, GLFC_], ids=["fedcbdr", "glfc"])
def test_clients_train_on_kept_examples(algorithm):
    simulation = stream(algorithm, participation=1.0)
    state = play(simulation, 3)
    first, second = (stage.federation for stage in simulation.stages)
    kept = numbers_in(state.server, second)
    assert sum(map(len, kept)) > 0
    cohort = assemble(simulation, state, 4)
    for client, schedule in zip(cohort.clients, cohort.schedules, strict=True):
        assert set(kept[client]) <= set(first.parts[client])
        rows = zip(schedule.index.tolist(), schedule.lengths.tolist(), strict=True)
        trained_on = {number for row, length in rows for number in row[:length]}
        assert trained_on == {*second.parts[client], *kept[client]}
    trained = train(simulation.engine, simulation, state, cohort)
    federation = describe(simulation, state, cohort, trained).federation
    assert federation.weights.tolist() == [
        len(part) + len(own) for part, own in zip(second.parts, kept, strict=True)
    ]
    assert federation.counts.sum(1).tolist() == federation.weights.tolist()
