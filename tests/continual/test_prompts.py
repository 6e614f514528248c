"""L2P, DualPrompt and CODA-Prompt: networks with prompts against loops over images and heads,
hand-calculated losses, and which prompts move in which task."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from toy_models import TinyTransformer

from fedexp.core.errors import ConfigError
from fedexp.testing import set_up_client
from fedexp_continual.algorithms.codaprompt import CODAPrompt
from fedexp_continual.algorithms.dualprompt import DualPrompt
from fedexp_continual.algorithms.l2p import L2P
from method_rows import stream
from toy_federation import (
    LOCAL,
    assert_close,
    play,
    play_round,
    random,
)

VIT = TinyTransformer()
POOL = L2P(pool=4, selected=2, length=3, lambda_pull=0.5)
DUAL = DualPrompt(
    general_layers=(0,), general_length=2, task_layers=(1, 2), task_length=3, lambda_match=0.5
)
CODA = CODAPrompt(layers=(0, 2), components=5, length=4, ortho=0.5)
PLAIN = replace(LOCAL, momentum=0.0, weight_decay=0.0, epochs=1)
every_method = pytest.mark.parametrize(
    "method", [POOL, DUAL, CODA], ids=lambda method: type(method).__name__
)


def servers_of(simulation, rounds=4):
    """Return the server's states before the first and after each round."""
    state = simulation.initial_state()
    servers = [state.server]
    for _ in range(rounds):
        state.advance(play_round(simulation, state))
        servers.append(state.server)
    return servers


def spread(server):
    """Return a model whose prompts and keys are far apart, so that they matter; zeros stay."""
    params = dict(server["params"])
    for number, name in enumerate(params):
        if not name.startswith("classifier"):
            used = params[name].flatten(1).abs().sum(1) > 0
            params[name] = random(*params[name].shape, seed=number + 1)
            params[name][~used] = 0
    return params


# --- an independent transformer: one image, one head and one query at a time


def attend(attention: Any, tokens: torch.Tensor, prefix: torch.Tensor | None) -> torch.Tensor:
    """tokens: [n, D]; prefix: [2 L, D] or None."""
    width = tokens.shape[-1]
    q, k, v = (
        tokens @ attention.qkv.weight[i * width : (i + 1) * width].T
        + attention.qkv.bias[i * width : (i + 1) * width]
        for i in range(3)
    )
    if prefix is not None:
        half = len(prefix) // 2
        k, v = torch.cat([prefix[:half], k]), torch.cat([prefix[half:], v])
    rows = []
    for query in q:
        parts = []
        for head in (slice(0, 2), slice(2, 4)):  # two heads of two entries
            scores = [(query[head] @ key[head]).item() / 2**0.5 for key in k]
            weights = torch.tensor(scores, dtype=torch.float64).exp()
            parts.append(sum(w * value[head] for w, value in zip(weights, v, strict=True)))
            parts[-1] = parts[-1] / weights.sum()
        rows.append(torch.cat(parts))
    return torch.stack(rows) @ attention.proj.weight.T + attention.proj.bias


