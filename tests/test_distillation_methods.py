"""FedKD, Flashback, FedDF, FedKA, FedReg, MOON and FedAlign against their formulas."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms import feddf
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedalign import FedAlign, spectral_norm
from fedexp.algorithms.feddf import FedDF
from fedexp.algorithms.fedka import FedKA
from fedexp.algorithms.fedreg import FedReg
from fedexp.algorithms.flashback import (
    Flashback,
)
from fedexp.algorithms.interfaces import Batch, Federation
from fedexp.algorithms.moon import Moon
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.engine.base import ScheduledData
from fedexp.engine.network import LiveNetwork
from fedexp.models import Output, slim_channels
from fedexp.models.cnn import CNN
from fedexp.models.resnet import BottleneckResNet, CifarResNet
from fedexp.testing import assert_engines_agree, set_up_client
from fedexp.training.exchange import public_set
from toy_federation import (
    LOCAL,
    PLAIN,
    Normed,
    assemble,
    assert_close,
    context,
    describe,
    flat,
    float64,
    leaves,
    make_simulation,
    play,
    random,
    take_step,
    trained_round,
)

# --- FedKD


# --- Flashback


@pytest.mark.parametrize("on_server", [True, False])
def test_flashback_sends_label_counts(on_server):
    """gamma mu_k is added only in the first two participations."""
    algorithm = Flashback(gamma=0.5, epochs_on_server=1, on_clients=True, on_server=on_server)
    simulation = make_simulation(algorithm, public=0.15)
    times = np.zeros(5, int)
    for number in range(1, 7):
        times[assemble(simulation, play(simulation, 0), number).clients] += 1
    counts = simulation.stages[0].federation.counts
    server = play(simulation, 6).server
    assert_close(server["r"], torch.from_numpy(times).double())
    assert times.max() > 2
    assert_close(
        server["pi"], torch.from_numpy(0.5 * (np.minimum(times, 2)[:, None] * counts).sum(0))
    )


def test_flashback_counts_no_labels_of_a_client_without_steps():
    """As a teacher, its model is weighted by 0, and pi does not count its labels."""
    algorithm = Flashback(gamma=1.0, epochs_on_server=1, on_clients=True, on_server=False)
    local = replace(LOCAL, drop_last=True)
    simulation = make_simulation(algorithm, local, (3, 7), public=0.15, participation=1.0)
    counts = simulation.stages[0].federation.counts
    assert play(simulation, 1).server["pi"].tolist() == counts[1].tolist()


def test_flashback_client_loss_equals_loops():
    """CE + sum_c alpha_c P_c log(P_c / Q_c) with pi = (3, 1, 0) and mu = (1, 0, 0), so that alpha =
    pi / (pi + mu) = (3/4, 1, 0). The sum may be negative."""
    teacher, y = random(5, 3, seed=1), torch.tensor([0, 1, 1, 0, 2])
    student = random(5, 3, seed=2) + float64([2.0, 2, 0])
    term, expected = torch.zeros(5).double(), torch.zeros(5).double()
    for n in range(5):
        p, q = teacher[n].softmax(0), student[n].softmax(0)
        term[n] = sum(a * p[c] * math.log(p[c] / q[c]) for c, a in enumerate((0.75, 1.0)))
        expected[n] = term[n] - math.log(q[y[n]])
    server = {"params": teacher, "pi": float64([3.0, 1, 0])}
    ctx = context(server=server, plan={"counts": torch.tensor([1, 0, 0])})
    algorithm = Flashback(gamma=0.5, epochs_on_server=1, on_clients=True, on_server=False)
    batch = Batch(torch.zeros(5), y, None, 0)
    assert_close(algorithm.example_loss(lambda w, x: Output(x, w), student, batch, ctx), expected)
    assert term.min() < 0


def test_flashback_server_step_equals_autograd():
    """E_s epochs of SGD with momentum start from the average, on CE plus distillation with pi from
    before the round."""
    algorithm = Flashback(gamma=0.5, epochs_on_server=2, on_clients=True, on_server=True)
    simulation, state, trained, about = trained_round(algorithm, 3, public=0.15)
    net, public, messages = simulation.runtime.net, about.public, trained.messages
    average = algorithm.aggregate(state.server, messages, about)["params"]
    models = [tree.row(messages["params"], i) for i in range(len(about.clients))]
    models.append(state.server["params"])
    pi, counts = state.server["pi"], torch.from_numpy(simulation.stages[0].federation.counts)
    mu = torch.cat([counts[list(about.clients)].double(), pi[None]])
    assert pi.sum() > 0
    w = leaves(average)
    sgd = torch.optim.SGD(
        w.values(), about.lr, momentum=LOCAL.momentum, weight_decay=LOCAL.weight_decay
    )
    rng = describe(simulation, state, assemble(simulation, state, 3), trained).rng
    for _ in range(2):
        order = rng.permutation(len(public))
        for start in range(0, len(public), LOCAL.batch_size):
            x, y = public.take(order[start : start + LOCAL.batch_size])
            log_q = net(w, x).logits.log_softmax(-1)
            loss = F.nll_loss(log_q, y)
            for model, counts in zip(models, mu, strict=True):
                p = net(model, x).logits.softmax(-1)
                total = 2 * pi + mu[:-1].sum(0)
                alpha = torch.where(total > 0, counts / total.clamp(min=1e-9), 0.0)
                loss = loss + (alpha * p * (p.log() - log_q)).sum(-1).mean()
            take_step(sgd, loss)
    server = algorithm.aggregate(state.server, messages, about) | {"buffers": {}}
    refined = algorithm.refine(LiveNetwork(net), server, messages, about)
    assert_close(flat(refined["params"]), flat(w).detach(), 1e-10)


# --- FedDF


def df(**changes):
    values = {"lr": 0.01, "batch_size": 3, "clip": 5.0, "epochs_on_server": 2}
    values |= {"steps": 4, "patience": 2, "interval": 1, "validation": 0.5}
    return FedDF(**values | changes)


class Mislabelled:
    """A public set whose labels are all 0."""

    def __init__(self, public):
        self.public = public

    def __len__(self):
        return len(self.public)

    def take(self, index):
        x, y = self.public.take(index)
        return x, torch.zeros_like(y)

    def logits(self, models):
        return self.public.logits(models)


def test_feddf_distils_mean_logits_without_labels():
    algorithm = df(clip=0.0)
    simulation, state, trained, about = trained_round(algorithm, public=0.15)
    net, public = simulation.runtime.net, about.public
    average = algorithm.aggregate(state.server, trained.messages, about)["params"]
    models = [tree.row(trained.messages["params"], i) for i in range(len(about.clients))]
    w = leaves(average)
    adam = torch.optim.Adam(w.values(), 0.01)
    rng = describe(simulation, state, assemble(simulation, state, 2), trained).rng
    step = 0
    for _ in range(2):
        order = rng.permutation(6)
        for start in (0, 3):
            x, _ = public.take(order[start : start + 3])
            p = torch.stack([net(m, x).logits for m in models]).mean(0).softmax(-1)
            log_q = net(w, x).logits.log_softmax(-1)
            adam.zero_grad()
            (p * (p.log() - log_q)).sum(-1).mean().backward()
            adam.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * step / 4)) / 2
            adam.step()
            step += 1
    server = algorithm.aggregate(state.server, trained.messages, about) | {"buffers": {}}
    refined = algorithm.refine(
        LiveNetwork(net), server, trained.messages, replace(about, public=Mislabelled(public))
    )
    assert_close(flat(refined["params"]), flat(w).detach(), 1e-10)


class Watched:
    """A public set that records the examples that are read."""

    def __init__(self, public):
        self.public, self.read = public, []

    def __len__(self):
        return len(self.public)

    def take(self, index):
        self.read.append(index.tolist())
        return self.public.take(index)


@pytest.mark.parametrize(
    ("steps", "patience", "seen", "best"),
    [
        # at steps 2, 4, 6, 8: the best is 4; step 6 equals it; at 8, four steps had no gain
        (20, 4, [0.25, 0.75, 0.75, 0.5], 1),
        # at 6, 8 and 10, two to six steps had no gain; step 12 is better, and 13 is the last
        (13, 7, [0.25, 0.75, 0.0, 0.5, 0.25, 1.0, 0.5], 5),
        (5, 1, [0.0, 0.25, 0.25], 1),  # no gain in one step at 5
    ],
)
def test_feddf_stops_early_and_returns_the_best_model(monkeypatch, steps, patience, seen, best):
    """Validation every two steps uses floor(0.3 * 12) = 3 held-out examples, which are never
    trained on."""
    algorithm, students, held = df(steps=steps, patience=patience, interval=2), [], []
    algorithm = replace(algorithm, validation=0.3)
    simulation = make_simulation(algorithm, public=0.3, sizes=(3, 7, 8, 10))
    public, teacher = (
        Watched(public_set(simulation, simulation.stages[0].partition.public)),
        random(12, 4),
    )
    later = iter([*seen, *[0.0] * 20])

    def accuracy(net, examples, numbers):
        students.append(net.snapshot())
        held.append(sorted(numbers.tolist()))
        return next(later)

    monkeypatch.setattr(feddf, "accuracy", accuracy)
    net, server = LiveNetwork(simulation.runtime.net), {"params": simulation.initial, "buffers": {}}
    net.load(server["params"], {})
    found = algorithm.search(
        net, server, public, feddf.divergence_from(teacher), np.random.default_rng(0)
    )
    assert len(students) == len(seen)
    assert_close(found["params"], students[best], 0.0)
    assert held == [held[0]] * len(seen)
    assert len(held[0]) == 3
    assert sum(map(len, public.read)) == 3 * min(2 * len(seen), steps), (
        "batches of three of the other nine"
    )
    trained = [number for batch in public.read for number in batch]
    assert set(trained[:9]) == set(range(12)) - set(held[0])
    assert not set(trained) & set(held[0])


# --- FedKA


def ka(**changes):
    values = {"beta": 0.5, "dominance": 0.25, "max_anchors": 10, "anchors": "both"}
    return FedKA(**values | {"selection": "random", "reduction": "sum"} | changes)


def federation():
    """One client has 7, 2, 1 and 0 examples of the four classes; another has 3 of the last."""
    labels = np.array([0] * 7 + [1] * 2 + [2] + [3] * 3)
    parts = (np.arange(10), np.arange(10, 13))
    counts = np.stack([np.bincount(labels[part], minlength=4) for part in parts])
    return Federation(parts, counts, labels, np.array([0, 7, 9, 11]), "examples")


def test_fedka_finds_missing_rare_and_dominant_classes():
    """Shares 0.7, 0.2, 0.1, 0 and threshold 0.25: 0 is dominant, 1 and 2 are not, 3 is missing."""
    missing, rare, dominant = ka().classes(federation(), 0)
    assert (missing.tolist(), rare.tolist(), dominant.tolist()) == (
        [False, False, False, True],
        [False, True, True, False],
        [True, False, False, False],
    )
    # at least
    assert ka(dominance=0.2).classes(federation(), 0)[2].tolist() == [True, True, False, False]
    assert ka(dominance=None).threshold(federation()) == 0.125


@pytest.mark.parametrize(
    ("anchors", "classes"), [("both", {1, 2, 3}), ("non_dominant", {1, 2}), ("missing", {3})]
)
def test_fedka_draws_one_anchor_of_each_chosen_class(anchors, classes):
    info = federation()
    plan = ka(anchors=anchors).host_plan(info, 0, np.random.default_rng(0))
    numbers = plan["numbers"][plan["valid"] > 0, 0]
    assert set(info.labels[numbers].tolist()) == classes
    assert len(numbers) == len(classes)
    assert plan["columns"].tolist() == [0, 1, 1, 1]
    if 3 in classes:
        assert 11 in numbers, "the shared example of the missing class"
    few = ka(anchors=anchors, max_anchors=1).host_plan(info, 0, np.random.default_rng(0))
    assert few["valid"].tolist() == [1.0]


@pytest.mark.parametrize("selection", ["hard", "proficient"])
def test_fedka_chooses_anchors_by_loss(selection):
    algorithm = ka(selection=selection, dominance=0.6)
    simulation = make_simulation(algorithm, sizes=(20, 10))
    info, net = simulation.stages[0].federation, simulation.runtime.net
    one = set_up_client(simulation, simulation.initial_state(), 0)
    client, data, begun, plan = one.client, one.data, one.ctx.setup, one.ctx.plan
    part, best = info.parts[client], {}
    for c in np.flatnonzero(algorithm.classes(info, client)[1]):
        x, y = data.take(torch.from_numpy(part[info.labels[part] == c]))
        losses = F.cross_entropy(net(simulation.initial, x).logits, y, reduction="none")
        best[c] = x[losses.argmax() if selection == "hard" else losses.argmin()]
    assert best
    for x in begun["x"][plan["valid"] > 0]:
        assert any(torch.equal(x, other) for other in best.values())


@pytest.mark.parametrize("norm", ["per_anchor", "matrix"])
def test_fedka_norms_equal_loops(norm):
    """Two anchors of three, and two classes of four; the gradient where both models agree is 0."""
    algorithm = ka(beta=0.3, norm=norm)
    valid, columns = float64([1, 1, 0]), float64([0, 1, 1, 0])
    difference = random(3, 4, seed=4)
    rows = [sum(float(difference[i, c]) ** 2 for c in (1, 2)) for i in range(2)]
    expected = sum(rows) ** 0.5 if norm == "matrix" else sum(row**0.5 for row in rows) / 2
    z = random(3, 4, seed=5)
    found = algorithm.distance(z, z - difference, columns, valid)
    assert found.item() == pytest.approx(expected, abs=1e-12)
    for error in (0, 1e-15):  # an engine's rounding errors must not become a direction
        same = (z + error).requires_grad_()
        (gradient,) = torch.autograd.grad(algorithm.distance(z, same, columns, valid), same)
        assert not gradient.any()
    simulation = make_simulation(algorithm, sizes=(9, 20))
    assert_engines_agree(simulation, play(simulation, 1), ("sequential", "vectorised"))
    with pytest.raises(ConfigError, match=rf"reduction=mean: must be sum with .*norm={norm}"):
        ka(norm=norm, reduction="mean")


def test_fedka_loss_equals_loops():
    algorithm, algorithm_mean, C = ka(beta=0.3), ka(beta=0.3, reduction="mean"), 4
    x, y, anchors = random(5, 2, seed=1), torch.tensor([0, 1, 2, 3, 0]), random(3, 2, seed=2)
    weight, teacher = random(2, C, seed=3), random(3, C, seed=4)
    valid = torch.tensor([1.0, 1.0, 0.0]).double()
    columns = torch.tensor([0.0, 1.0, 1.0, 0.0]).double()

    def net(params, x, mask=None):
        return Output(x, x @ params)

    plan = {"valid": valid, "columns": columns}
    ctx = context(plan=plan, setup={"x": anchors, "z": teacher})
    z = anchors @ weight
    # anchors, not logits
    total = sum(float(teacher[i, c] - z[i, c]) ** 2 for i in range(2) for c in (1, 2)) / 2
    loss = algorithm.objective(net, weight, Batch(x, y, None, 0), ctx)
    assert_close(loss, F.cross_entropy(x @ weight, y) + 0.3 * total)
    mean = algorithm_mean.objective(net, weight, Batch(x, y, None, 0), ctx)
    assert_close(mean, F.cross_entropy(x @ weight, y) + 0.3 * total / 2)  # two columns
    nothing = replace(ctx, plan={"valid": 0 * valid, "columns": columns})
    assert_close(
        algorithm.objective(net, weight, Batch(x, y, None, 0), nothing),
        F.cross_entropy(x @ weight, y),
    )


# --- FedReg


def test_fedreg_round_equals_autograd():
    """One client with 10 examples, batches of 4, 4 and 2, and two epochs."""
    algorithm = FedReg(gamma=0.6, eta_s=0.05, eta_ratio=0.3, ascent=3)
    local = replace(PLAIN, epochs=2, lr=0.2)
    simulation = make_simulation(algorithm, local, (10,), participation=1.0)
    state, net = simulation.initial_state(), simulation.runtime.net
    g = state.server["params"]
    (schedule,) = assemble(simulation, state, 1).schedules
    batches = list(ScheduledData(simulation.runtime, schedule).batches())
    names, start = list(g), flat(g)

    def unflatten(vector):
        out, i = {}, 0
        for name in sorted(names):
            out[name] = vector[i : i + g[name].numel()].view(g[name].shape)
            i += g[name].numel()
        return out

    def gradient(vector, x, y):
        v = vector.clone().requires_grad_()
        loss = F.cross_entropy(net(unflatten(v), x).logits, y)
        return torch.autograd.grad(loss, v)[0]

    made = []
    for batch in batches[:3]:
        xs = []
        for eta in (0.05, 0.3 * 0.05):
            x = batch.x.clone()
            for _ in range(3):
                x = x.detach().requires_grad_()
                F.cross_entropy(net(g, x).logits, batch.y, reduction="sum").backward()
                x = x + eta * x.grad.sign()
            xs.append(x.detach())
        made.append((xs[0], net(g, xs[0]).logits.softmax(-1), xs[1], batch.y))
    w = start
    for j, batch in enumerate(batches):
        w = w - 0.2 * gradient(0.6 * w + 0.4 * start, batch.x, batch.y)
        pseudo, soft, perturbed, y = made[j % 3]
        middle, delta = (w + start) / 2, w - start
        g_s, g_p = gradient(middle, pseudo, soft), gradient(middle, perturbed, y)
        a = max(0.0, float(delta @ g_s / (g_s @ g_s)))
        b = max(0.0, float((delta - a * g_s) @ g_p / (g_p @ g_p)))
        w = w - a * g_s - b * g_p
    assert_close(flat(play(simulation, 1).server["params"]), w, 1e-10)


def test_fedreg_says_that_it_ignores_momentum_and_weight_decay(caplog):
    algorithm = FedReg(gamma=0.6, eta_s=0.05, eta_ratio=0.3, ascent=1)
    for local in (PLAIN, replace(LOCAL, optimizer="adam")):
        make_simulation(algorithm, local)
    assert not caplog.records
    found = [
        play(make_simulation(algorithm, local), 1) for local in (LOCAL, replace(PLAIN, epochs=2))
    ]
    assert_close(found[0].server, found[1].server, 0.0)
    assert [each.getMessage() for each in caplog.records] == [
        "local.momentum=0.9, local.weight_decay=0.001 has no effect: FedReg takes plain SGD steps"
    ]


def test_fedreg_images_do_not_change_running_statistics():
    """With a negligible learning rate and 60 batches, the running mean is the examples' mean: the
    initial value has the weight 0.9**60 = 0.002. In the released code, generated images pass
    through another copy (`penal_model`). With them, the mean was 0.07 standard deviations off."""
    local = replace(PLAIN, epochs=30, batch_size=10, lr=1e-12)
    algorithm = FedReg(gamma=0.5, eta_s=0.2, eta_ratio=0.5, ascent=5)
    simulation = make_simulation(
        algorithm, local, (20,), model=Normed(), participation=1.0, augment=False
    )
    params, found = simulation.initial, play(simulation, 1).server["buffers"]
    x, _ = simulation.runtime.load_train(
        torch.as_tensor(simulation.stages[0].federation.parts[0]), None
    )
    seen = (
        F.conv2d(x, params["convolution.weight"], params["convolution.bias"])
        .transpose(0, 1)
        .flatten(1)
    )
    assert ((found["norm.running_mean"] - seen.mean(1)) / seen.std(1)).abs().max() < 0.02
    assert (found["norm.running_var"] / seen.var(1) - 1).abs().max() < 0.03
    assert found["norm.num_batches_tracked"] == 60


# --- MOON


def test_moon_loss_equals_formula():
    algorithm, h = Moon(mu=0.7, tau=0.5, projection=0), random(5, 3, seed=1)
    others = {"g": random(5, 3, seed=2), "p": random(5, 3, seed=3)}
    logits, y = random(5, 4), torch.tensor([0, 1, 2, 3, 0])

    def net(params, x):
        return Output(params, logits)

    ctx = context(server={"params": others["g"]}, client={"previous": others["p"]})
    loss = algorithm.example_loss(net, h, Batch(h, y, None, 0), ctx)
    for i in range(5):
        a, b = (
            math.exp(float(h[i] @ o[i] / (h[i].norm() * o[i].norm())) / 0.5)
            for o in (others["g"], others["p"])
        )
        expected = -math.log(float(logits[i].softmax(0)[y[i]])) - 0.7 * math.log(a / (a + b))
        assert_close(loss[i].item(), expected)


def test_moon_keeps_the_last_local_model():
    _, _, trained, _ = trained_round(Moon(mu=1.0, tau=0.5, projection=0))
    for i, kept in enumerate(trained.states):
        assert_close(kept["previous"], tree.row(trained.messages["params"], i), 0.0)


# --- FedAlign


def test_fedalign_norm_equals_singular_value():
    """Exact for rank 1, where power iterations end after one step."""
    first, second = random(3, 4, 1, 1, seed=1), random(3, 6, 1, 1, seed=2)
    singular = torch.linalg.matrix_norm(first.flatten(2) @ second.flatten(2).transpose(1, 2), ord=2)
    assert_close(spectral_norm(first, second), singular)
    first, second = random(2, 3, 4, 4, seed=3), random(2, 5, 2, 2, seed=4)
    pooled = first.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2)).flatten(2)
    matrix = pooled @ second.flatten(2).transpose(1, 2) / 4
    assert_close(spectral_norm(first, second), torch.linalg.matrix_norm(matrix, ord=2), 0.05)


def trained_norms(net):
    """Set scales and shifts of the batch norm layers to random values."""
    for number, layer in enumerate(m for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        layer.weight.data = 1 + 0.5 * random(len(layer.weight), seed=number)
        layer.bias.data = random(len(layer.bias), seed=number + 100)


def released_stage(stage, x, width):
    """Compute a stage like the authors' code at a width below 1 (models/resnet_fedalign.py
    `reuse_feature`, models/slimmable_ops.py `USConv2d` and `USBatchNorm2d`): all layers use the
    first input and output channels."""

    def layer(pair, x, stride=1):
        convolution, norm = pair
        outputs, inputs = (int(n * width + 4) // 8 * 8 for n in convolution.weight.shape[:2])
        weight = convolution.weight[:outputs, :inputs]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        return F.batch_norm(
            x, None, None, norm.weight[:outputs], norm.bias[:outputs], training=True
        )

    for block in stage:
        inner = F.relu(layer(block.second, F.relu(layer(block.first, x)), block.stride))
        projected = (
            layer(block.shortcut, x, block.stride)
            if isinstance(block.shortcut, torch.nn.Sequential)
            else x
        )
        x = F.relu(layer(block.third, inner) + projected)
    return x


def test_fedalign_penalty_equals_released_code():
    """The penalty compares the narrow stage with its narrow input, and has a gradient for every
    parameter of the stage."""
    algorithm = FedAlign(mu=0.5, width=0.25, clip=0.0)
    model = BottleneckResNet(widths=(4, 16, 32), blocks=1)
    simulation = make_simulation(algorithm, model=model, sizes=(5, 4))
    live = LiveNetwork(simulation.runtime.net)
    trained_norms(live.module)
    params, schedule = live.params, assemble(simulation, simulation.initial_state(), 1).schedules[0]
    batch = next(ScheduledData(simulation.runtime, schedule).batches())
    ctx = context()
    ours = algorithm.objective(live, params, batch, ctx) - FedAvg().objective(
        live, params, batch, ctx
    )
    output = live(params, batch.x)
    before, after = (each.detach() for each in output.maps)
    narrow = released_stage(live.module.stages[-1], before[:, :16], 0.25)
    lipschitz = F.mse_loss(spectral_norm(before[:, :16], narrow), spectral_norm(before, after))
    theirs = 0.5 * (F.cross_entropy(output.logits, batch.y) / lipschitz).item() * lipschitz
    found, expected = (
        torch.autograd.grad(each, list(params.values()), materialize_grads=True)
        for each in (ours, theirs)
    )
    assert_close(found, expected, 1e-10)
    reached = {k for k, v in zip(params, expected, strict=True) if v.abs().max() > 0}
    assert reached == {k for k in params if k.startswith("stages.2")}


def test_fedalign_stage_of_a_cnn_has_all_or_the_nearest_eighth_channels():
    """The nearest multiple of 8, and of few channels the nearest number, at least 1: 0.7 * 20 = 14,
    0.4 * 4 = 1.6 and 0.1 * 4 = 0.4."""
    assert [slim_channels(*pair) for pair in ((20, 0.7), (4, 0.4), (4, 0.1))] == [16, 2, 1]
    net = CNN(channels=(3, 5), kernel=3, padding=1, hidden=(8,), batch_norm=True)
    net = net.build((1, 8, 8), 4).double().train()
    net.keeps_maps = True
    before, after = net(random(5, 1, 8, 8)).maps
    assert_close(net.slim(dict(net.named_parameters()), before, 1.0), after, 1e-10)


def test_fedalign_warns_if_it_has_no_effect(caplog):
    algorithm = FedAlign(mu=0.5, width=0.25, clip=1.0)
    normed = CNN(channels=(3,), kernel=3, padding=1, hidden=(8,), batch_norm=True)
    with caplog.at_level(logging.WARNING, "fedexp"):
        for model in (BottleneckResNet(widths=(4, 8), blocks=1), normed):
            make_simulation(algorithm, model=model, sizes=(3, 4))
        assert not caplog.records
        make_simulation(algorithm)
    assert "resnet56_bottleneck" in caplog.text


def test_fedalign_rejects_models_without_a_stage():
    with pytest.raises(ConfigError, match="resnet56_bottleneck"):
        make_simulation(FedAlign(mu=0.5, width=0.25, clip=1.0), model=CifarResNet(widths=(4, 4)))
