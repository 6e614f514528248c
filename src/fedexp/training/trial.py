"""A trial of the local step of an algorithm, which may be a user's, before a run starts.

The vectorised engine fills short batches with rows that are not examples (`Batch.mask`). An
objective that counts or averages them gives other results than on the other engines, without an
error.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import FedAvg, step_hooks
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params
from fedexp.engine.base import ClientRuntime, Cohort, Shared
from fedexp.engine.schedule import BatchSchedule
from fedexp.engine.vectorised.clients import ClientStack
from fedexp.engine.vectorised.graphs import run_steps
from fedexp.training.exchange import Exchange, broadcast, sample
from fedexp.training.simulation import Simulation
from fedexp.training.state import State

log = logging.getLogger("fedexp")
# two steps: at the received model, a distance to it and its gradient are zero
STEPS, ROWS, PADDING, LR = 2, 3, 2, 0.1
# largest relative difference of the steps by precision: batches of another size round otherwise
TOLERANCE: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-3}
COARSE = 0.05  # bf16 and tf32


def check_padding(simulation: Simulation, state: State) -> None:
    """Raise ConfigError if two local steps of a client depend on the rows that pad its batches.

    state: the state from which the run continues. It is not changed.

    A trial that fails for another reason decides nothing: then the round itself says what is wrong.
    """
    number, algorithm = state.round + 1, simulation.algorithm
    stage = simulation.stage_of(number)
    exchange = algorithm.exchanges(stage.federation)[0]
    client = max(sample(simulation, number), key=lambda each: len(stage.federation.parts[each]))
    try:
        simulation.prepared.clear()
        cohort = Exchange(simulation, exchange, state.server, state.clients, number).assemble(
            [client]
        )
        role, schedule = cohort.roles[0], cohort.schedules[0]
        rows = min(ROWS, schedule.index.shape[1] - 1, *schedule.lengths[:1].tolist())
        if not step_hooks(role) or not schedule.steps or rows < 1:
            return
        sent = broadcast(exchange, state.server)
        shared = Shared(role, plain(simulation), sent, LR)
        shared.runtime.net.set_buffers(sent["buffers"])
        alone = without_kept(cohort)
        bare, padded = (
            result_of(shared, alone, short(schedule, rows, extra)) for extra in (0, PADDING)
        )
    except ConfigError:
        raise
    except Exception:
        log.debug("no trial of the padding", exc_info=True)
        return
    require_same(simulation, role, bare, padded)


def plain(simulation: Simulation) -> ClientRuntime:
    """Return the runtime with plain SGD, whose step is the gradient."""
    runtime = simulation.runtime
    given = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "keep_optimizer": False}
    local = replace(runtime.local, **given)  # type: ignore[arg-type]
    return replace(runtime, local=local)


def without_kept(cohort: Cohort) -> Cohort:
    """Return the cohort without kept states of the optimizer."""
    return replace(cohort, states=[optimizers.split_state(each)[0] for each in cohort.states])


def short(schedule: BatchSchedule, rows: int, padding: int) -> BatchSchedule:
    """Return a schedule of STEPS batches with the first examples of the schedule.

    The padding is further examples of the client.
    """
    chosen = torch.arange(rows + padding) % schedule.index.shape[1]
    draws = schedule.draws
    return BatchSchedule(
        index=schedule.index[:1, chosen].repeat(STEPS, 1),
        lengths=np.full(STEPS, rows),
        draws=None if draws is None else draws[:1, chosen].repeat(STEPS, 1, 1),
        pass_steps=schedule.pass_steps,
    )


def result_of(shared: Shared, alone: Cohort, schedule: BatchSchedule) -> tuple[Params, Tensor]:
    """Return the change of a client's parameters in the batches of a schedule, and its loss."""
    clients = ClientStack(shared, replace(alone, schedules=[schedule]))
    before = tree.map(torch.clone, clients.frame.params)
    run_steps(clients, None)
    return tree.subtract(clients.frame.params, before), clients.frame.losses / STEPS


def require_same(
    simulation: Simulation,
    role: FedAvg,
    bare: tuple[Params, Tensor],
    padded: tuple[Params, Tensor],
) -> None:
    """Raise ConfigError if the results with and without padding differ."""
    (step, loss), (other, other_loss) = bare, padded
    allowed = TOLERANCE.get(simulation.hardware.precision, COARSE)
    moved, apart = (tree.dot(each, each).sqrt() for each in (step, tree.subtract(step, other)))
    same = apart <= allowed * moved and (loss - other_loss).abs() <= allowed * loss.abs()
    if not same and bool((moved + apart + loss).isfinite()):
        raise ConfigError(
            f"algorithm: the loss of {type(role).__name__} ({step_hooks(role)}) depends on rows"
            f" that only pad a batch: it is {float(loss):.4g}, and {float(other_loss):.4g} with"
            f" {PADDING} more rows whose Batch.mask is 0. Exclude them, for example by"
            " masked_mean(values, batch.mask), or select hardware.engine=sequential, which does"
            " not pad"
        )