def encode(network: Any, tokens: torch.Tensor, prefixes: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the output of the last norm, [n, D]."""
    for number, block in enumerate(network.blocks):
        tokens = tokens + attend(block.attn, block.norm1(tokens), prefixes.get(number))
        tokens = tokens + block.mlp(block.norm2(tokens))
    return network.norm(tokens)


def tokens_of(network: Any, image: torch.Tensor) -> torch.Tensor:
    patches = network.patch_embed.proj(image[None]).flatten(2)[0].T
    return torch.cat([network.cls_token[0], patches]) + network.pos_embed[0]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b) / float(a.norm() * b.norm())


def by_loops(method, network, params, image, key=None):
    """Return the query and the features of an image; key: the task whose E-Prompt is used."""
    tokens, prompts = tokens_of(network, image), params["prompts"]
    query = encode(network, tokens, {})[0]
    if isinstance(method, L2P):
        fits = [cosine(query, k) for k in params["keys"]]
        best = sorted(range(len(fits)), key=lambda m: -fits[m])[: method.selected]
        added = torch.cat([prompts[m] for m in best])
        return query, encode(network, torch.cat([added, tokens]), {})[: len(added)].mean(0)
    if isinstance(method, DualPrompt):
        if key is None:
            begun = [t for t, k in enumerate(params["keys"]) if k.any()]
            key = max(begun, key=lambda t: cosine(query, params["keys"][t]))
        prefixes = {0: params["general"][0], 1: prompts[key, 0], 2: prompts[key, 1]}
    else:
        prefixes = {}
        for number, layer in enumerate(method.layers):
            total = torch.zeros_like(prompts[0, 0])
            for m in range(method.components):
                if prompts[m].any():
                    asked = query * params["attention"][m, number]
                    total = total + cosine(asked, params["keys"][m, number]) * prompts[m, number]
            prefixes[layer] = total
    return query, encode(network, tokens, prefixes)[0]


# --- prefixes


# --- models and losses


@every_method
@pytest.mark.parametrize("rounds", [1, 3], ids=["first task", "second task"])
def test_model_and_loss_equal_loops(method, rounds):
    """With spread keys and prompts. In training, DualPrompt uses the task's own E-Prompt; in a
    test, one of the tasks so far."""
    simulation = stream(method, model=VIT, augment=False)
    client, net = set_up_client(simulation, play(simulation, rounds)), simulation.runtime.net
    batch, params = next(client.data.batches()), spread(client.ctx.server)
    task, classes = rounds // 2, (0, 1) if rounds == 1 else (2, 3)
    network, expected = net.module.backbone, 0.0
    for image, label in zip(batch.x, batch.y, strict=True):
        _, features = by_loops(method, network, params, image)
        logits = features @ params["classifier.weight"].T + params["classifier.bias"]
        assert_close(net(params, image[None]).logits[0], logits, atol=1e-10)
        query, features = by_loops(method, network, params, image, key=task)
        logits = features @ params["classifier.weight"].T + params["classifier.bias"]
        expected += float(F.cross_entropy(logits[list(classes)], label - classes[0]))
        if isinstance(method, L2P):
            fits = sorted((cosine(query, k) for k in params["keys"]), reverse=True)
            expected += 0.5 * sum(1 - fit for fit in fits[:2])
        if isinstance(method, DualPrompt):
            expected += 0.5 * (1 - cosine(query, params["keys"][task]))
    expected /= len(batch.y)
    if isinstance(method, CODAPrompt):
        used = range(3) if rounds == 1 else range(5)  # 5 components of 2 tasks: 3 and 2
        for name in ("keys", "attention", "prompts"):
            for block in range(2):
                rows = [params[name][m, block].flatten() for m in used]
                apart = [(float(a @ b) - (a is b)) ** 2 for a in rows for b in rows]
                expected += 0.5 * sum(apart) / len(apart)
    found = method.objective(net, params, batch, client.ctx)
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-10)


# --- tasks


@pytest.mark.parametrize("method", [DUAL, CODA], ids=["DualPrompt", "CODAPrompt"])
def test_clients_change_only_the_rows_of_the_current_task(method):
    """With momentum and weight decay. Rows of task 2 are zeros until the task begins."""
    simulation = stream(method, model=VIT, augment=False)
    still = stream(method, model=VIT, augment=False, local=replace(PLAIN, lr=1e-12))
    servers = servers_of(simulation)
    begun = play(still, 3).server["params"]
    count, first = (5, 3) if method is CODA else (2, 1)
    for name in method.divided:
        values = [server["params"][name] for server in servers]
        for row in range(count):
            if row < first:
                assert not torch.equal(values[1][row], values[0][row])
                assert_close(values[3][row], values[2][row])
                assert_close(values[4][row], values[2][row])
            else:
                assert not values[2][row].any()
                assert begun[name][row].abs().max() > 1e-4
                assert not torch.equal(values[4][row], values[3][row])


def test_components_of_a_new_task_are_initially_orthonormal():
    """Two components per task, in each of two blocks."""
    four = replace(CODA, components=4)
    still = stream(four, model=VIT, augment=False, local=replace(PLAIN, lr=1e-12))
    first, _, _, second = servers_of(still, 3)
    for server, rows in ((first, slice(0, 2)), (second, slice(2, 4))):
        for name in CODA.divided:
            for block in range(2):
                vectors = server["params"][name][rows, block].flatten(1)
                assert_close(vectors @ vectors.T, torch.eye(2).double(), atol=1e-6)


@every_method
def test_head_keeps_the_rows_of_other_tasks(method):
    """With Adam, whose steps would be full even for the smallest weight decay."""
    adam = replace(LOCAL, optimizer="adam", lr=0.01)
    simulation = stream(method, model=VIT, local=adam)
    _, _, first, _, second = (server["params"] for server in servers_of(simulation))
    for name in ("classifier.weight", "classifier.bias"):
        assert_close(second[name][:2], first[name][:2])
        assert (second[name][2:] - first[name][2:]).abs().min() > 1e-4


# --- rejections


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (replace(CODA, layers=(1, 3)), "block 3 .* has 3 blocks"),
        (replace(CODA, components=1), r"components=1: must be at least the number of tasks, 2"),
    ],
)
def test_model_or_tasks_that_do_not_fit_are_rejected(method, message):
    with pytest.raises(ConfigError, match=message):
        stream(method, model=VIT)


# --- timm
