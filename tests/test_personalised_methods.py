"""FedALA, FedRoD, FedFOMO and FedPAC against their formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms import heads
from fedexp.algorithms.fedala import FedALA
from fedexp.algorithms.fedfomo import FedFOMO, cluster_clients, validation_draws
from fedexp.algorithms.fedpac import FedPAC, combine, simplex_minimum
from fedexp.algorithms.fedrod import PERSONAL, FedRoD
from fedexp.algorithms.interfaces import Context
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.engine.base import Shared
from fedexp.testing import set_up_client
from toy_federation import (
    LARGER,
    LOCAL,
    SIZES,
    assemble,
    assert_close,
    broadcast,
    flat,
    float64,
    make_simulation,
    play,
)


def context(simulation, rounds, position):
    """Return a client's context after `client_setup` in the round after `rounds`, its data, its
    number and the server's state."""
    state = play(simulation, rounds)
    client = set_up_client(simulation, state, position)
    return client.ctx, client.data, client.client, state


# --- FedALA


def ala(**changes):
    return FedALA(**dict(eta=1.0, part=0.8, threshold=0.1, max_passes=3) | changes)


def descend(features, y, W, old, new, eta, number):
    """Return W and the loss of the last batch, after each of `number` passes."""
    found = []
    for _ in range(number):
        for start in range(0, len(y), LOCAL.batch_size):
            rows = slice(start, start + LOCAL.batch_size)
            theta = {k: (old[k] + (new[k] - old[k]) * W[k]).requires_grad_() for k in W}
            logits = features[rows] @ theta[heads.WEIGHT].T + theta[heads.BIAS]
            loss = F.cross_entropy(logits, y[rows])
            loss.backward()
            W = {k: (W[k] - eta * theta[k].grad * (new[k] - old[k])).clamp(0, 1) for k in W}
        found.append((W, loss.item()))
    return found


@pytest.mark.parametrize("times", [1, 2])
def test_fedala_learns_its_weights_by_projected_descent(times):
    """The second participation has `max_passes` passes, later ones have one."""
    simulation = make_simulation(ala(eta=0.5), participation=1.0)
    ctx, data, client, _ = context(simulation, times, 3)
    assert ctx.client["rounds"] == times
    numbers = ctx.plan["numbers"][ctx.plan["mask"] > 0]
    assert len(numbers) == int(0.8 * len(simulation.stages[0].federation.parts[client]))
    x, y = data.take(numbers)
    features = simulation.runtime.net(ctx.server["params"], x).features
    old, new, W = ctx.client["head"], heads.head(ctx.server["params"]), ctx.client["W"]
    W, _ = descend(features, y, W, old, new, 0.5, 3 if times == 1 else 1)[-1]
    assert_close(ctx.setup["W"], W)
    assert (flat(W) < 1).any()
    begun = simulation.algorithm.initial_params(simulation.runtime.net, data, ctx)
    assert_close(heads.head(begun), {k: old[k] + (new[k] - old[k]) * W[k] for k in W})
    assert_close(
        {k: v for k, v in begun.items() if k not in heads.HEAD},
        {k: v for k, v in ctx.server["params"].items() if k not in heads.HEAD},
        0.0,
    )


