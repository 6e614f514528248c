"""Methods for label skew against their formulas, in float64."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.feddecorr import decorrelation
from fedexp.algorithms.fedexp_step import FedExPStep
from fedexp.algorithms.fedgkd import FedGKD
from fedexp.algorithms.fedlc import FedLC
from fedexp.algorithms.fedlmd import FedLMD
from fedexp.algorithms.fedrs import FedRS
from fedexp.algorithms.fedsam import FedSAM
from fedexp.algorithms.fedsmoo import FedSMOO
from fedexp.algorithms.fedspeed import FedSpeed
from fedexp.algorithms.fedssd import FedSSD, credibility
from fedexp.algorithms.fedvls import FedVLS
from fedexp.algorithms.interfaces import Batch, Context
from fedexp.algorithms.local_training import LocalTraining
from fedexp.models import Output
from fedexp.training.exchange import public_set
from toy_federation import (
    LARGER,
    flat,
    float64,
    make_simulation,
    play,
    random,
    trained_round,
)

SGD = LocalTraining(
    epochs=1, batch_size=4, optimizer="sgd", lr=0.1, lr_decay=1.0, momentum=0.9, weight_decay=0.01
)


class Table:
    """A network whose parameters are its logits: row b of params["z"] for example b."""

    def __call__(self, params, x):
        return Output(params["z"][x], params["z"][x])

    def gradient(self, function, params):
        return torch.func.grad_and_value(function)(params)

    def buffers(self):
        return {}


def context(server=None, client=None, plan=None, lr=0.1):
    one = float64(1.0)
    return Context(
        {"params": {}} | (server or {}), {}, client or {}, plan or {}, {}, lr, one, SGD, one
    )


def batch_of(y, mask=None):
    return Batch(torch.arange(len(y)), torch.as_tensor(y), mask, 0)


# --- losses


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_fedlmd_equals_released_code(tau):
    """The released code subtracts 1000 from the logits of the classes that are masked."""
    z, teacher, y = random(3, 5), random(3, 5, seed=1), torch.tensor([0, 3, 1])
    minority = float64([0.0, 1, 1, 0, 1])
    method = FedLMD(beta=0.7, tau=tau, teacher=True)
    loss = method.example_loss(
        Table(),
        {"z": z},
        batch_of(y),
        context({"params": {"z": teacher}}, plan={"minority": minority}),
    )
    label, major = F.one_hot(y, 5), 1 - minority
    p = (teacher / tau - 1000 * major - 1000 * label).softmax(1)
    log_q = (z / tau - 1000 * label).log_softmax(1)
    expected = F.cross_entropy(z, y) + 0.7 * tau**2 * F.kl_div(log_q, p, reduction="batchmean")
    assert_close(loss.mean(), expected, rtol=1e-12, atol=0)


def test_fedlmd_without_a_teacher_equals_hand_calculation():
    """C = 4, y = 0, majority {0, 1}: p = 1/2 on classes 2 and 3. With z = (0, 0, 0, log 2): q over
    {1, 2, 3} is (1, 1, 2) / 4, so KL = 1/2 log((1/2) / (1/4)) + 1/2 log((1/2) / (1/2)) = log(2) /
    2."""
    z = float64([[0.0, 0, 0, np.log(2)]])
    minority = float64([0.0, 0, 1, 1])
    method = FedLMD(beta=1.0, tau=1.0, teacher=False)
    loss = method.example_loss(
        Table(), {"z": z}, batch_of([0]), context(plan={"minority": minority})
    )
    assert_close(loss, F.cross_entropy(z, torch.tensor([0]))[None] + np.log(2) / 2)


def test_fedlmd_majority_classes_have_above_average_counts():
    simulation = make_simulation(FedLMD(beta=1.0, tau=1.0, teacher=True))
    for client, counts in enumerate(simulation.stages[0].federation.counts):
        plan = simulation.algorithm.host_plan(
            simulation.stages[0].federation, client, np.random.default_rng(0)
        )
        assert plan["minority"].tolist() == [float(n * len(counts) <= sum(counts)) for n in counts]


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_feddecorr_equals_numpy_correlation(variant):
    features = random(6, 4)
    K = torch.from_numpy(np.corrcoef(features.numpy().T))
    outside = K[~torch.eye(4, dtype=torch.bool)] ** 2
    # C = (n - 1) K, n = 6
    expected = outside.sum() / 16 if variant == "paper" else 25 * outside.mean() / 6
    # eps
    assert_close(decorrelation(features, None, variant), expected, rtol=1e-6, atol=0)


def test_fedlc_equals_hand_calculation():
    """n = (16, 1, 0), tau = 2: margins 2 / 2 = 1 and 2, class 2 is out. z = (0, 0, 5), y = 0:
    -log(e^-1 / (e^-1 + e^-2)) = log(1 + e^-1)."""
    z = float64([[0.0, 0, 5]])
    simulation = make_simulation(FedLC(tau=2.0))
    federation = replace(
        simulation.stages[0].federation, counts=np.array([[16, 1, 0]]), parts=(np.arange(17),)
    )
    plan = {
        k: torch.as_tensor(v)
        for k, v in FedLC(tau=2.0).host_plan(federation, 0, np.random.default_rng(0)).items()
    }
    loss = FedLC(tau=2.0).example_loss(Table(), {"z": z}, batch_of([0]), context(plan=plan))
    assert_close(loss, torch.tensor([np.log1p(np.exp(-1))]))


def test_fedrs_equals_hand_calculation():
    """alpha = 0.5, class 1 is absent. z = (0, 2 log 3), y = 0: -log(1 / (1 + 3)) = log 4."""
    z = float64([[0.0, 2 * np.log(3)]])
    counts = SimpleNamespace(counts=np.array([[7, 0]]))
    plan = {"factor": float64(FedRS(alpha=0.5).host_plan(counts, 0, None)["factor"])}
    loss = FedRS(alpha=0.5).example_loss(Table(), {"z": z}, batch_of([0]), context(plan=plan))
    assert_close(loss, float64([np.log(4)]))


def fedvls_loss(z, teacher, labels, counts, method):
    """Return FedVLS's Eq. (6) or the loss of its released code, example by example."""
    released, C, n = method.variant == "released", len(counts), len(labels)
    p = [float(count / sum(counts)) for count in counts]
    prior = [share + 1e-9 if released else share for share in p]
    vacant = [c for c in range(C) if p[c] == 0]
    loss = float64(0.0)
    for b, y in enumerate(labels):
        calibrated = [prior[c] * z[b, c].exp() for c in range(C)]
        loss -= torch.log(calibrated[y] / sum(calibrated)) / n
        for o in vacant:
            q_global = teacher[b, o].exp() / sum(teacher[b, c].exp() for c in vacant)
            q_local = z[b, o].exp() / sum(z[b, c].exp() for c in vacant)
            loss += method.lambda_ * q_global * torch.log(q_global / q_local) / n
    for c in range(C):
        mean = float64(0.0)
        for b, y in enumerate(labels):
            if y != c:
                mean += z[b, c].exp() * ((1 / C + 1e-9) / prior[c] if released else 1) / n
            elif released:
                mean += 1 / n
        if mean > 0:
            loss += method.mu * p[c] * torch.log(mean)
    return loss


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize(
    ("counts", "labels"),
    [
        ([3, 0, 1, 0, 0], [0, 2, 0, 0]),
        ([3, 0, 1, 0, 0], [0, 0]),  # a batch without the client's other class
        ([0, 5, 0, 0, 0], [1, 1, 1]),  # one class
        ([2, 1, 4, 0, 1], [2, 0, 2, 4]),  # one vacant class
        ([2, 1, 4, 1, 1], [3, 2, 1]),  # no vacant class
    ],
)
def test_fedvls_loss_and_gradient_equal_loops(counts, labels, variant):
    method = FedVLS(lambda_=0.7, mu=0.4, variant=variant)
    plan = method.host_plan(SimpleNamespace(counts=np.array([counts])), 0, None)
    ctx = context(plan={"shares": float64(plan["shares"])})
    # two rows of padding, one of them labelled as a vacant class
    padded = torch.tensor([*labels, counts.index(min(counts)), labels[0]])
    mask = (torch.arange(len(padded)) < len(labels)).double()
    z, teacher = 2 * random(len(padded), 5), 2 * random(len(padded), 5, seed=1)
    ctx.server["params"] = {"z": teacher}
    expected_slopes, expected = torch.func.grad_and_value(
        lambda z: fedvls_loss(z, teacher, labels, counts, method)
    )(z)
    for batch, count in ((batch_of(labels), len(labels)), (batch_of(padded, mask), len(padded))):
        rows = {"z": z[:count]}
        slopes, loss = torch.func.grad_and_value(
            lambda params, batch=batch: method.objective(Table(), params, batch, ctx)
        )(rows)
        assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        assert_close(slopes["z"], expected_slopes[:count], rtol=1e-10, atol=1e-12)


