"""AF-FCL: the flow compared with Jacobians, the loss with the released formulas."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.affcl import AFFCL, HIDDEN, Deeper, classify, replay_weights
from fedexp.algorithms.base import rows_of_step
from fedexp.algorithms.flow import Density, Flow
from fedexp.algorithms.heads import BIAS, WEIGHT
from fedexp.algorithms.interfaces import Batch
from fedexp.config.build import build
from fedexp.training.division import divide
from test_continual import stream
from test_skew_methods import Table
from toy_federation import composed, context, play, random

WEIGHTS = dict(replay=0.3, kd_last=0.6, kd_feature=0.7, kd_output=0.8, flow_last=0.4, theta=0.25)
AF = AFFCL(**WEIGHTS, replay_trains="hidden", credibility="latent", hidden=3, bank=8)
LAYER = (HIDDEN + "weight", HIDDEN + "bias")
LABELS, MASK = (
    torch.tensor([2, 1, 2, 1, 0, 2]),
    torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.float64),
)


def assert_close(actual, expected):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-10
    )


def flow(width, seed=0):
    """Return a flow whose weights are neither close to the identity nor hard to invert."""
    torch.manual_seed(seed)
    made = Flow(width, 4, 3).double()
    params = {
        name: 0.3 * torch.randn(value.shape, dtype=torch.float64)
        for name, value in made.named_parameters()
    }
    return Density(made, params)


def one_hot(*labels):
    return F.one_hot(torch.tensor(labels), 4).double()


@pytest.mark.parametrize("width", [3, 4, 9])
def test_flow_density_follows_change_of_variables(width):
    """The log density is log N(u) + log |det du/dh|, with the Jacobian by autograd. The inverse
    maps u to h.
    """
    density, h, given = flow(width), random(2, width), one_hot(1, 3)
    found, noise = density.log_density(h, given)
    for i in range(2):
        jacobian = torch.autograd.functional.jacobian(
            lambda row, i=i: density.log_density(row[None], given[i : i + 1])[1][0], h[i]
        )
        normal = torch.distributions.Normal(0.0, 1.0).log_prob(noise[i]).sum()
        assert_close(found[i], normal + torch.linalg.slogdet(jacobian).logabsdet)
    assert_close(density.features(noise, given), h)
    assert (density.log_density(h, one_hot(0, 0))[1] - noise).abs().amax(1).min() > 1e-6, (
        "the class matters"
    )


def released_weight(sample, label, noise, labels, typical):
    """Compute the weight of one drawn feature as probability_in_localdata does."""
    own = noise[labels == label]
    if not len(own):
        return typical
    mean, variance = own.mean(0), own.var(0, correction=0).clamp(min=1e-6)
    return (
        torch.exp(-((sample - mean) ** 2) / variance / 2) / torch.sqrt(2 * math.pi * variance)
    ).mean()


def test_credibility_equals_released_code():
    noise, drawn, typical = (
        random(6, 5),
        random(4, 5, seed=1),
        torch.tensor(0.37, dtype=torch.float64),
    )
    # class 3 is not in the batch; class 0 has one example, and no variance
    wanted = torch.tensor([2, 3, 0, 1])
    drawn[2] = noise[4] + 1e-4
    present = one_hot(*LABELS.tolist()) * MASK[:, None]
    found = replay_weights(drawn, wanted, noise, present, typical)
    expected = [
        released_weight(drawn[j], wanted[j], noise[:5], LABELS[:5], typical) for j in range(4)
    ]
    assert_close(found, torch.stack(expected))
    assert found[1] == typical


def fitted(**changes):
    """Return AF-FCL with a flow of four features, its current model and its old model."""
    algorithm, density = replace(AF, **changes), flow(4)
    object.__setattr__(algorithm, "shape", density.flow)
    models = []
    for seed in (0, 1):
        own = {"flow." + k: v for k, v in flow(4, seed).params.items()}
        models.append(
            own
            | {
                "z": random(6, 4, seed=seed),
                WEIGHT: random(4, 4, seed=seed + 2),
                BIAS: random(4, seed=seed),
            }
        )
        if algorithm.replay_trains == "hidden":
            weights = random(4, 4, seed=seed + 4), random(4, seed=seed + 6)
            models[-1] |= dict(zip(LAYER, weights, strict=True))
    return algorithm, *models


def client_context(algorithm, received, old=None):
    rng = np.random.default_rng(0)
    plan = algorithm.draw("new", np.array([0, 1, 2]), rng)
    plan |= algorithm.draw("old", np.array([0]), rng) if old else {}
    plan = {k: torch.as_tensor(v) for k, v in plan.items()}
    server = {"params": received} | ({"old": old} if old else {})
    ctx = context(server=server, plan=plan, steps=torch.tensor(2.0, dtype=torch.float64))
    return replace(ctx, setup=algorithm.client_setup(Table(), None, ctx))


def answers_of(model, h):
    """Compute forward_from_xa of classify_net.py, without a hidden layer if there is none."""
    if LAYER[0] in model:
        h = F.leaky_relu(h @ model[LAYER[0]].T + model[LAYER[1]])
    return h @ model[WEIGHT].T + model[BIAS]


@pytest.mark.parametrize("trained", ["hidden", "classifier"])
@pytest.mark.parametrize("space", ["latent", "released"])
@pytest.mark.parametrize("later", [False, True])
def test_loss_equals_released_code(space, later, trained):
    """Step 1 with batches of four uses places 4 to 7 of the bank. The last row of the batch is
    padding.
    """
    algorithm, params, old = fitted(credibility=space, replay_trains=trained)
    ctx = client_context(algorithm, params, old if later else None)
    found = algorithm.objective(Table(), params, Batch(torch.arange(6), LABELS, MASK, 1), ctx)
    z, y, before = params["z"][:5], LABELS[:5], old["z"][:5]
    now, last = (algorithm.flow_of(model) for model in (params, old))
    density, noise = now.log_density(z, one_hot(*y.tolist()))
    typical = (density / 4).exp().mean()

    def soft(student, teacher):
        p, q = (
            each.softmax(1).sqrt() / each.softmax(1).sqrt().sum(1, keepdim=True)
            for each in (teacher, student)
        )
        return -(p * q.log()).sum(1).mean()

    drawn, wanted = (ctx.plan[f"new_{name}"][4:8] for name in ("noise", "labels"))
    h = now.features(drawn, one_hot(*wanted.tolist()))
    compared = drawn if space == "latent" else h
    weights = [
        released_weight(s, c, noise, y, typical) for s, c in zip(compared, wanted, strict=True)
    ]
    answers = answers_of(params, h)
    replayed = (torch.stack(weights) * F.cross_entropy(answers, wanted, reduction="none")).mean()
    replayed = replayed * (0.75 * typical + 0.25)
    expected, fit = F.cross_entropy(z, y), density.mean()
    if later:
        expected = expected + 0.6 * (0.7 * (z - before).square().mean() + 0.8 * soft(z, before))
        replayed = replayed + 0.6 * 0.8 * soft(answers, answers_of(old, h))
        given = one_hot(*ctx.plan["old_labels"][4:8].tolist())
        fit = (
            fit
            + 0.4
            * now.log_density(last.features(ctx.plan["old_noise"][4:8], given), given)[0].mean()
        )
    assert_close(found, expected + 0.3 * replayed - fit / 4)


@pytest.mark.parametrize(
    ("trained", "replayed"), [("hidden", set(LAYER)), ("classifier", {WEIGHT, BIAS})]
)
def test_each_loss_term_trains_only_one_part_of_the_model(trained, replayed):
    """Replay trains only the hidden layer or the classifier, and the density terms train only the
    flow. The authors' classifier_fb_optimizer has the parameters with `fc2` in their names.
    """
    algorithm, params, old = fitted(replay_trains=trained)
    batch = Batch(torch.arange(6), LABELS, MASK, 0)

    def grads(**changes):
        changed = copy.copy(algorithm)
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        ctx = client_context(changed, params, old)
        return torch.func.grad(lambda p: changed.objective(Table(), p, batch, ctx))(params)

    whole, unreplayed, unrelated = grads(), grads(replay=0.0), grads(kd_last=0.0, flow_last=0.0)
    moved = {k for k in params if not torch.equal(whole[k], unreplayed[k])}
    assert moved == replayed
    assert all(
        k.startswith("flow.") or k in {"z", *replayed}
        for k in params
        if not torch.equal(whole[k], unrelated[k])
    )
    assert not torch.equal(whole["z"], unrelated["z"])
    names = [k for k in params if k.startswith("flow.")]
    assert all(not torch.equal(whole[k], unrelated[k]) for k in names)


def test_hidden_layer_belongs_to_the_model_and_changes_no_initial_value():
    """The layer is between the features and the classifier, whose initial values do not change."""
    last = torch.nn.Linear(5, 3).double()
    made, features = Deeper(last).double(), random(4, 5)
    assert torch.equal(made.weight, last.weight)
    assert torch.equal(made.bias, last.bias)
    params = {"classifier." + k: v for k, v in made.named_parameters()}
    assert_close(made(features), classify(features, params))
    assert_close(made(features), answers_of(params, features))
    models = [
        set(stream(replace(AF, replay_trains=kind)).initial) for kind in ("hidden", "classifier")
    ]
    assert models[0] - models[1] == set(LAYER)


def test_steps_cycle_through_the_generated_features():
    """The bank has six features, and each step uses four."""
    ctx = context(steps=torch.tensor(3.0))
    rows = [rows_of_step(step, 6, ctx).tolist() for step in range(3)]
    assert rows == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ((), [[], [0, 1, 2], [0, 1, 2, 3, 4, 5]]),
        (("scenario.order=per_client",), [[], list(range(10)), list(range(10))]),
    ],
)
def test_features_are_drawn_from_classes_met_so_far(changed, met):
    """Ten classes are in tasks of 3, 3 and 4. If clients learn the tasks in different orders, some
    client has met each class at the first stage: serverPreciseFCL.py joins `classes_so_far` of all
    users, and keeps the result as `available_labels_past` for the next task.
    """
    given = ("scenario=class_incremental", "partition=lda", "alpha=5", "num_clients=6", "rounds=1")
    _, parts = divide(build(composed(*given, *changed)))
    algorithm = replace(AF, bank=1000)
    object.__setattr__(algorithm, "shape", flow(4).flow)
    for stage, classes in enumerate(met):
        federation = parts[stage].federation
        assert federation.classes_met() == classes
        plan = algorithm.host_plan(federation, 0, np.random.default_rng(0))
        now = set(np.flatnonzero(federation.counts.sum(0)).tolist())
        assert set(plan["new_labels"].tolist()) == set(classes) | now
        assert set(plan["old_labels"].tolist() if stage else []) == set(classes)


def test_old_flow_is_frozen_during_the_next_task():
    server = play(stream(AF), 3).server
    kept = {k: v for k, v in server["old"].items() if k.startswith("flow.")}
    assert kept
    assert max((v - server["params"][k]).abs().max() for k, v in kept.items()) > 1e-6
