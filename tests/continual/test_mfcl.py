"""MFCL: the generator's loss and the local loss against loops, and the labels of the images."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms import heads
from fedexp.algorithms.interfaces import Batch, Context, Pixels
from fedexp.engine.network import LiveNetwork
from fedexp.models import Output
from fedexp_continual.algorithms import mfcl
from fedexp_continual.algorithms.generator import Generator
from fedexp_continual.algorithms.mfcl import MFCL
from toy_federation import LOCAL, Normed, assert_close, make_simulation, play

PIXELS = Pixels((1, 6, 6), (0.4,), (0.3,))
MFCL_ = MFCL(ft=0.7, kd=0.3, batches=2, batch_size=4, steps=3, lr_generator=0.05, width=3)
OLD, NEW = (torch.tensor(row).double() for row in ([1, 0, 1, 0, 0], [0, 0, 0, 1, 0]))


# --- the server


def test_imbalance_is_0_for_equal_shares_and_1_for_one_class():
    """By hand for (1/2, 1/4, 1/4): the entropy is 3/2 log 2, so 1 - 1.5 log 2 / log 3."""
    assert float(mfcl.imbalance(torch.ones(3).double() / 3)) == pytest.approx(0, abs=1e-12)
    shares = torch.tensor([0.5, 0.25, 0.25]).double()
    assert float(mfcl.imbalance(shares)) == pytest.approx(1 - 1.5 * math.log(2) / math.log(3))
    assert float(mfcl.imbalance(torch.ones(1))) == 1  # one old class


def test_blurred_images_equal_convolution_of_reflected_images():
    """The kernel is that of the released code: exp(-((g - mean) / (2 std))^2), std 1, size 5."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, 5, 7).double()
    near = torch.tensor(
        [[math.exp(-(i**2 + j**2) / 4) for j in range(-2, 3)] for i in range(-2, 3)],
        dtype=torch.float64,
    )
    padded = F.pad(images, (2, 2, 2, 2), mode="reflect")
    expected = torch.zeros_like(images)
    for i in range(5):
        for j in range(5):
            expected += padded[..., i : i + 5, j : j + 7] * near[i, j] / near.sum()
    assert_close(mfcl.blurred(images), expected)
    ones = torch.ones(1, 1, 3, 3).double()
    assert_close(mfcl.blurred(ones), ones)


def test_generator_loss_equals_released_code():
    """Two old classes, three images and two batch norm layers; the weights are the released ones:
    1, 1, 50 and 0.001. Logits (2, 0), (0, 1), (0, 3).
    """
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]).double()
    layers = [tuple(torch.rand(4, 2).double() + 0.5) for _ in range(2)]
    images = torch.randn(3, 1, 6, 6).double()
    content = sum(math.log(1 + math.exp(-gap / 1000)) for gap in (2, 1, 3)) / 3
    share = sum(1 / (1 + math.exp(-gap)) for gap in (2, -1, -3)) / 3
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    apart = []
    for mean, var, running_mean, running_var in layers:
        ratio = (running_var + 1e-8 + (running_mean - mean) ** 2) / (var + 1e-8)
        first = torch.log((var + 1e-8) ** 0.5 / (running_var + 1e-8) ** 0.5).mean()
        apart.append(float(first - 0.5 * (1 - ratio).mean()))
    smooth = float(((images - mfcl.blurred(images)) ** 2).mean())
    expected = content + 1 - entropy / math.log(2) + 0.001 * smooth
    assert float(mfcl.generator_loss(logits, [], images)) == pytest.approx(expected, rel=1e-12)
    found = float(mfcl.generator_loss(logits, layers, images))
    assert found == pytest.approx(expected + 50 * sum(apart) / 2, rel=1e-12)


