"""Choice of the clients that are tested in the middle of their local training, and when
(analysis=local_epochs)."""

from collections.abc import Sequence

import numpy as np
import torch

from fedexp.algorithms.families import epochs_of
from fedexp.engine.base import Cohort, Probe
from fedexp.metrics.analysis import LocalEpochs
from fedexp.training.simulation import Simulation


def probes_of(
    simulation: Simulation, cohort: Cohort, parts: Sequence[np.ndarray]
) -> Sequence[Probe]:
    """Return a probe for each client of the cohort, with a mark before its training and after each
    of its epochs; empty where the round is not measured. parts: the training examples of every
    client, with those that it keeps."""
    number, last = cohort.round, simulation.rounds
    due = [
        part
        for part in simulation.analysis.parts
        if isinstance(part, LocalEpochs) and part.is_due(number, last)
    ]
    if not due:
        return ()
    chosen = len(cohort.clients) if due[0].clients is None else due[0].clients
    epochs = [epochs_of(role, simulation.runtime.local) for role in cohort.roles]
    points = [
        points_of(schedule.steps, e, due[0].between)
        for schedule, e in zip(cohort.schedules, epochs, strict=True)
    ]
    room = max(map(len, points))
    probes = []
    for i, (client, own) in enumerate(zip(cohort.clients, points, strict=True)):
        marks, numbers = zip(*own, strict=True) if i < chosen else ((), ())
        probes.append(Probe(marks, numbers, torch.from_numpy(parts[client]), room))
    return probes


def points_of(steps: int, epochs: int, between: bool) -> list[tuple[int, int]]:
    """Return (local steps, epoch) before training and after each epoch, or the first and the last
    of them: all epochs have as many steps."""
    if not steps:
        return [(0, 0)]
    return [
        (steps // epochs * epoch, epoch) for epoch in range(0, epochs + 1, 1 if between else epochs)
    ]
