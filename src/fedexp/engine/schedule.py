"""Batch schedules: the examples that a client trains on, their order and their augmentation.

Schedules are made on the host before training. They depend only on (seed, round, client), so all
algorithms, engines and devices see the same batches.
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
    """One client's round: S steps with at most B examples each."""

    index: Tensor  # int64 [S, B], training examples, padded with one of them
    lengths: np.ndarray  # int [S], number of examples in each step
    draws: Tensor | None  # int64 [S, B, D], random numbers for the augmentation

    @property
    def steps(self) -> int:
        return len(self.lengths)

    @property
    def examples(self) -> int:
        """Return the number of examples trained on, summed over all epochs."""
        return int(self.lengths.sum())


def count_skipped_examples(examples: int, batch_size: int) -> int:
    """Return how many of a client's examples a pass leaves out if batches of one example are
    skipped.

    These are all examples if the batch size is 1, and otherwise the last example if it is alone in
    its batch.
    """
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
    """Return a client's schedule, which reshuffles every epoch and keeps the last partial batch.

    This follows FedNTD B.3. If `part` has several parts, each batch comes from one of them, and the
    order of all batches is random.

    skip_single: leave out batches of one example, for which batch normalisation is not defined.
    again: name for other random numbers than those of the round's training.
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
    # Pad with the client's own example: another example's label may be invalid for the client.
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
    """Return the first `steps` batches as arrays that have the same shape for all clients.

    The arrays are index and mask [steps, B], and draws [steps, B, D] if the schedule has draws.
    Missing batches repeat `example` with mask 0.

    example: index of one of the client's examples.
    """
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
