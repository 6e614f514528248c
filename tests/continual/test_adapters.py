"""PILoRA and LoRM: losses by loops, merging against least squares, and which parameters are trained
and tested."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from continual_rows import ADAPTED
from toy_models import Adapted

from analysed import EVERY, measure
from fedexp.algorithms import optimizers
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.testing import set_up_client, train
from fedexp.training.rounds import begin_task, play_round
from fedexp_continual.algorithms.grams import damp, merge_down
from fedexp_continual.algorithms.lorm import LoRM, merge_up
from fedexp_continual.algorithms.pilora import CENTERS, PILoRA, prototype_weights
from fedexp_continual.models.lora import LoRA
from fedexp_papers.analyses.weight_divergence import WeightDivergence
from method_rows import stream
from toy_federation import (
    LOCAL,
    TWO_TASKS,
    assemble,
    assert_close,
    play,
    random,
)

LAYERS = ("backbone.0.1", "backbone.1.0")
PILORA = PILoRA(temperature=0.5, lambda_pl=0.5, gamma=0.5, l1=0.1, adapter_rate=0.25)
PLAIN = replace(LOCAL, momentum=0.0, weight_decay=0.0, epochs=1)


# --- PILoRA


def test_local_loss_equals_loops():
    """In task 3: cross-entropy over all distances, the distance to the label's prototype, |A|, and
    the overlap with A of tasks 1 and 2."""
    three = replace(TWO_TASKS, num_tasks=3, classes=[[0, 1], [2], [3]])
    simulation = stream(PILORA, model=Adapted(), scenario=three, surrogate=0.0)
    state = play(simulation, 5)
    client, net = set_up_client(simulation, state), simulation.runtime.net
    ctx, batch = client.ctx, next(client.data.batches())
    params = ctx.server["params"]
    features, centers = net(params, batch.x).features, params[CENTERS]
    expected = 0.0
    for f, y in zip(features, batch.y, strict=True):
        d = [float(((f - c) ** 2).sum() / 6) ** 0.5 for c in centers]
        expected += (
            np.log(sum(np.exp(-each / 0.5) for each in d)) + d[y] / 0.5 + 0.5 * d[y]
        ) / len(features)
    earlier = [play(simulation, rounds).server["local"] for rounds in (2, 4)]
    for layer in LAYERS:
        now, *old = (each[f"{layer}.down.weight"] for each in (params, *earlier))
        expected += 0.1 * float(now.abs().sum())
        for task in old:
            expected += 0.5 * sum(abs(float(task[i] @ now[j])) for i in range(2) for j in range(2))
    found = PILORA.objective(net, params, batch, ctx)
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-10)


def test_prototype_weights_equal_hand_calculation():
    """Clients 0 and 1 have class 0, with mean features 0 and 2. The prototypes are 1, 3 and 5
    (client 2 did not train on the class, but counts). Sums of distances: 2, 4, 8; u = (1/2, 1/4,
    1/8) -> (1, 1/3, 0); divided by 0.2: softmax(5, 5/3, 0). No client has class 1."""
    own = torch.tensor([[[1.0], [1.0]], [[3.0], [2.0]], [[5.0], [3.0]]]).double()
    means = torch.tensor([[[0.0], [9.0]], [[2.0], [9.0]], [[7.0], [9.0]]]).double()
    counts = torch.tensor([[4.0, 0.0], [1.0, 0.0], [0.0, 0.0]]).double()
    found = prototype_weights(own, means, counts)
    assert_close(found[0], torch.tensor([5.0, 5 / 3, 0.0], dtype=torch.float64).softmax(0))
    assert_close(found[1], torch.full((3,), 1 / 3, dtype=torch.float64))
    alone = prototype_weights(own[:1], means[:1], counts[:1])
    assert_close(alone, torch.ones(2, 1, dtype=torch.float64))


def test_adapters_have_their_own_rate_and_old_prototypes_are_frozen():
    """SGD without momentum: params - lr * grad, with a factor of 0.25 for adapters; task 2 has the
    classes 2 and 3."""
    simulation = stream(PILORA, model=Adapted(), local=PLAIN)
    client, net = set_up_client(simulation, play(simulation, 3)), simulation.runtime.net
    ctx, batch = client.ctx, next(client.data.batches())
    params = ctx.server["params"]
    grads = torch.func.grad(lambda p: PILORA.objective(net, p, batch, ctx))(params)
    moved, _, _ = PILORA.local_step(net, params, optimizers.memory_of(params, PLAIN), batch, ctx)
    for name, value in params.items():
        rate = ctx.lr if name == CENTERS else 0.25 * ctx.lr
        step = rate * grads[name]
        if name == CENTERS:
            step[:2] = 0
        assert_close(moved[name], value - step)
    assert (moved[CENTERS][2:] - params[CENTERS][2:]).abs().min() > 0


def test_evaluation_uses_adapters_of_all_tasks():
    simulation = stream(PILORA, model=Adapted())
    first, second = (play(simulation, rounds).server for rounds in (2, 4))
    assert_close(first["params"], first["local"])
    for layer in LAYERS:
        for end in (".down.weight", ".up.weight"):
            assert_close(
                second["params"][layer + end],
                first["local"][layer + end] + second["local"][layer + end],
            )
        assert second["earlier"][layer].shape == first["local"][f"{layer}.down.weight"].shape
    assert_close(second["params"][CENTERS][:2], first["params"][CENTERS][:2], 0.0)
    assert not torch.equal(second["params"][CENTERS][2:], first["params"][CENTERS][2:])


# --- LoRM


def test_merged_matrices_minimise_distance_to_client_outputs():
    """Against least squares on the stacked inputs of three clients: W minimises sum_k ||W X_k - W_k
    X_k||^2."""
    x, parts = random(3, 20, 5), random(3, 4, 5)
    grams = x.transpose(1, 2) @ x
    answers = torch.cat([x[k] @ parts[k].T for k in range(3)])
    expected = torch.linalg.lstsq(x.flatten(0, 1), answers).solution.T
    assert_close(merge_down(parts, grams), expected, atol=1e-10)
    down, ups = random(2, 5), random(3, 4, 2)
    answers = torch.cat([x[k] @ (ups[k] @ down).T for k in range(3)])
    expected = torch.linalg.lstsq(x.flatten(0, 1) @ down.T, answers).solution.T
    assert_close(merge_up(ups, down, grams), expected, atol=1e-10)
    assert damp(torch.tensor([[[2.0, 4.0], [4.0, 6.0]]]), 0.25).tolist() == [
        [[2.0, 1.0], [1.0, 6.0]]
    ]


def remember(module, seen, name):
    return module.register_forward_hook(lambda module, inputs, _: seen.update({name: inputs[0]}))


def test_gram_matrices_equal_forward_hooks():
    """For the inputs of each layer in the trained model, with each example of a client once and
    incomplete last batches."""
    simulation = stream(LoRM(off_diagonal=1.0), model=Adapted(), augment=False)
    state = play(simulation, 1)
    messages = train(simulation.engine, simulation, state).messages
    cohort = assemble(simulation, state, 2)
    runtime, info = simulation.runtime, simulation.stages[0].federation
    for position, client in enumerate(cohort.clients):
        x, _ = runtime.load_train(torch.from_numpy(info.parts[client]), None)
        params, seen = tree.row(messages["params"], position), {}
        handles = [
            remember(runtime.net.module.get_submodule(layer), seen, layer) for layer in LAYERS
        ]
        seen["classifier"] = runtime.net(params, x).features
        for handle in handles:
            handle.remove()
        for name, inputs in seen.items():
            assert_close(messages["grams"][name][position], inputs.T @ inputs, atol=1e-10)


def test_lorm_trains_b_and_a_in_alternate_rounds():
    """From the first round of each task, here with an odd number of rounds. The other parameters do
    not change at all, despite weight decay and momentum."""
    three = replace(TWO_TASKS, rounds_per_task=3)
    simulation = stream(LoRM(off_diagonal=0.5), model=Adapted(), scenario=three, rounds=3)
    state = simulation.initial_state()
    for trains_b in (True, False, True) * 2:
        # the task begins with adapters that the server does not have yet
        result, begins = play_round(simulation, state), state.round == 3
        before, after = state.server["local"], result.server["local"]
        for layer in LAYERS:
            up, down = f"{layer}.up.weight", f"{layer}.down.weight"
            assert torch.equal(after[up], before[up]) == (not trains_b)
            assert torch.equal(after[down], before[down]) == (trains_b and not begins)
        state.advance(result)


@pytest.mark.parametrize(
    ("rounds", "end", "rate"), [(0, "up.weight", 2.0), (1, "down.weight", 0.5)]
)
def test_matrices_a_and_b_have_separate_learning_rates(rounds, end, rate):
    """SGD without momentum and weight decay 0.3: in round 1, B moves by 2 lr times (gradient + 0.3
    B); in round 2, A by lr / 2 times that; the head by lr times that."""
    algorithm = LoRM(off_diagonal=0.5, a_rate=0.5, b_rate=2.0, weight_decay=0.3)
    simulation = stream(algorithm, model=Adapted(), local=PLAIN)
    client, net = set_up_client(simulation, play(simulation, rounds)), simulation.runtime.net
    ctx, batch = client.ctx, next(client.data.batches())
    params = ctx.server["params"]
    grads = torch.func.grad(lambda p: algorithm.objective(net, p, batch, ctx))(params)
    memory = optimizers.memory_of(params, PLAIN)
    moved, _, _ = algorithm.local_step(net, params, memory, batch, ctx)
    for name, value in params.items():
        adapter = name.endswith((".up.weight", ".down.weight"))
        factor = rate * name.endswith(end) if adapter else 1.0
        assert_close(moved[name], value - factor * ctx.lr * (grads[name] + 0.3 * value))
    assert any((moved[k] != v).any() for k, v in params.items() if k.endswith(end))


def test_local_models_are_compared_with_the_received_model():
    """Not with the tested model, which has the merged change instead of the adapters, and B = 0."""
    simulation = stream(
        LoRM(off_diagonal=0.5),
        model=Adapted(),
        local=replace(LOCAL, lr_decay=1.0),
    )
    state = play(simulation, 3)
    cohort = assemble(simulation, state, 4)
    messages = train(simulation.engine, simulation, state, cohort).messages
    _, moves = measure(simulation, WeightDivergence(**EVERY), state=state)
    sent = state.server["local"]
    moved = {name: leaf - sent[name] for name, leaf in messages["params"].items()}
    l1 = sum(leaf.abs().flatten(1).sum(1) for leaf in moved.values())
    rows = [row for row in moves if row["layer"] == "total"]
    assert [row["client"] for row in rows] == list(cohort.clients)
    assert [row["l1"] for row in rows] == pytest.approx(l1.tolist(), rel=1e-12)
    assert all(np.isnan(row["distribution_distance"]) for row in rows)  # it was not tested


def test_lorm_server_update_in_second_task_equals_a_plain_loop():
    """B, then the change of both tasks, from the clients' messages; the head's rows of task 1 do
    not change."""
    simulation = stream(
        LoRM(off_diagonal=0.5),
        model=Adapted(),
        participation=1.0,
        local=replace(LOCAL, lr_decay=1.0),
    )
    state = play(simulation, 3)
    before = play(simulation, 2).server
    # of round 4, which trains A
    messages = train(simulation.engine, simulation, state).messages
    server = play_round(simulation, state).server
    half = {
        k: 0.5 * (g + torch.diag_embed(g.diagonal(dim1=1, dim2=2)))
        for k, g in messages["grams"].items()
    }
    for layer in LAYERS:
        up, down = f"{layer}.up.weight", f"{layer}.down.weight"
        g = half[layer]
        total = torch.linalg.pinv(g.sum(0))
        a = sum(part @ gram for part, gram in zip(messages["params"][down], g, strict=True)) @ total
        assert_close(server["local"][down], a, atol=1e-9)
        old = before["local"][up] @ before["local"][down]
        g1, g2 = before["latest"][layer], g.sum(0)
        change = (old @ g1 + state.server["local"][up] @ a @ g2) @ torch.linalg.pinv(g1 + g2)
        assert_close(server["params"][f"{layer}.change"], change, atol=1e-8)
        assert not server["params"][up].any()
    weight = sum(
        part @ gram
        for part, gram in zip(
            messages["params"]["classifier.weight"], half["classifier"], strict=True
        )
    )
    weight = weight @ torch.linalg.pinv(half["classifier"].sum(0))
    assert_close(server["local"]["classifier.weight"][2:], weight[2:], atol=1e-9)
    for name in ("classifier.weight", "classifier.bias"):
        assert torch.equal(server["local"][name][:2], before["local"][name][:2])
        assert torch.equal(server["params"][name], server["local"][name])


def test_lorm_counts_the_statistics_of_a_task_once():
    """Also if no message arrives in the next task, which leaves the state of the server."""
    simulation = stream(LoRM(off_diagonal=0.5), model=Adapted())
    state = play(simulation, 2)
    once = begin_task(simulation, state.server, 3)
    assert_close(once["grams"], state.server["latest"])
    assert_close(begin_task(simulation, once, 3)["grams"], once["grams"])


def test_change_of_the_first_task_is_b_a_also_where_an_input_is_always_0():
    """Formula for t = 1: B_1 A_1. With G_1 G_1^+, the column of the unused input would be lost."""
    algorithm, layer = LoRM(off_diagonal=1.0), LAYERS[0]
    local = {f"{layer}.up.weight": random(4, 2), f"{layer}.down.weight": random(2, 5)}
    inputs = random(20, 5)
    inputs[:, 3] = 0
    none = {"products": {layer: torch.zeros(4, 5)}, "grams": {layer: torch.zeros(5, 5)}}
    tested = algorithm.merge_tasks(none, local, {layer: inputs.T @ inputs}, first=True)
    expected = local[f"{layer}.up.weight"] @ local[f"{layer}.down.weight"]
    assert expected[:, 3].all()
    assert_close(tested[f"{layer}.change"], expected)


def test_tested_model_is_backbone_plus_change():
    simulation = stream(LoRM(off_diagonal=0.5), model=Adapted(lora=LoRA(rank=2, alpha=3.0)))
    params, module = play(simulation, 4).server["params"], simulation.runtime.net.module
    x, scale = random(3, 1, 6, 6), 1.5
    value = x.flatten(1)
    for layer in LAYERS:
        base = module.get_submodule(layer).base
        value = (F.linear(value, base.weight + scale * params[f"{layer}.change"], base.bias)).tanh()
    assert_close(simulation.runtime.net(params, x).features, value)


# --- both


@pytest.mark.parametrize("row", ADAPTED, ids=lambda row: row.name)
def test_model_without_adapters_is_rejected(row):
    with pytest.raises(
        ConfigError, match=rf"model\.lora\.rank: {row.cls.__name__} needs low-rank adapters"
    ):
        stream(row.make(), model=Adapted(lora=LoRA()))
    with pytest.raises(ConfigError, match=r"freeze_a=true: must be false, because .* trains A"):
        stream(row.make(), model=Adapted(lora=LoRA(rank=2, freeze_a=True)))
