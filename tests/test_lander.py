"""LANDER: the server's phase and the local loss compared with loops of the released code, and
embeddings from files.
"""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms import label_generator
from fedexp.algorithms.interfaces import Batch, Pixels
from fedexp.algorithms.label_generator import (
    LabelGenerator,
    Student,
    draw_balanced_labels,
    shuffled,
)
from fedexp.algorithms.label_text import embeddings
from fedexp.algorithms.lander import LANDER
from fedexp.core.errors import ConfigError
from fedexp.engine.network import LiveNetwork
from fedexp.models import Output
from test_continual import EMBEDDINGS, LANDER_LIVE, TWO_TASKS
from toy_federation import Normed, assert_close, context, make_simulation, play

PIXELS = Pixels((1, 6, 6), (0.4,), (0.3,))
LANDER_ = LANDER(**LANDER_LIVE | dict(alpha_cur=0.2, alpha_pre=0.4))
MAKER = replace(LANDER_, batch_size=12, steps=3)


def made_by(algorithm, simulation, model, anchors, classes, seed):
    net = LiveNetwork(simulation.runtime.net)
    server = {"old": model, "anchors": anchors, "new": torch.zeros(4, dtype=torch.float64)}
    return algorithm.images_of(net, server, PIXELS, classes, seed)


def stream(embeddings="random", **changes):
    given = dict(sizes=(3, 4, 2), scenario=TWO_TASKS, rounds=2, participation=1.0)
    return make_simulation(replace(LANDER_, embeddings=embeddings), **given | changes)


def kl(student, teacher, temperature):
    p, q = (teacher / temperature).softmax(1), (student / temperature).log_softmax(1)
    return (p * (p.log() - q)).sum(1)


def test_generated_images_equal_released_code():
    """A warm-up and five batches of three steps, with a batch norm teacher of classes 1 and 3. A
    batch of twelve has two noisy layers, and the student is trained from the fourth batch on.
    """
    simulation = stream(model=Normed())
    state = play(simulation, 2)
    teacher = copy.deepcopy(simulation.runtime.net.module).requires_grad_(False).eval()
    teacher.load_state_dict(state.server["params"] | state.server["buffers"])
    student, anchors = copy.deepcopy(teacher).requires_grad_(True), state.server["anchors"]
    norm, seen, known = teacher.norm, {}, torch.tensor([1, 3])
    norm.register_forward_pre_hook(lambda layer, inputs: seen.update(x=inputs[0]))
    torch.manual_seed(11)
    net, expected, moving = LabelGenerator(PIXELS.shape, 3, anchors, 12).double(), [], None
    for name, value in student.named_parameters():
        if value.dim() > 1:
            value.data = torch.nn.init.xavier_normal_(torch.empty(value.shape)).double()
        else:
            value.data = (
                torch.empty(value.shape).normal_(1, 0.02).double()
                if "weight" in name
                else value.data * 0
            )
    mean, std = (torch.full((1,), value).double().requires_grad_() for value in (0.5, 0.2))
    for number in range(6):
        targets = torch.tensor([0, 1] * 6)
        for layer in net.noisy:
            torch.nn.init.normal_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        optimizer = torch.optim.Adam(
            [
                {"params": net.parameters()},
                {"params": [mean], "lr": 0.01},
                {"params": [std], "lr": 0.01},
            ],
            0.05,
            (0.5, 0.999),
        )
        best = None
        for _ in range(3):
            hidden = F.batch_norm(
                anchors[known[targets]], None, None, net.norm.weight, net.norm.bias, True
            )
            hidden = torch.cat([net.noisy[0](hidden[:10]), net.noisy[1](hidden[10:])])
            images = net.blocks(net.first(hidden).view(12, 6, 2, 2))[..., :6, :6]
            x = (images - mean[None, :, None, None]) / std[None, :, None, None]
            features, logits, _ = teacher(x)
            logits = logits[:, [1, 3]]
            now = seen["x"].mean((0, 2, 3)), seen["x"].var((0, 2, 3), correction=0)
            used = (
                now
                if moving is None
                else [0.1 * a + 0.9 * b for a, b in zip(now, moving, strict=True)]
            )
            loss = 1.0 * (
                (norm.running_mean - used[0]).norm() + (norm.running_var - used[1]).norm()
            )
            loss = loss + 0.5 * F.cross_entropy(logits, targets)
            loss = loss + 0.5 * torch.relu(F.mse_loss(features, anchors[known[targets]]) - 0.2)
            if number >= 4:  # three batches are behind the student
                own = student.eval()(x).logits[:, [1, 3]]
                loss = (
                    loss
                    - (kl(own, logits, 1.0) * (own.argmax(1) == logits.argmax(1)).double()).mean()
                )
            if best is None or float(loss.detach()) < best[0]:
                best = float(loss.detach()), images.detach()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        now = [each.detach() for each in now]
        moving = (
            now if moving is None else [0.9 * b + 0.1 * a for a, b in zip(now, moving, strict=True)]
        )
        if number == 0:
            continue
        expected.append((best[1] * 255).to(torch.uint8))
        pool = torch.cat(expected)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, weight_decay=0.0002)
        for _ in range(2):  # two passes: fewer images than a batch of the student's
            x = (pool[torch.randperm(len(pool))].double() / 255 - 0.4) / 0.3
            own, taught = student.train()(x), teacher(x)
            loss = 20.0**2 * kl(own.logits[:, [1, 3]], taught.logits[:, [1, 3]], 20.0).mean()
            loss = loss + 0.5 * F.mse_loss(own.features, taught.features)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    before = torch.random.get_rng_state()
    simulation.runtime.net.set_buffers(state.server["buffers"])
    model = state.server["params"] | state.server["buffers"]
    made = made_by(MAKER, simulation, model, anchors, [1, 3], 11)
    assert made.shape == (60, 1, 6, 6)
    assert made.dtype == torch.uint8
    assert torch.equal(made, torch.cat(expected))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_student_batches_are_reshuffled_every_pass(monkeypatch):
    """Like a DataLoader with shuffle=True: nine images in batches of four give two batches per
    pass, and one image is left out.
    """
    monkeypatch.setattr(label_generator, "STUDENT_BATCH", 4)
    torch.manual_seed(0)
    batches = shuffled(9)
    found = [next(batches).tolist() for _ in range(4)]
    torch.manual_seed(0)
    orders = [torch.randperm(9).tolist() for _ in range(2)]
    assert found == [order[start : start + 4] for order in orders for start in (0, 4)]