def test_fedvls_equals_hand_calculation():
    """p = (3/4, 1/4, 0), y = (0, 1), z = (0, log 3, 0) for both.

    Paper: L_cal is the mean of -log(3/4 / (3/4 + 1/4 3)) = log 2 and -log(3/4 / (3/2)) = log 2.
    L_logit = 3/4 log(1/2 1) + 1/4 log(1/2 3). One vacant class: L_dis = 0."""
    method = FedVLS(lambda_=1.0, mu=1.0, variant="paper")
    ctx = context({"params": {"z": random(2, 3)}}, plan={"shares": float64([0.75, 0.25, 0])})
    z = {"z": float64([[0.0, np.log(3), 0]] * 2)}
    expected = np.log(2) + 0.75 * np.log(1 / 2) + 0.25 * np.log(3 / 2)
    assert_close(method.objective(Table(), z, batch_of([0, 1]), ctx), float64(expected))


def test_fedvls_client_with_one_class_only_distils():
    """Also a padded batch without examples gives finite values."""
    z = {"z": random(2, 3)}
    ctx = context({"params": {"z": random(2, 3, seed=1)}}, plan={"shares": float64([0, 1, 0])})
    for mask in (None, torch.zeros(2, dtype=torch.float64)):
        for variant in ("paper", "released"):
            method = FedVLS(lambda_=0.0, mu=1.0, variant=variant)
            slopes, loss = torch.func.grad_and_value(
                lambda params, method=method, mask=mask: method.objective(
                    Table(), params, batch_of([1, 1], mask), ctx
                )
            )(z)
            assert_close(loss, float64(0.0), rtol=0, atol=1e-7)
            assert_close(slopes["z"], torch.zeros_like(z["z"]), rtol=0, atol=1e-8)


