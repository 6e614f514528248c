"""All sampled clients in one program: stacked parameters, one torch.func.vmap per local step, padded and masked.

Clients are sorted by their number of steps, longest first; a step touches only those that still have one.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.func import vmap

from fedexp import tree
from fedexp.algorithms.base import Batch, Context, FedAvg
from fedexp.engine.base import Cohort, Engine, Trained, Workbench, to_tensors
from fedexp.engine.schedule import Schedule
from fedexp.engine.sequential import evaluate_trained
from fedexp.tree import Tree


@dataclass(frozen=True)
class Vectorised(Engine):
    """For models that treat each example alone; `chunk` clients at a time (None: all)."""

    chunk: int | None = None

    def train(
        self, algorithm: FedAvg, bench: Workbench, server: Tree, cohort: Cohort, lr: float, evaluate_local: bool
    ) -> Trained:
        bench.net.set_buffers(server["buffers"])
        longest_first = np.argsort([-s.steps for s in cohort.schedules], kind="stable")
        size = self.chunk or len(longest_first)
        pieces = [longest_first[i : i + size] for i in range(0, len(longest_first), size)]
        outputs = [_train_chunk(algorithm, bench, server, cohort, piece, lr) for piece in pieces]
        back = torch.as_tensor(np.argsort(longest_first), device=bench.device)
        messages, states, params, losses = tree.map(lambda *leaves: torch.cat(leaves)[back], *outputs)
        count = len(cohort.clients)
        correct, start = None, time.perf_counter()
        if evaluate_local:
            correct = torch.stack(
                [evaluate_trained(bench, one, server["buffers"], server) for one in tree.unstack(params, count)]
            )
        buffers = tree.stack([server["buffers"]] * count)
        return Trained(messages, tree.unstack(states, count), losses, buffers, correct, time.perf_counter() - start)


@dataclass(frozen=True)
class PaddedSchedules:
    """The schedules of C clients as arrays, sorted by number of steps, longest first."""

    index: torch.Tensor  # int64 [C, S, B]
    mask: torch.Tensor  # [C, S, B]: 1 example, 0 padding
    draws: torch.Tensor | None  # int64 [C, S, B, D]
    steps: np.ndarray  # int [C]


def pad(schedules: list[Schedule], bench: Workbench) -> PaddedSchedules:
    longest = max(s.steps for s in schedules)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])

    batch_size = schedules[0].index.shape[1]
    lengths = torch.stack([rows(torch.from_numpy(s.lengths)) for s in schedules])
    mask = (torch.arange(batch_size) < lengths[..., None]).to(bench.dtype)
    draws = None
    if all(s.draws is not None for s in schedules):
        draws = torch.stack([rows(s.draws) for s in schedules if s.draws is not None]).to(bench.device)
    index = torch.stack([rows(s.index) for s in schedules]).to(bench.device)
    return PaddedSchedules(index, mask.to(bench.device), draws, np.array([s.steps for s in schedules]))


class PaddedData:
    """ClientData inside vmap: index and mask are [S, B] there."""

    def __init__(self, bench: Workbench, index: torch.Tensor, mask: torch.Tensor, draws: torch.Tensor | None):
        self.bench, self.index, self.mask, self.draws = bench, index, mask, draws

    def batches(self) -> Iterator[Batch]:
        for step in range(self.index.shape[0]):
            draws = None if self.draws is None else self.draws[step]
            x, y = self.bench.load_train(self.index[step], draws)
            yield Batch(x, y, self.mask[step], step)

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.bench.load_train(index, None)


def _train_chunk(
    algorithm: FedAvg, bench: Workbench, server: Tree, cohort: Cohort, chosen: np.ndarray, lr: float
) -> tuple[Tree, Tree, Tree, torch.Tensor]:
    """(messages, states, params, losses), leaves [len(chosen), ...]."""
    net, count = bench.net, len(chosen)
    padded = pad([cohort.schedules[i] for i in chosen], bench)
    states = tree.stack([cohort.states[i] for i in chosen])
    plans = tree.stack([to_tensors(cohort.plans[i], bench.device) for i in chosen])
    steps = torch.as_tensor(padded.steps, dtype=bench.dtype, device=bench.device)
    in_draws = None if padded.draws is None else 0

    def context(state, plan, begin, own_steps) -> Context:
        return Context(server, state, plan, begin, lr, own_steps, bench.local)

    def begin(state, plan, own_steps, index, mask, draws):
        return algorithm.begin(net, PaddedData(bench, index, mask, draws), context(state, plan, {}, own_steps))

    def step(number, params, momentum, x, y, mask, state, plan, begun, own_steps):
        return algorithm.local_step(
            net, params, momentum, Batch(x, y, mask, number), context(state, plan, begun, own_steps)
        )

    def finish(params, state, plan, begun, own_steps, index, mask, draws):
        data = PaddedData(bench, index, mask, draws)
        return algorithm.finish(net, params, data, context(state, plan, begun, own_steps))

    arrays = (padded.index, padded.mask, padded.draws)
    begun = vmap(begin, in_dims=(0, 0, 0, 0, 0, in_draws))(states, plans, steps, *arrays)
    params = tree.map(lambda p: p.expand(count, *p.shape).clone(), server["params"])
    momentum, total = tree.zeros_like(params), torch.zeros_like(steps)
    for number in range(int(padded.steps.max(initial=0))):
        active = int((padded.steps > number).sum())
        head = tree.map(lambda leaf, n=active: leaf[:n], (params, momentum))
        draws = None if padded.draws is None else padded.draws[:active, number]
        x, y = bench.load_train(padded.index[:active, number], draws)
        fixed = tree.map(lambda leaf, n=active: leaf[:n], (states, plans, begun, steps))
        new_params, new_momentum, loss = vmap(partial(step, number))(*head, x, y, padded.mask[:active, number], *fixed)
        tree.map(lambda old, new: old.copy_(new), head, (new_params, new_momentum))
        total[:active] += loss
    messages, new_states = vmap(finish, in_dims=(0,) * 7 + (in_draws,))(params, states, plans, begun, steps, *arrays)
    return messages, new_states, params, total / steps.clamp(min=1)
