"""TARGET: generator and local loss against loops of the released code, and its statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.interfaces import Batch, Context, Pixels
from fedexp.core.errors import ConfigError
from fedexp.engine.network import LiveNetwork
from fedexp.models import Output
from fedexp_continual.algorithms import generator
from fedexp_continual.algorithms.generator import Generator
from fedexp_continual.algorithms.target import TARGET
from toy_federation import LOCAL, TWO_TASKS, Normed, assert_close, make_simulation, play

PIXELS = Pixels((1, 6, 6), (0.4,), (0.3,))
SMALL = dict(batches=2, batch_size=4, steps=3)
TARGET_ = TARGET(kd=5.0, temperature=2.0, lr_generator=0.05, width=3, **SMALL)


def stream(**changes):
    given = dict(sizes=(3, 4, 2), scenario=TWO_TASKS, rounds=2, participation=1.0)
    return make_simulation(TARGET_, **given | changes)


def made_by(algorithm, simulation, model, classes, seed):
    server = {"old": model, "new": torch.zeros(4, dtype=torch.float64)}
    net = LiveNetwork(simulation.runtime.net)
    return algorithm.images_of(net, server, PIXELS, classes, seed)


def test_generated_images_equal_released_code():
    """Two batches of three steps with a batch norm teacher. Hooks read the teacher's statistics.
    The released teacher has outputs only for the known classes 1 and 3, so the cross-entropy is
    over these.
    """
    simulation = make_simulation(model=Normed(), participation=1.0)
    state = play(simulation, 2)
    teacher = copy.deepcopy(simulation.runtime.net.module).requires_grad_(False).eval()
    teacher.load_state_dict(state.server["params"] | state.server["buffers"])
    seen = {}
    teacher.norm.register_forward_pre_hook(lambda layer, inputs: seen.update(x=inputs[0]))
    torch.manual_seed(11)
    net, expected, moving = Generator(PIXELS.shape, 3).double(), [], None
    meta = torch.optim.Adam(net.parameters(), 0.05 * 3, (0.5, 0.999))
    for _ in range(2):
        z = torch.randn(4, generator.LATENT).double().requires_grad_()
        places = torch.randint(2, (4,))
        fast, total, best = copy.deepcopy(net), None, None
        optimizer = torch.optim.Adam(
            [{"params": fast.parameters()}, {"params": [z], "lr": 0.01}], 0.05, (0.5, 0.999)
        )
        for _ in range(3):
            images = fast(z)
            logits = teacher((images - 0.4) / 0.3).logits
            mean, var = seen["x"].mean((0, 2, 3)), seen["x"].var((0, 2, 3), correction=0)
            used = (
                (mean, var)
                if moving is None
                else (0.1 * mean + 0.9 * moving[0], 0.1 * var + 0.9 * moving[1])
            )
            distance = (teacher.norm.running_mean - used[0]).norm() + (
                teacher.norm.running_var - used[1]
            ).norm()
            loss = 0.5 * F.cross_entropy(logits[:, [1, 3]], places) + 10.0 * distance
            if best is None or float(loss.detach()) < best[0]:
                best = float(loss.detach()), images.detach()
            optimizer.zero_grad()
            loss.backward()
            grads = [p.grad.clone() for p in fast.parameters()]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
            optimizer.step()
        for parameter, grad in zip(net.parameters(), total, strict=True):
            parameter.grad = grad
        meta.step()
        now = mean.detach(), var.detach()
        moving = (
            now
            if moving is None
            else tuple(0.9 * m + 0.1 * n for m, n in zip(moving, now, strict=True))
        )
        expected.append((best[1] * 255).to(torch.uint8))
    before = torch.random.get_rng_state()
    simulation.runtime.net.set_buffers(state.server["buffers"])
    model = state.server["params"] | state.server["buffers"]
    made = made_by(TARGET_, simulation, model, [1, 3], 11)
    assert torch.equal(made, torch.cat(expected))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert made.shape == (8, 1, 6, 6)


def test_local_loss_equals_loops():
    """Classes 0 and 1 are old, 2 is new, and 3 is a future class. Cross-entropy is over class 2,
    and distillation on the images over classes 0 and 1.
    """
    torch.manual_seed(0)
    new, old = (torch.tensor(row).double() for row in ([0, 0, 1, 0], [1, 1, 0, 0]))
    weight, before = torch.randn(36, 4).double(), torch.randn(36, 4).double()
    stored = torch.randint(256, (6, 1, 6, 6), dtype=torch.uint8)

    def net(params, x, mask=None):
        return Output(x.flatten(1), x.flatten(1) @ params["w"])

    scale = {
        name: torch.tensor([v], dtype=torch.float64) for name, v in (("mean", 0.4), ("std", 0.3))
    }
    server = {
        "params": {"w": weight},
        "old": {"w": before},
        "new": new,
        "known": old,
        "images": stored,
    }
    plan = {"order": torch.tensor([5, 0, 3, 1, 2, 4])}
    ctx = Context(
        server | {"scale": scale},
        {},
        {},
        plan,
        {},
        0.1,
        torch.tensor(2.0),
        LOCAL,
        torch.tensor(2.0),
    )
    x, y = torch.randn(3, 1, 6, 6).double(), torch.tensor([2, 2, 0])
    batch = Batch(x, y, torch.tensor([1.0, 1.0, 0.0]).double(), 1)  # the last row is padding
    # step 1 of four at a time: places 4, 5, 0, 1
    drawn = (stored[[2, 4, 5, 0]].double() / 255 - 0.4) / 0.3
    student, teacher = ((drawn.flatten(1) @ w)[:, :2] / 2.0 for w in (weight, before))
    kd = -(teacher.softmax(1) * student.log_softmax(1)).sum(1).mean()
    # CE over one class is 0
    assert_close(TARGET_.objective(net, server["params"], batch, ctx), 5.0 * kd)
    two = ctx.server | {"new": torch.tensor([0, 0, 1, 1]).double()}
    found = TARGET_.objective(
        net, server["params"], batch, Context(two, *list(vars(ctx).values())[1:])
    )
    logits = (x.flatten(1) @ weight)[:2, 2:]
    assert_close(found, F.cross_entropy(logits, torch.tensor([0, 0])) + 5.0 * kd)


def test_runs_without_new_classes_are_rejected():
    with pytest.raises(ConfigError, match="scenario=class_incremental"):
        make_simulation(TARGET_)
    with pytest.raises(ConfigError, match=r"algorithm\.batch_size"):
        TARGET(
            kd=5.0, temperature=2.0, lr_generator=0.05, width=3, batches=1, batch_size=1, steps=1
        )