def test_fedssd_credibility_equals_hand_calculation():
    """Class 0: 3 of 4 right, 1 predicted as class 1. Class 1: 1 of 2 right, 1 predicted as class 0.
    Class 2 has no examples. M_0 = 3/4 (1 - 1/2), M_1 = 1/2 (1 - 1/4)."""
    labels, answers = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 0])
    found = credibility(F.one_hot(answers, 3).double(), labels)
    assert_close(found, float64([3 / 8, 3 / 8, 0]))


def test_fedssd_loss_equals_loops():
    z, teacher, y = random(3, 4), 2 * random(3, 4, seed=1), torch.tensor([2, 0, 3])
    trusted = float64([0.9, 0.3, 0.7, 0.0])
    sent = context({"params": {"z": teacher}, "credibility": trusted})
    loss = FedSSD(m_max=1.5, threshold=0.1).example_loss(Table(), {"z": z}, batch_of(y), sent)
    for b, label in enumerate(y.tolist()):
        p = teacher[b].exp() / teacher[b].exp().sum()
        expected = -z[b].log_softmax(0)[label]
        for k in range(4):
            weight = 1.5 * max(trusted[k] * (1 - (1 - p[label]) ** 0.5) - 0.1, 0)
            expected = expected + (weight * teacher[b, k] - weight * z[b, k]) ** 2
        assert_close(loss[b], expected, rtol=1e-12, atol=0)
    assert (loss - F.cross_entropy(z, y, reduction="none")).max() > 1e-3