def test_labels_of_generated_images_are_balanced():
    torch.manual_seed(0)
    labels = draw_balanced_labels(3, 11)
    assert labels[:9].tolist() == [0, 1, 2] * 3
    assert len(labels) == 11
    assert set(draw_balanced_labels(5, 3).tolist()) <= set(range(5))


def test_student_skips_batches_of_one(monkeypatch):
    """Five images in batches of two leave a batch of one, for which batch norm is undefined."""
    monkeypatch.setattr(label_generator, "STUDENT_BATCH", 2)
    simulation = stream(model=Normed())
    server = play(simulation, 1).server
    student = Student(
        LiveNetwork(simulation.runtime.net),
        server["params"] | server["buffers"],
        torch.arange(2),
        1.0,
    )
    before = student.net.snapshot()
    student.learn(torch.randint(256, (5, 1, 6, 6), dtype=torch.uint8), PIXELS, 3)
    assert not torch.equal(student.net.snapshot()["mapping.weight"], before["mapping.weight"])


def test_local_loss_equals_loops():
    """Classes 0 and 1 are old, 2 and 3 new. Features are a linear layer beside the classifier."""
    torch.manual_seed(0)
    new, old = (torch.tensor(row).double() for row in ([0, 0, 1, 1], [1, 1, 0, 0]))
    models = [
        {"w": torch.randn(36, 4).double(), "m": torch.randn(36, 3).double()} for _ in range(2)
    ]
    anchors, stored = (
        torch.randn(4, 3).double(),
        torch.randint(256, (6, 1, 6, 6), dtype=torch.uint8),
    )

    def net(params, x, mask=None):
        return Output(x.flatten(1) @ params["m"], x.flatten(1) @ params["w"])

    scale = {
        name: torch.tensor([v], dtype=torch.float64) for name, v in (("mean", 0.4), ("std", 0.3))
    }
    first = {"params": models[0], "new": new, "anchors": anchors}
    order = torch.tensor([5, 0, 3, 1, 2, 4])
    ctx = context(server=first, plan={"order": order}, steps=torch.tensor(2.0))
    x, y = torch.randn(3, 1, 6, 6).double(), torch.tensor([2, 3, 0])
    batch = Batch(x, y, torch.tensor([1.0, 1.0, 0.0]).double(), 1)  # the last row is padding
    entropy, distance = 0.0, 0.0
    for row in range(2):
        pixels = x[row].flatten()
        logits = [float(pixels @ models[0]["w"][:, c]) for c in (2, 3)]
        entropy -= (logits[y[row] - 2] - np.log(np.exp(logits).sum())) / 2
        distance += (
            sum(float(pixels @ models[0]["m"][:, i] - anchors[y[row], i]) ** 2 for i in range(3))
            / 6
        )
    learning = entropy + 0.5 * max(0.0, distance - 0.2)
    assert_close(
        LANDER_.objective(net, models[0], batch, ctx), torch.tensor(learning).double(), atol=1e-10
    )
    kept = 0.0
    for place in (2, 4, 5, 0):  # step 1 of four at a time: places 4, 5, 0, 1 of the order
        pixels = ((stored[place].double() / 255 - 0.4) / 0.3).flatten()
        student, teacher = ((pixels @ model["w"])[:2] / 2.0 for model in models)
        kept -= float((teacher.softmax(0) * student.log_softmax(0)).sum()) / 4
        kept += float(((pixels @ models[0]["m"] - pixels @ models[1]["m"]) ** 2).sum()) / 12
    # n = 4, n_o = 2: alpha = log2(3), beta = sqrt(1/2)
    cur, pre = 0.2 * (1 + 1 / np.log2(3)) / np.sqrt(0.5), 0.4 * np.log2(3) * np.sqrt(0.5)
    second = replace(
        ctx, server=first | {"old": models[1], "known": old, "images": stored, "scale": scale}
    )
    expected = torch.tensor(cur * learning + pre * kept).double()
    assert_close(LANDER_.objective(net, models[0], batch, second), expected, atol=1e-10)


