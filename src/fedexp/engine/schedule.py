"""Batch schedules: which batches a client trains on, and how their examples are augmented.

Schedules are made on the CPU before training. Their random numbers depend only on the seed, the
round and the client, so all algorithms, engines and devices use the same batches.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.rng import generator_for
from fedexp.data.augment import Draws


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of one client in a round: S steps with at most B examples each."""

    index: Tensor  # int64 [S, B], training examples, padded with an example of the client
    lengths: np.ndarray  # int [S], number of examples in each step
    draws: Tensor | None  # int64 [S, B, D], random numbers for the augmentation
    pass_steps: int  # number of batches of a pass over the client's examples; S may be smaller

    @property
    def steps(self) -> int:
        return len(self.lengths)

    @property
    def examples(self) -> int:
        """Return the total number of examples in all batches of the round."""
        return int(self.lengths.sum())


def count_skipped_examples(examples: int, local: LocalTraining, skip_single: bool = True) -> int:
    """Return how many of a client's examples are omitted in each epoch.

    With `local.drop_last`, the examples of an incomplete last batch are omitted. With
    `skip_single`, an example that is alone in a batch is omitted; with batch size 1, these are all
    examples.

    examples: the number of examples of the client.
    """
    last = examples % local.batch_size
    if local.batch_size == 1:
        return examples if skip_single else 0
    return last if local.drop_last else int(skip_single and last == 1)


def steps_of_pass(
    part: np.ndarray | tuple[np.ndarray, ...], local: LocalTraining, skip_single: bool
) -> int:
    """Return the number of batches of a pass over a client's examples (see `make_schedule`)."""
    size, parts = local.batch_size, part if isinstance(part, tuple) else (part,)
    sizes = [min(size, len(each) - i) for each in parts for i in range(0, len(each), size)]
    least = max(size if local.drop_last else 1, 1 + skip_single)
    return sum(each >= least for each in sizes)


def batches_of_pass(
    part: np.ndarray | tuple[np.ndarray, ...],
    local: LocalTraining,
    skip_single: bool,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Draw the batches of a pass over a client's examples (see `make_schedule`)."""
    size, batches = local.batch_size, []
    for numbers in part if isinstance(part, tuple) else (part,):
        order = rng.permutation(numbers)
        end = len(order) - size + 1 if local.drop_last else len(order)
        batches += [order[i : i + size] for i in range(0, end, size)]
    if isinstance(part, tuple) and len(part) > 1:
        batches = [batches[i] for i in rng.permutation(len(batches))]
    return [batch for batch in batches if len(batch) > 1 or not skip_single]


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
    """Return the schedule of a client in a round.

    The examples are shuffled in every epoch. The last batch of an epoch may be smaller, as in
    FedNTD B.3, or is left out (`local.drop_last`). The last epoch may be incomplete.

    part: the indices of the client's examples. If it is a tuple of several parts, each batch
        contains examples from only one part, and the order of all batches is random.
    skip_single: whether to leave out batches of one example, for which batch normalisation is not
        defined.
    again: a suffix that gives a second schedule in the same round different random numbers.
    """
    rng = generator_for(seed, f"batches{again}", round, client)
    pass_steps = steps_of_pass(part, local, skip_single)
    steps = local.steps_of(pass_steps)
    rows: list[np.ndarray] = []
    while len(rows) < steps:
        rows += batches_of_pass(part, local, skip_single, rng)
    rows = rows[:steps]
    # Pad with an example of the client, because other examples may have invalid labels.
    example = (part[0] if isinstance(part, tuple) else part)[0]
    index = np.full((len(rows), local.batch_size), example, dtype=np.int64)
    for s, row in enumerate(rows):
        index[s, : len(row)] = row
    draws = None
    if augmentation is not None:
        numbers = augmentation.draw(
            generator_for(seed, f"augment{again}", round, client), index.size, *image_size
        )
        draws = torch.from_numpy(numbers.reshape(*index.shape, numbers.shape[-1]))
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return BatchSchedule(torch.from_numpy(index), lengths, draws, pass_steps)


def padded_schedule(schedule: BatchSchedule, steps: int, example: int) -> dict[str, np.ndarray]:
    """Return the first `steps` batches as arrays that have the same shape for all clients.

    The arrays are index [steps, B], mask [steps, B] and, if the schedule has draws, draws
    [steps, B, D]. If the schedule has fewer batches, it is padded with `example` and mask 0.

    example: the index of one of the client's examples.
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
