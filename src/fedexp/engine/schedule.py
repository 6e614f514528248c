"""Schedules: the examples that a client trains on, their order and their augmentation.

They are decided before training, on the host. Everything is a function of (seed, round, client), so
all algorithms, engines and devices see the same batches.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.rng import generator_for
from fedexp.data.types import Draws


@dataclass(frozen=True)
class BatchSchedule:
    """One client's round: S steps of at most B examples."""

    index: Tensor  # int64 [S, B] numbers of training examples, padded with one of them
    lengths: np.ndarray  # int [S] examples in each step
    draws: Tensor | None  # int64 [S, B, D] random numbers of the augmentation

    @property
    def steps(self) -> int:
        return len(self.lengths)

    @property
    def examples(self) -> int:
        """Return the number of examples trained on, counting every epoch."""
        return int(self.lengths.sum())


def left_out(examples: int, batch_size: int) -> int:
    """Return how many examples of a client a pass leaves out whose batches of one example are
    skipped: of a pass over n examples in batches of B, all with B = 1, else the last one where one
    is left over."""
    return examples if batch_size == 1 else int(examples % batch_size == 1)


def make_schedule(
    part: np.ndarray | tuple[np.ndarray, ...],
    local: LocalTraining,
    augmentation: Draws | None,
    image_size: tuple[int, int],
    seed: int,
    round: int,
    client: int,
    skip_single: bool = False,
    again: str = "",
) -> BatchSchedule:
    """Reshuffle every epoch and keep the last partial batch (FedNTD B.3). Several parts: each batch
    comes from one of them, and the order of all batches is random.

    skip_single leaves out batches of one example, on which batch normalisation is not defined.
    again: a name for other random numbers than those of the round's training.
    """
    orders, size = generator_for(seed, f"batches{again}", round, client), local.batch_size
    rows: list[np.ndarray] = []
    parts = part if isinstance(part, tuple) else (part,)
    for _ in range(local.epochs):
        batches = []
        for numbers in parts:
            order = orders.permutation(numbers)
            batches += [order[i : i + size] for i in range(0, len(order), size)]
        rows += (
            batches if len(parts) == 1 else [batches[i] for i in orders.permutation(len(batches))]
        )
    if skip_single:
        rows = [row for row in rows if len(row) > 1]
    # Never with another client's: its label may have no meaning here.
    index = np.full((len(rows), size), parts[0][0], dtype=np.int64)
    for s, row in enumerate(rows):
        index[s, : len(row)] = row
    draws = None
    if augmentation is not None:
        numbers = augmentation.draw(
            generator_for(seed, f"augment{again}", round, client), index.size, *image_size
        )
        draws = torch.from_numpy(numbers.reshape(*index.shape, numbers.shape[-1]))
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return BatchSchedule(torch.from_numpy(index), lengths, draws)


def padded_schedule(schedule: BatchSchedule, steps: int, example: int) -> dict[str, np.ndarray]:
    """Return the first `steps` batches as a plan of one shape for all clients: index and mask
    [steps, B], and draws [steps, B, D] where there are any. Missing batches repeat `example`, one
    of the client's own, with mask 0; a client whose only example batch normalisation leaves out has
    nothing else."""
    index = np.full((steps, schedule.index.shape[1]), example)
    mask = np.zeros(index.shape)
    used = min(steps, schedule.steps)
    index[:used] = schedule.index[:used].numpy()
    mask[:used] = np.arange(index.shape[1]) < schedule.lengths[:used, None]
    arrays = {"index": index, "mask": mask}
    if schedule.draws is not None:
        arrays["draws"] = np.zeros((*index.shape, schedule.draws.shape[-1]), dtype=np.int64)
        arrays["draws"][:used] = schedule.draws[:used].numpy()
    return arrays