def test_penalty_is_zero_within_the_radius():
    """The radius limits the batch mean: squared distances 0.05 and 0.3 have the mean 0.175, below
    0.2.
    """
    anchors = torch.zeros(2, 1).double()

    def net(params, x, mask=None):
        return Output(x, params["w"] * torch.zeros(len(x), 2).double())

    server = {"anchors": anchors, "new": torch.ones(2).double()}
    ctx = context(server=server)
    x = torch.tensor([[0.05], [0.3]], dtype=torch.float64).sqrt()
    found = LANDER_.objective(
        net, {"w": torch.ones(1).double()}, Batch(x, torch.tensor([0, 1]), None, 0), ctx
    )
    assert_close(found, torch.tensor(2.0).double().log())


def test_mapping_keeps_logits_and_old_model_is_sent_from_task_2():
    """The layer beside the classifier is a part of the model, and the logits equal those of the
    plain model.
    """
    simulation = stream()
    module = simulation.runtime.net.module
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    plain = module.forward(x)  # past the layer
    assert set(simulation.initial) - {"mapping.weight", "mapping.bias"} == set(
        make_simulation().initial
    )
    assert torch.equal(module(x).logits, plain.logits)
    assert_close(module(x).features, plain.features @ module.mapping.weight.T + module.mapping.bias)
    first, third = (play(simulation, rounds).server for rounds in (1, 3))
    assert first.keys() == {"params", "buffers", "new", "anchors"}
    assert third["images"].shape == (20, 1, 6, 6)
    assert not torch.equal(third["params"]["mapping.weight"], simulation.initial["mapping.weight"])
    assert torch.equal(third["anchors"], first["anchors"])


@pytest.mark.parametrize("kind", ["csv", "npy", "npz", "npz of several"])
def test_embeddings_are_read_from_every_file_format(tmp_path, kind):
    rows = np.loadtxt(EMBEDDINGS, delimiter=",")
    path = EMBEDDINGS if kind == "csv" else tmp_path / f"rows.{kind[:3]}"
    if kind == "npy":
        np.save(path, rows)
    if kind.startswith("npz"):
        np.savez(path, embeddings=rows, **{"words": np.arange(4)} if "of" in kind else {})
    assert np.array_equal(embeddings(str(path), 4, 99), rows)
    simulation = stream(embeddings=str(path))
    assert_close(simulation.initial_state().server["anchors"], torch.from_numpy(rows))


def test_random_embeddings_are_reproducible():
    rows = embeddings("random", 5, 400)
    assert rows.shape == (5, 400)
    assert np.array_equal(rows, embeddings("random", 5, 400))
    assert abs(rows.var() - 1) < 0.1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the file cannot be read (No such file or directory)"),
        (
            "1,2\n3,4\n",
            "the array has shape 2 x 2, but must be a matrix with 4 rows, one per class",
        ),
        ("1,nan\n1,2\n1,2\n1,2\n", "the file contains numbers that are not finite"),
        ("cat,dog\n", "the file does not contain a matrix of numbers"),
    ],
)
def test_embeddings_of_wrong_shape_are_rejected(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.embeddings={path}: {message}")):
        embeddings(str(path), 4, 8)


def test_missing_embeddings_are_rejected():
    with pytest.raises(
        ConfigError, match=r"needs an embedding of each class name.*algorithm\.embeddings=random"
    ):
        stream(embeddings=None)
    with pytest.raises(
        ConfigError, match=r"must be random or the path of a \.npy, \.npz or \.csv file"
    ):
        embeddings("clip", 4, 8)
    with pytest.raises(ConfigError, match=r"algorithm\.radius=-1"):
        replace(LANDER_, radius=-1.0)


def test_weights_of_the_losses_equal_hand_calculation():
    """Three of six classes are old: alpha = log2(4) = 2, beta = sqrt(1/2) = 0.70711. The weights
    are 0.2 * 1.5 / beta and 0.4 * 2 * beta.
    """
    cur, pre = LANDER_.weights(torch.tensor(3.0), torch.tensor(6.0))
    assert float(cur) == pytest.approx(0.42426, abs=1e-5)
    assert float(pre) == pytest.approx(0.56569, abs=1e-5)