def test_fedssd_measures_credibility_of_the_received_model():
    """It is 0 in round 1, and then comes from predictions on the public examples."""
    simulation = make_simulation(FedSSD(m_max=1.0, threshold=0.0), public=0.2, sizes=LARGER)
    assert simulation.initial_state().server["credibility"].tolist() == [0, 0, 0, 0]
    server = play(simulation, 2).server
    public = public_set(simulation, simulation.stages[0].partition.public)
    x, y = public.take(np.arange(len(public)))
    answers = simulation.runtime.net(server["params"], x).logits.argmax(-1)
    pairs, labels = list(zip(y.tolist(), answers.tolist(), strict=True)), y.tolist()
    rates = [[pairs.count((j, k)) / labels.count(j) for k in range(4)] for j in range(4)]
    expected = [rates[k][k] * (1 - max(rates[j][k] for j in range(4) if j != k)) for k in range(4)]
    assert_close(server["credibility"], float64(expected))
    assert max(expected) > 0


def test_fedgkd_distils_from_mean_of_last_models():
    """Three rounds, two models: the teacher is the mean of the global models after rounds 2 and
    3."""
    simulation = make_simulation(FedGKD(gamma=0.5, tau=2.0, models=2))
    assert simulation.algorithm.broadcast(simulation.initial_state().server)["distils"] == 0
    one, two, three = (play(simulation, rounds).server for rounds in (1, 2, 3))
    # the initial model is never included
    assert_close(simulation.algorithm.broadcast(one)["teacher"], one["params"])
    sent = simulation.algorithm.broadcast(three)
    expected = {k: (two["params"][k] + three["params"][k]) / 2 for k in three["params"]}
    assert_close(sent["teacher"], expected)
    z, teacher, y = random(3, 4), random(3, 4, seed=1), torch.tensor([0, 1, 3])
    server = {"teacher": {"z": teacher}, "distils": float64(1.0)}
    loss = simulation.algorithm.example_loss(Table(), {"z": z}, batch_of(y), context(server)).mean()
    kl = F.kl_div((z / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
    assert_close(loss, F.cross_entropy(z, y) + 0.5 * 4 * kl)


# --- steps, against torch.optim.SGD on the gradient of the paper


def sgd_step(z, grad):
    """Return the result of one step of torch's SGD with this gradient."""
    z = z.clone().requires_grad_()
    z.grad = grad.clone()
    torch.optim.SGD([z], lr=SGD.lr, momentum=SGD.momentum, weight_decay=SGD.weight_decay).step()
    return z.detach()


def grad_at(z, y):
    z = z.clone().requires_grad_()
    F.cross_entropy(z, torch.as_tensor(y)).backward()
    return z.grad


def test_fedsam_uses_gradient_at_perturbed_point():
    z, y = random(3, 4), [0, 1, 3]
    memory = {"momentum": {"z": torch.zeros_like(z)}}
    params, _, loss = FedSAM(rho=0.3).local_step(Table(), {"z": z}, memory, batch_of(y), context())
    g = grad_at(z, y)
    assert_close(params["z"], sgd_step(z, grad_at(z + 0.3 * g / g.norm(), y)))
    assert_close(loss, F.cross_entropy(z, torch.as_tensor(y)))


def test_fedspeed_step_equals_plain_torch():
    z, start, h, y = random(3, 4), random(3, 4, seed=1), random(3, 4, seed=2), [0, 1, 3]
    method = FedSpeed(rho=0.3, lambda_=0.2, alpha=0.75, clip=0.1)
    memory = {"momentum": {"z": torch.zeros_like(z)}}
    ctx = context({"params": {"z": start}}, {"h": {"z": h}})
    params, _, _ = method.local_step(Table(), {"z": z}, memory, batch_of(y), ctx)
    g = grad_at(z, y)
    whole = 0.25 * g + 0.75 * grad_at(z + 0.3 * g / g.norm(), y) + 0.2 * (z - start + h)
    leaf = z.clone().requires_grad_()
    leaf.grad = whole
    torch.nn.utils.clip_grad_norm_([leaf], 0.1)
    assert_close(params["z"], sgd_step(z, leaf.grad))
    _, state = method.finish(Table(), params, None, ctx)
    assert_close(state["h"]["z"], h + params["z"] - start)


def test_fedsmoo_step_equals_plain_torch():
    z, start, h, dual, s = (random(3, 4, seed=seed) for seed in range(5))
    y, method = [0, 1, 3], FedSMOO(rho=0.3, lambda_=0.2, clip=0.0)
    ctx = context({"params": {"z": start}, "s": {"z": s}}, {"h": {"z": h}, "dual": {"z": dual}})
    params = {"z": z, "dual.z": dual}
    memory = {"momentum": {k: torch.zeros_like(v) for k, v in params.items()}}
    params, memory, _ = method.local_step(Table(), params, memory, batch_of(y), ctx)
    d = grad_at(z, y) - dual - s
    e = 0.3 * d / d.norm()
    assert_close(params["z"], sgd_step(z, grad_at(z + e, y) + 0.2 * (z - start + h)))
    assert_close(params["dual.z"], dual + e - s)
    assert memory["momentum"].keys() == params.keys()


# --- servers


def test_fedexp_step_size_equals_formula_of_paper():
    _, state, trained, about = trained_round(FedExPStep(eps=1e-3))
    messages = trained.messages
    start = flat(state.server["params"])
    updates = [
        flat({k: v[i] for k, v in messages["params"].items()}) - start
        for i in range(len(about.weights))
    ]
    share = (about.weights / about.weights.sum()).double()
    mean = sum(p * u for p, u in zip(share, updates, strict=True))
    spread = sum(p * (u @ u) for p, u in zip(share, updates, strict=True)) / (
        2 * (mean @ mean + 1e-3)
    )
    new = FedExPStep(eps=1e-3).aggregate(state.server, messages, about)["params"]
    assert_close(flat(new), start + max(1.0, float(spread)) * mean)
    small = FedExPStep(eps=1e9).aggregate(state.server, messages, about)["params"]
    assert_close(small, FedAvg().aggregate(state.server, messages, about)["params"])


def test_fedspeed_and_fedsmoo_server_steps_equal_plain_torch():
    for algorithm in (
        FedSpeed(rho=0.1, lambda_=0.5, alpha=1.0, clip=0.0),
        FedSMOO(rho=0.1, lambda_=0.5, clip=0.0),
    ):
        _, state, trained, about = trained_round(algorithm)
        messages = trained.messages
        server = algorithm.aggregate(state.server, messages, about)
        share, start = (about.weights / about.weights.sum()).double(), state.server["params"]
        for k, stacked in messages["params"].items():
            h = state.server["h"][k] + (stacked - start[k]).sum(0) / about.federation.num_clients
            assert_close(server["h"][k], h)
            assert_close(server["params"][k], torch.tensordot(share, stacked, 1) + h)
        if "s" in server:
            mean = flat({k: torch.tensordot(share, v, 1) for k, v in messages["dual"].items()})
            assert_close(flat(server["s"]), 0.1 * mean / mean.norm())