def test_images_come_from_the_trained_generator():
    """Three steps of Adam, each with new noise, then two batches in eval mode. The old model has
    batch norm."""
    simulation = make_simulation(model=Normed(), participation=1.0)
    state = play(simulation, 2)
    old = state.server["params"] | state.server["buffers"]
    net, known = LiveNetwork(simulation.runtime.net), torch.tensor([1, 3])
    server = {"old": old, "new": torch.zeros(4).double()}
    made = MFCL_.images_of(net, server, PIXELS, known.tolist(), 11)
    torch.manual_seed(11)
    generator = Generator(PIXELS.shape, 3).double()
    optimizer = torch.optim.Adam(generator.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        x = (generator(torch.randn(4, 256).double()) - 0.4) / 0.3
        output, layers = net.norm_inputs(old, x)
        assert len(layers) == 1
        loss = mfcl.generator_loss(output.logits[:, known], layers, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    generator.eval()
    expected = torch.cat([generator(torch.randn(4, 256).double()) for _ in range(2)])
    assert torch.equal(made, (expected.detach() * 255).to(torch.uint8))
    assert losses[-1] < losses[0]


# --- the clients


def net(params, x, mask=None):
    """A linear layer without activation, and the classifier."""
    features = x.flatten(1) @ params["w"]
    return Output(features, heads.logits(features, params))


@pytest.fixture
def task():
    """Return (model, batch, context) of a client in task 2.

    Classes 0 and 2 are old, 3 is new, and 1 and 4 are later classes. The third row is padding.
    """
    torch.manual_seed(0)
    models = [
        {
            "w": torch.randn(36, 3).double() / 6,
            heads.WEIGHT: torch.randn(5, 3).double(),
            heads.BIAS: torch.randn(5).double(),
        }
        for _ in range(2)
    ]
    server = {"params": models[0], "old": models[1], "known": OLD, "new": NEW}
    server["images"] = torch.randint(256, (6, 1, 6, 6), dtype=torch.uint8)
    scale = torch.tensor([[0.4], [0.3]], dtype=torch.float64)
    server["scale"] = {"mean": scale[0], "std": scale[1]}
    plan = {"order": torch.tensor([5, 0, 3, 1, 2, 4])}
    ctx = Context(server, {}, {}, plan, {}, 0.1, torch.tensor(2.0), LOCAL, torch.tensor(2.0))
    x, y = torch.randn(3, 1, 6, 6).double(), torch.tensor([3, 3, 0])
    return models[0], Batch(x, y, torch.tensor([1.0, 1.0, 0.0]).double(), 0), ctx


def with_new(ctx, new):
    changed = ctx.server | {"new": torch.tensor(new).double()}
    return Context(changed, *list(vars(ctx).values())[1:])


def outputs(model, image):
    """Return features and logits as lists of numbers."""
    pixels, w = image.flatten().tolist(), model["w"].tolist()
    features = [sum(p * row[d] for p, row in zip(pixels, w, strict=True)) for d in range(3)]
    rows, biases = model[heads.WEIGHT].tolist(), model[heads.BIAS].tolist()
    return features, [
        sum(f * r for f, r in zip(features, row, strict=True)) + bias
        for row, bias in zip(rows, biases, strict=True)
    ]


def entropy(logits, classes, label):
    return math.log(sum(math.exp(logits[c]) for c in classes)) - logits[label]


def test_local_loss_equals_loops(task):
    """Two new classes, 3 and 4. The four images of step 0 are numbers 5, 0, 3 and 1; their labels
    are the old model's predictions among the old classes 0 and 2."""
    model, batch, ctx = task
    ctx = with_new(ctx, [0, 0, 0, 1, 1])
    old = ctx.server["old"]
    images = (ctx.server["images"][[5, 0, 3, 1]].double() / 255 - 0.4) / 0.3
    rows = [(batch.x[i], 3) for i in range(2)]  # without padding
    for image in images:
        logits = outputs(old, image)[1]
        rows.append((image, 0 if logits[0] > logits[2] else 2))
    assert {label for _, label in rows} == {0, 2, 3}
    learned = tuned = distilled = 0.0
    for number, (image, label) in enumerate(rows):
        logits = outputs(model, image)[1]
        if number < 2:
            learned += entropy(logits, [3, 4], label) / 2
        tuned += entropy(logits, [0, 2, 3, 4], label) / 6
        mixed = {"w": model["w"]} | heads.head(old)  # the old classifier on the new features
        pairs = zip(outputs(mixed, image)[1], outputs(old, image)[1], strict=True)
        gaps = [(a - b) ** 2 for a, b in pairs]
        distilled += (gaps[0] + gaps[2]) / 2 / 6
    found = MFCL_.objective(net, model, batch, ctx)
    assert float(found) == pytest.approx(learned + 0.7 * tuned + 0.3 * distilled, rel=1e-12)
