"""FedAvgM, FedNova, SCAFFOLD, FedDyn, FedCurv: aggregation, control variates and penalties against
closed forms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.base import fresh_pass
from fedexp.algorithms.fedcurv import FedCurv
from fedexp.algorithms.feddyn import FedDyn
from fedexp.algorithms.fednova import FedNova, effective_steps
from fedexp.algorithms.interfaces import Batch, Context
from fedexp.algorithms.scaffold import Scaffold
from fedexp.core import tree
from fedexp.engine.base import ScheduledData, Shared
from fedexp.testing import set_up_client
from toy_federation import (
    LOCAL,
    SoftmaxRegression,
    assemble,
    assert_close,
    broadcast,
    describe,
    flat,
    make_simulation,
    play,
    play_round,
)


def one_round(algorithm, rounds=2, **changes):
    """Return (simulation, state before the last round, its cohort, the results of training, the
    round)."""
    simulation = make_simulation(algorithm, **changes)
    state = play(simulation, rounds - 1)
    cohort = assemble(simulation, state, rounds)
    lr = simulation.runtime.local.lr_at(rounds)
    trained = simulation.engine.train(
        Shared(algorithm, simulation.runtime, broadcast(simulation, state), lr), cohort, False
    )
    return simulation, state, cohort, trained, describe(simulation, state, cohort, trained)


# --- FedAvgM


# --- FedNova


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7, 60])
def test_effective_steps_equal_progress_under_constant_gradient(momentum, steps):
    """With gradient 1 and lr 1, momentum SGD moves by the sum over s of (1 + rho + ... +
    rho^(s-1))."""
    position = buffer = 0.0
    for _ in range(steps):
        buffer = momentum * buffer + 1
        position += buffer
    assert_close(
        effective_steps(torch.tensor(float(steps), dtype=torch.float64), momentum).item(),
        position,
        1e-10,
    )


def test_fednova_equals_formula_of_paper():
    """w - lr * tau_eff * sum_k p_k d_k with d_k = (w - w_k) / (lr a_k), computed for each
    client."""
    simulation, state, cohort, trained, about = one_round(FedNova(variant="plain"))
    start, lr = flat(state.server["params"]), about.lr
    p = about.weights / about.weights.sum()
    a = [float(effective_steps(torch.tensor(float(s.steps)), 0.9)) for s in cohort.schedules]
    assert len(set(a)) > 1
    models = [flat(tree.row(trained.messages["params"], i)) for i in range(len(a))]
    d = sum(p[i] * (start - models[i]) / (lr * a[i]) for i in range(len(a)))
    tau = sum(p[i] * a[i] for i in range(len(a)))
    new = simulation.algorithm.aggregate(state.server, trained.messages, about)["params"]
    assert_close(flat(new), start - lr * tau * d, 1e-6)  # a in float32 above


def test_fednova_mean_direction_equals_its_formula():
    """d_mean <- (1 - sum_S n_k / n) d_mean + sum_S (n_k / n) d_k. Clients keep their d_k."""
    simulation, state, cohort, trained, about = one_round(FedNova(variant="ccvr"))
    sizes = np.array([len(part) for part in simulation.stages[0].federation.parts])
    share = torch.from_numpy(sizes[cohort.clients] / sizes.sum())
    expected = (1 - share.sum()) * flat(state.server["d"])
    expected = expected + sum(
        s * flat(kept["d"]) for s, kept in zip(share, trained.states, strict=True)
    )
    new = simulation.algorithm.aggregate(state.server, trained.messages, about)["d"]
    assert_close(flat(new), expected)


# --- server state is the reduction of client states


@pytest.mark.parametrize("divisor", ["steps", "effective"])
def test_client_without_steps_keeps_its_variate(divisor):
    """Its gradient is unknown, not 0: c_k <- c_k, and c does not change. With one step, c_k - c is
    added."""
    algorithm = Scaffold(divisor=divisor, variates="uniform")
    w, c = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([0.5, -0.25])}
    ctx = Context(
        {"params": w, "c": c},
        {},
        {"c": {"w": torch.tensor([2.0, 7.0])}},
        {},
        {},
        0.1,
        torch.tensor(0.0),
        LOCAL,
        torch.tensor(1.0),
    )
    message, kept = algorithm.finish(None, w, None, ctx)
    assert kept["c"]["w"].tolist() == [2.0, 7.0]
    assert message["change"]["w"].tolist() == [0.0, 0.0]
    message, kept = algorithm.finish(None, w, None, replace(ctx, steps=torch.tensor(1.0)))
    # it has not moved: the mean gradient is 0, so the change is -c
    assert kept["c"]["w"].tolist() == [1.5, 7.25]
    assert message["change"]["w"].tolist() == [-0.5, 0.25]


# --- a strongly convex problem: softmax regression with weight decay, full batches, every client in
# every round


# --- FedDyn


def test_feddyn_equals_algorithm_of_paper():
    """Algorithm 1 with h_k: L + -<h_k, w> + alpha/2 ||w - w_t||^2; h <- h - alpha/K sum (w_k -
    w_t); w = mean - h/alpha."""
    alpha, algorithm = 0.3, FedDyn(alpha=0.3, clip=0.0, per_client_alpha=False)
    simulation = make_simulation(algorithm, weighting="uniform")
    state, runtime = simulation.initial_state(), simulation.runtime
    h, server_h = dict.fromkeys(range(5), 0.0), 0.0
    for number in (1, 2, 3):
        cohort, start = assemble(simulation, state, number), state.server["params"]
        models = []
        for client, schedule in zip(cohort.clients, cohort.schedules, strict=True):
            w = {k: v.clone().requires_grad_() for k, v in start.items()}
            optimizer = torch.optim.SGD(
                w.values(),
                LOCAL.lr_at(number),
                momentum=LOCAL.momentum,
                weight_decay=LOCAL.weight_decay,
            )
            for batch in ScheduledData(runtime, schedule).batches():
                point = flat(w)
                loss = F.cross_entropy(runtime.net(w, batch.x).logits, batch.y)
                loss = (
                    loss
                    - (h[client] * point).sum()
                    + alpha / 2 * ((point - flat(start)) ** 2).sum()
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            models.append(flat(w).detach())
            h[client] = h[client] - alpha * (models[-1] - flat(start))
        server_h = server_h - alpha / 5 * sum(m - flat(start) for m in models)
        state.advance(play_round(simulation, state))
        assert_close(
            flat(state.server["params"]), sum(models) / len(models) - server_h / alpha, 1e-10
        )


def test_feddyn_alpha_is_divided_by_the_clients_share_of_examples():
    simulation = make_simulation(FedDyn(alpha=0.3, clip=0.0, per_client_alpha=True))
    for client, part in enumerate(simulation.stages[0].federation.parts):
        plan = simulation.algorithm.host_plan(
            simulation.stages[0].federation, client, np.random.default_rng(0)
        )
        # n_k K / n, with n = 1 + 3 + 7 + 8 + 6
        assert_close(plan["alpha"], 0.3 / (len(part) * 5 / 25))


# --- FedCurv


def fisher_context(estimator, samples, local, sizes=(10,)):
    """Return the Fisher information of the client with the last size, the model, and its batches
    without padding."""
    algorithm = FedCurv(lambda_=1.0, samples=samples, estimator=estimator)
    simulation = make_simulation(
        algorithm, local, sizes, SoftmaxRegression(), participation=1.0, augment=False
    )
    client = set_up_client(simulation, simulation.initial_state())
    data, ctx, params = client.data, client.ctx, simulation.initial
    fresh = [Batch(b.x[mask > 0], b.y[mask > 0], None, b.step) for b, mask in fresh_pass(data, ctx)]
    return algorithm.fisher(simulation.runtime.net, params, data, ctx), params, fresh


def analytic(params, batch):
    """Return the gradient of each example's cross-entropy: (softmax - one-hot) outer x, without x
    for the bias."""
    x = batch.x.flatten(1)
    z = x @ params["classifier.weight"].T + params["classifier.bias"]
    delta = z.softmax(-1)
    delta[torch.arange(len(x)), batch.y] -= 1
    return delta[:, :, None] * x[:, None], delta


def test_fedcurv_fisher_equals_the_formula_for_softmax_regression():
    local = replace(LOCAL, epochs=2, batch_size=4)  # 10 examples: batches of 4, 4, 2, twice
    u, params, batches = fisher_context("sample", 500, local)
    grads = [analytic(params, batch) for batch in batches[:3]]  # one pass
    for name, part in (("classifier.weight", 0), ("classifier.bias", 1)):
        assert_close(u[name], torch.cat([g[part] for g in grads]).pow(2).mean(0))
    u, params, batches = fisher_context("batch", 500, local)
    for name, part in (("classifier.weight", 0), ("classifier.bias", 1)):
        assert_close(u[name], sum(g[part].mean(0) ** 2 for g in grads) / 3)


def test_fedcurv_fisher_does_not_count_the_missing_batches_of_a_shorter_client():
    """Three batches for the client with 10 examples, one for the client with 3."""
    local = replace(LOCAL, epochs=2, batch_size=4)
    u, params, batches = fisher_context("batch", 500, local, sizes=(10, 3))
    assert [len(batch.x) for batch in batches] == [3, 0, 0]
    weight, bias = (gradient.mean(0) for gradient in analytic(params, batches[0]))
    assert_close(u["classifier.weight"], weight**2)
    assert_close(u["classifier.bias"], bias**2)


def test_fedcurv_computes_fisher_on_an_extra_pass():
    """The pass has all examples once, in another order and with other augmentation than training.
    With few `samples`, it has fewer batches. A shorter client's missing batches are masked."""
    local = replace(LOCAL, epochs=2, batch_size=4)
    algorithm = FedCurv(lambda_=1.0, samples=500, estimator="batch")
    simulation = make_simulation(algorithm, local, (10, 3), SoftmaxRegression(), participation=1.0)
    cohort = assemble(simulation, simulation.initial_state(), 1)
    plan, schedule = cohort.plans[0], cohort.schedules[0]
    mask = plan["after_mask"] > 0
    part = simulation.stages[0].federation.parts[cohort.clients[0]].tolist()
    assert mask.sum(1).tolist() == [4, 4, 2]
    assert sorted(plan["after_index"][mask]) == part
    epochs = [schedule.index[i : i + 3].numpy()[mask].tolist() for i in (0, 3)]
    assert plan["after_index"][mask].tolist() not in epochs
    assert not np.array_equal(plan["after_draws"][mask], schedule.draws[:3].numpy()[mask])
    assert (cohort.plans[1]["after_mask"].sum(1) == [3, 0, 0]).all()
    few = make_simulation(
        replace(algorithm, samples=4), local, (10, 3), SoftmaxRegression(), participation=1.0
    )
    assert assemble(few, few.initial_state(), 1).plans[0]["after_index"].shape == (2, 4)


