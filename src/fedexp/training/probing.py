"""Choice of the clients that are tested in the middle of their local training, and when (analysis=local_epochs)."""

from collections.abc import Sequence

import torch

from fedexp.engine.base import Cohort, Probe
from fedexp.metrics.analysis import LocalEpochs
from fedexp.training.simulation import Simulation


def probes_of(simulation: Simulation, cohort: Cohort) -> Sequence[Probe]:
    """Return a probe for each client of the cohort, with a mark before its training and after each of its epochs; empty
    where the round is not measured."""
    number, last = cohort.round, simulation.rounds
    due = [part for part in simulation.analysis.parts if isinstance(part, LocalEpochs) and part.is_due(number, last)]
    if not due:
        return ()
    chosen = len(cohort.clients) if due[0].clients is None else due[0].clients
    parts = simulation.stage_of(number).federation.parts
    pairs = zip(cohort.roles, cohort.schedules, strict=True)
    marks = [marks_of(schedule.steps, role.epochs(simulation.bench.local)) for role, schedule in pairs]
    room = max(map(len, marks))
    return [
        Probe(own if i < chosen else (), torch.from_numpy(parts[client]), room)
        for i, (client, own) in enumerate(zip(cohort.clients, marks, strict=True))
    ]


def marks_of(steps: int, epochs: int) -> tuple[int, ...]:
    """Return the steps after each epoch and 0, which stands before the first: all epochs have as many steps."""
    return tuple(range(0, steps + 1, steps // epochs)) if steps else (0,)