@pytest.mark.parametrize("share", [1000.0, 1.03, 0.97])
def test_fedala_stops_by_population_standard_deviation(share):
    """Eleven passes or more, until the last ten losses have sqrt(mean of squares about their mean)
    below the threshold: here far above theirs at the first look, a little above and a little below.
    With 9 as divisor it would be 5.4 % more. Four examples, one batch; the loss of a pass is that
    before its step."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    y, shapes = torch.tensor([0, 1, 2, 0]), {heads.WEIGHT: (4, 3), heads.BIAS: (4,)}
    old, new = (
        {k: torch.randn(v, generator=generator, dtype=torch.float64) for k, v in shapes.items()}
        for _ in "12"
    )
    ones = {k: torch.ones_like(v) for k, v in old.items()}
    weights, losses = zip(*descend(features, y, ones, old, new, 0.05, 30), strict=True)
    deviations = {n: np.std(losses[n - 10 : n], ddof=0) for n in range(11, 31)}
    threshold = share * deviations[11]
    passes = next(n for n, deviation in deviations.items() if deviation < threshold)
    assert (passes == 11) == (share > 1)
    client = {"head": old, "W": ones, "rounds": torch.tensor(1.0)}
    ctx = Context(
        {"params": new}, {}, client, {}, {}, 0.1, torch.tensor(1.0), LOCAL, torch.tensor(1.0)
    )
    algorithm, mask = ala(eta=0.05, threshold=threshold, max_passes=30), torch.ones(4).double()
    assert_close(algorithm.learn(features, y, mask, ctx), weights[passes - 1])


# --- FedRoD


def test_fedrod_losses_equal_a_loop_over_examples():
    simulation = make_simulation(FedRoD(gamma=0.5))
    ctx, data, client, _ = context(simulation, 1, -1)
    net, counts = simulation.runtime.net, simulation.stages[0].federation.counts[client]
    params = simulation.algorithm.initial_params(net, data, ctx)
    params = {k: v + 0.1 if k.startswith(PERSONAL) else v for k, v in params.items()}
    batch = next(data.batches())
    out = net(params, batch.x)
    losses = []
    for i, y in enumerate(batch.y.tolist()):
        weights = torch.from_numpy(counts).double() ** 0.5 * out.logits[i].exp()
        personal = (
            out.logits[i]
            + out.features[i] @ params[PERSONAL + heads.WEIGHT].T
            + params[PERSONAL + heads.BIAS]
        )
        losses.append(-(weights[y] / weights.sum()).log() - personal.softmax(0)[y].log())
    assert_close(
        simulation.algorithm.example_loss(net, params, batch, ctx), torch.stack(losses), 1e-10
    )


# --- FedFOMO


def fomo(**changes):
    return FedFOMO(
        **dict(models=2, validation=0.3, epsilon=0.0, epsilon_decay=0.05, distance="l1") | changes
    )


def test_fedfomo_trains_and_validates_on_different_examples():
    """Examples with a random number below 0.3 are for validation: at least one of a client's
    examples, and never all."""
    simulation = make_simulation(fomo(), sizes=(1, 2, 3, 8, 6))
    info, algorithm = simulation.stages[0].federation, simulation.algorithm
    drawn = validation_draws(len(info.labels))
    plans = [
        algorithm.host_plan(info, client, np.random.default_rng(0))
        for client in range(info.num_clients)
    ]
    (width,) = {len(plan["mask"]) for plan in plans}
    assert max(int(plan["mask"].sum()) for plan in plans) <= width <= info.largest
    for client, part in enumerate(info.parts):
        train, held = algorithm.training_part(info, client), algorithm.held_out(info, client)
        if len(part) > 1:
            assert sorted([*train, *held]) == part.tolist()
            assert 0 < len(held) < len(part)
            low = {n for n in part if drawn[n] < 0.3}
            assert set(held) == (low or {min(part, key=lambda n: drawn[n])}) - (
                {max(part, key=lambda n: drawn[n])}
            )
        plan = plans[client]
        assert plan["numbers"][plan["mask"] > 0].tolist() == held.tolist(), (
            "the same in every round"
        )


def averages_by_loops(state, federations):
    """The averages of sub-federations, by the numbers of examples, of the models trained last."""
    found = []
    for number in range(federations):
        members = [j for j in state.clients if state.server["federation"][j] == number]
        newest = max((float(state.server["trained"][j]) for j in members), default=0.0)
        last = [j for j in members if state.server["trained"][j] == newest]
        if last:
            total = sum(SIZES[j] for j in last)
            weighted = [SIZES[j] / total * flat(state.clients[j]["params"]) for j in last]
            found.append(sum(weighted))
    return [*found, sum(found) / len(found)] if found else []


@pytest.mark.parametrize(("distance", "federations"), [("l1", 0), ("l2", 0), ("l1", 2)])
def test_fedfomo_weights_equal_loops(distance, federations):
    """Models are compared with the model before the client's last training. The client's trained
    model, the averages of sub-federations and their mean are candidates too."""
    algorithm = fomo(distance=distance, federations=federations)
    simulation = make_simulation(algorithm, participation=0.6)
    ctx, data, client, state = context(simulation, 3, 1)
    numbers = ctx.plan["numbers"][ctx.plan["mask"] > 0]
    x, y = data.take(numbers)

    base = ctx.client["before"]

    def loss(vector):
        parts = vector.split([base[k].numel() for k in sorted(base)])
        model = {k: part.view_as(base[k]) for k, part in zip(sorted(base), parts, strict=True)}
        return float(F.cross_entropy(simulation.runtime.net(model, x).logits, y))

    assert not torch.equal(flat(base), flat(ctx.client["params"]))
    candidates = [flat(state.clients[int(j)]["params"]) for j in ctx.personal["numbers"]]
    candidates += averages_by_loops(state, federations)
    candidates.append(flat(state.clients[client]["params"]))
    assert len(candidates) == (6 if federations else 3)
    gains = []
    for other in candidates:
        apart = (other - flat(base)).norm(p=1 if distance == "l1" else 2)
        gains.append((loss(flat(base)) - loss(other)) / float(apart))
    total = sum(max(g, 0.0) for g in gains)
    expected = float64([max(g, 0.0) / total if total else 0.0 for g in gains])
    assert_close(ctx.setup["weights"], expected, 1e-9)
    assert_close(
        ctx.setup["affinity"],
        float64([g / abs(sum(gains)) for g in gains[:2]]),
        1e-9,
    )
    moved = flat(base) + sum(
        w * (other - flat(base)) for w, other in zip(expected, candidates, strict=True)
    )
    assert_close(
        flat(simulation.algorithm.initial_params(simulation.runtime.net, data, ctx)), moved, 1e-9
    )


def test_fedfomo_federations_are_clusters_of_affinities():
    """Of six clients, 0, 2, 4 prefer each other, and so do 1, 3, 5; client 0 has a weak affinity to
    1. Sub-federations without a trained model have no average."""
    P = torch.eye(6).double()
    for i in range(6):
        P[i, i % 2 :: 2] = 3.0
    P[0, 1] = 0.5
    found = cluster_clients(P, 2)
    assert found[::2].unique().numel() == found[1::2].unique().numel() == 1
    assert found[0] != found[1]
    assert cluster_clients(torch.full((6, 6), math.nan), 2).tolist() == [0] * 6
    simulation = make_simulation(fomo(federations=2), participation=1.0)
    first = assemble(simulation, simulation.initial_state(), 1)
    assert [each["valid"].tolist() for each in first.personals] == [[0] * 5] * 5
    state = play(simulation, 1)
    server = state.server | {"federation": float64([0, 0, 0, 0, 1])}
    server["trained"] = float64([1, 1, 2, 2, 0])
    mean = flat(state.clients[2]["params"]) * 7 / 15 + flat(state.clients[3]["params"]) * 8 / 15
    averages = simulation.algorithm.average_federations(server, state.clients)
    for each in averages:
        assert_close(flat(each), mean)
    assert len(averages) == 2
    with pytest.raises(
        ConfigError, match=r"algorithm\.federations=5: must be less than num_clients=5"
    ):
        make_simulation(fomo(federations=5)).initial_state()


@pytest.mark.parametrize(("number", "epsilon"), [(0, 1.0), (1, 0.75), (2, 0.5), (4, 0.0), (6, 0.0)])
def test_fedfomo_exploration_decays_by_round(number, epsilon):
    """Client 1, the best of eight, is chosen with probability 1 - epsilon + epsilon / 8. In 400
    draws, the standard deviation of the number is at most 10."""
    algorithm, others = fomo(models=1, epsilon=1.0, epsilon_decay=0.25), np.arange(1, 9)
    affinity = torch.zeros(9, 9, dtype=torch.float64)
    affinity[0, 1] = 1.0
    server = {"affinity": affinity, "round": torch.tensor(float(number))}
    best = sum(
        algorithm.choose_models_for(server, 0, others, np.random.default_rng(seed)) == [1]
        for seed in range(400)
    )
    assert abs(best - 400 * (1 - epsilon * 7 / 8)) <= (30 if epsilon else 0)


def test_fedfomo_affinity_accumulates_weights_and_selects_models():
    simulation = make_simulation(fomo(epsilon=0.0), participation=1.0, sizes=LARGER)
    state, algorithm = play(simulation, 2), simulation.algorithm
    cohort = assemble(simulation, state, 3)
    lr = simulation.runtime.local.lr_at(3)
    trained = simulation.engine.train(
        Shared(algorithm, simulation.runtime, broadcast(simulation, state), lr), cohort, False
    )
    expected = state.server["affinity"].clone()
    for i, client in enumerate(cohort.clients):
        for number, weight in zip(
            trained.messages["numbers"][i], trained.messages["affinity"][i], strict=True
        ):
            expected[client, number] += weight
    assert_close(play(simulation, 3).server["affinity"], expected)
    row, chosen = state.server["affinity"][0], cohort.personals[0]["numbers"]
    assert len(set(chosen.tolist()) - {0}) == 2
    assert_close(row[chosen].sort().values, row[1:].sort().values[-2:], 0.0)


# --- FedPAC


def pac(**changes):
    return FedPAC(**dict(lambda_=1.0, head_lr=0.2, head_epochs=1) | changes)


def loop_statistics(net, params, data, examples, classes):
    features = [(net(params, b.x).features, b.y) for b in list(data.batches())[:examples]]
    f, y = (torch.cat(parts) for parts in zip(*features, strict=True))
    count = torch.bincount(y, minlength=classes)
    mean = torch.stack(
        [f[y == c].mean(0) if (y == c).any() else torch.zeros_like(f[0]) for c in range(classes)]
    )
    square = [
        (f[y == c] ** 2).sum(-1).mean() if (y == c).any() else f.new_zeros(())
        for c in range(classes)
    ]
    return count.double(), mean, torch.stack(square)


def test_fedpac_statistics_equal_a_loop_over_classes():
    simulation = make_simulation(pac())
    ctx, data, client, _ = context(simulation, 2, -1)
    per_epoch = -(-len(simulation.stages[0].federation.parts[client]) // LOCAL.batch_size)
    assert data.steps == 3 * per_epoch  # one for the classifier, E = 2 for the body
    expected = loop_statistics(simulation.runtime.net, ctx.server["params"], data, per_epoch, 4)
    assert_close([ctx.setup[k] for k in ("count", "mean", "square")], list(expected))
    assert ctx.setup["aligns"] == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fedpac_round_equals_autograd(optimizer):
    """In round 2, one client trains the classifier for one epoch with lr 0.2, then the body for two
    on CE + lambda * MSE."""
    local = replace(LOCAL, epochs=2, optimizer=optimizer)
    simulation = make_simulation(pac(lambda_=0.7), local, (10,), participation=1.0)
    ctx, data, _, state = context(simulation, 1, 0)
    net, target = simulation.runtime.net, state.server["prototypes"]["mean"]
    w = {k: v.clone().requires_grad_() for k, v in (state.server["params"] | ctx.personal).items()}
    body = {k: v for k, v in w.items() if k not in heads.HEAD}
    decay = dict(weight_decay=local.weight_decay) | (
        dict(momentum=local.momentum) if optimizer == "sgd" else {}
    )
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    phases = [make([w[k] for k in heads.HEAD], 0.2, **decay), make(body.values(), ctx.lr, **decay)]
    for batch in data.batches():
        out = net(w, batch.x)
        loss = F.cross_entropy(out.logits, batch.y) + 0.7 * F.mse_loss(
            out.features, target[batch.y]
        )
        for parameter in w.values():
            parameter.grad = None
        loss.backward()
        phases[0 if batch.step < 3 else 1].step()
    assert_close(flat(play(simulation, 2).server["params"]), flat(w).detach(), 1e-10)


def test_fedpac_combination_minimises_the_objective():
    """V and D by loops. No random point of the simplex is better than the solution."""
    generator = np.random.default_rng(0)
    count = float64([[4, 0, 2], [1, 5, 0], [3, 3, 3]])
    mean = torch.from_numpy(generator.normal(size=(3, 3, 2)))
    mean[count == 0] = 0
    square = (mean**2).sum(-1) + torch.from_numpy(generator.random((3, 3))) * (count > 0)
    weights = combine({"count": count, "mean": mean, "square": square}).numpy()
    p, n = (count / count.sum(1, keepdim=True)).numpy(), count.sum(1).numpy()
    m, s = mean.numpy(), square.numpy()
    V = [
        sum(p[k, c] * s[k, c] - p[k, c] ** 2 * (m[k, c] @ m[k, c]) for c in range(3)) / n[k]
        for k in range(3)
    ]
    h = p[..., None] * m
    for i in range(3):
        D = np.array(
            [
                [sum((h[i, c] - h[j, c]) @ (h[i, c] - h[k, c]) for c in range(3)) for k in range(3)]
                for j in range(3)
            ]
        )

        def objective(a, D=D):
            return a @ (np.diag(V) + D) @ a

        points = generator.dirichlet(np.full(3, 0.7), 5000)
        best = min(map(objective, points))
        assert weights[i].min() >= 0
        assert weights[i].sum() == pytest.approx(1)
        assert objective(weights[i]) <= best + 1e-4 * abs(best)
        assert weights[i].argmax() == i, "its own classifier has no bias"


def test_fedpac_gives_no_weight_to_clients_without_examples():
    """Their variance is unknown, not 0. The other clients have the weights of a cohort without
    them, and such a client keeps its own classifier."""
    count, square = float64([[4, 0], [0, 0], [3, 3]]), float64([[9.0, 0], [0, 0], [8.0, 7]])
    mean = float64([[[2, 1], [0, 0]], [[0, 0], [0, 0]], [[1, 2], [1, 1]]])
    every = {"count": count, "mean": mean, "square": square}
    weights = combine(every)
    assert weights[1].tolist() == [0, 1, 0]
    assert not weights[[0, 2], 1].any()
    alone = combine({k: v[[0, 2]] for k, v in every.items()})
    assert_close(weights[[0, 2]][:, [0, 2]], alone, 0.0)


def test_fedpac_solver_is_exact_for_a_diagonal_matrix():
    """min sum v_k a_k^2 on the simplex: a_k proportional to 1 / v_k."""
    assert simplex_minimum(np.diag([1.0, 2.0, 4.0]), 0) == pytest.approx(
        np.array([4, 2, 1]) / 7, abs=1e-4
    )


def test_fedpac_sends_a_client_its_combined_classifier():
    simulation = make_simulation(pac(), participation=0.6)
    state = play(simulation, 2)
    cohort = assemble(simulation, state, 3)
    for client, personal in zip(cohort.clients, cohort.personals, strict=True):
        assert_close(personal, tree.row(state.server["heads"], client), 0.0)