def test_fedcurv_penalty_sums_over_other_clients():
    """lambda sum_{j != k} (w - w_j)^T diag(u_j) (w - w_j) up to a constant, compared at
    two points."""
    algorithm = FedCurv(lambda_=0.7, samples=5, estimator="batch")
    simulation = make_simulation(algorithm)
    state = play(simulation, 3)
    cohort = assemble(simulation, state, 4)
    client, sent, start = cohort.clients[0], broadcast(simulation, state), state.server["params"]
    ctx = Context(
        sent, {}, cohort.states[0], {}, {}, 0.1, torch.tensor(1.0), LOCAL, torch.tensor(1.0)
    )
    ctx = replace(ctx, setup=algorithm.client_setup(simulation.runtime.net, None, ctx))

    def written_out(w):
        total = 0.0
        for other, kept in state.clients.items():
            if other != client:
                u, v = flat(kept["u"]), flat(kept["v"])
                w_j = torch.where(u > 0, v / torch.where(u > 0, u, 1.0), 0.0)
                total = total + (u * (flat(w) - w_j) ** 2).sum()
        return 0.7 * total

    points = [start, {k: v + 0.1 for k, v in start.items()}]
    ours, expected = (
        [f(p) for p in points] for f in (lambda p: algorithm.penalty(None, p, ctx), written_out)
    )
    assert_close(ours[1] - ours[0], expected[1] - expected[0])
    assert abs(expected[1] - expected[0]) > 1e-6
