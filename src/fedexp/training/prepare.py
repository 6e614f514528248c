"""Prepare a run from its configuration: load and partition the data, and build the model."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from fedexp.algorithms.base import FedAvg, overrides
from fedexp.algorithms.interfaces import Federation
from fedexp.config.build import Built
from fedexp.config.cohorts import Clients, Rounds, Uniform, check_plan
from fedexp.config.settings import OWN, PERSONAL
from fedexp.core.errors import ConfigError
from fedexp.core.rng import seeded, torch_seed
from fedexp.data.partition import IID
from fedexp.data.types import Data
from fedexp.engine.base import ClientRuntime
from fedexp.engine.batch_norm import has_batch_norm
from fedexp.engine.hardware import make_engine
from fedexp.engine.network import LAYOUT, FunctionalNetwork, require_memory, trainable
from fedexp.engine.resolved import Resolved
from fedexp.engine.vectorised.support import find_obstacle
from fedexp.metrics.domains import ByDomain
from fedexp.metrics.forgetting_metric import BackwardTransfer, ForgettingMetric, Metrics, RoundDrop
from fedexp.metrics.own_test import OwnTest
from fedexp.metrics.personal import Personal
from fedexp.models.own import pass_normalisation
from fedexp.training.checks import check_config, check_kept, shares_source
from fedexp.training.division import divide, load_data
from fedexp.training.model_fit import (
    check_frozen,
    check_parts,
    check_reads,
    count_left_out,
    first_inputs,
    has_fixed_features,
    model_file_errors,
    with_features,
)
from fedexp.training.simulation import Simulation, Stage, first_server_state

log = logging.getLogger("fedexp")


def prepare(built: Built, share: int | None = None, before: str | None = None) -> Simulation:
    """Load and assemble all parts of a run.

    share: the number of cores that the run may use. None: all cores.
    before: the precision that a resumed run started with. None for a new run.

    Raises ConfigError if the settings are incompatible with each other or with the data.
    """
    built = centralized_config(built)
    if built.algorithm.paradigm == "centralized":
        log.info(
            "algorithm.paradigm=centralized: one client holds all training data; partition and"
            " participation have no effect"
        )
    warn_of_unused(built)
    if before is not None:
        built = replace(built, hardware=built.hardware.resumed(before))
    metrics = metrics_of(built)
    check_config(built, metrics)
    # chosen as if the model could be vectorised; for other models, `fit_engine` replaces the engine
    hardware = built.hardware.resolve(built.settings.cohort_size, share)
    hardware.apply()
    data, stages = divide(built)
    check_copies(built, data, stages)
    first, clients = stages[0].federation, built.settings.num_clients
    tasks = len(first.tasks)
    rounds = built.scenario.rounds_per_task * tasks
    check_kept(built.settings, rounds)
    cohorts = plan_cohorts(built, rounds, first)
    module, algorithm = make_model(built, data, first)
    inputs = first_inputs(data, torch.float32)
    fixed = not algorithm.needs_inputs and has_fixed_features(module, inputs)
    hardware = fit_engine(built, hardware, module, data)
    module = module.to(hardware.device, hardware.dtype)
    module = module.to(memory_format=LAYOUT)  # type: ignore[call-overload]
    # Batches are padded to the batch size, so limit it to the number of training examples. With
    # `local.drop_last`, it stays larger, because a batch of all of them would be complete.
    given = built.local.batch_size
    most = len(data.y_train) + (built.local.drop_last and algorithm.skips_batches)
    local = replace(built.local, batch_size=min(given, most))
    built = replace(built, algorithm=algorithm, local=local)
    check_frozen(module)
    initial = {name: parameter.detach().clone() for name, parameter in trainable(module).items()}
    runtime = runtime_of(built, module, data, first, hardware, fixed)
    mixes_examples = built.model.mixes_examples and has_batch_norm(module)
    federations = [each.federation for each in stages]
    left_out: dict[str, int] = {}
    if algorithm.skips_batches and (mixes_examples or local.drop_last):
        left_out = count_left_out(algorithm, federations, local, mixes_examples, given)
    simulation = Simulation(
        settings=built.settings,
        seeds=built.seeds,
        algorithm=algorithm,
        stages=tuple(stages),
        rounds_per_task=built.scenario.rounds_per_task,
        hardware=hardware,
        runtime=runtime,
        engine=make_engine(hardware),
        metrics=metrics,
        initial=first_server_state(algorithm, initial, first, built.seeds.training)["params"],
        initial_buffers=runtime.net.buffers(),
        mixes_examples=mixes_examples,
        cohorts=cohorts,
        participation=built.cohorts,
        server_optimizer=built.server,
        local_evaluation=built.local_evaluation,
        task_orders=built.scenario.orders(clients, tasks, built.seeds.partition),
        left_out=left_out,
    )
    for observer in (built.forgetting_metric, built.analysis, built.callback):
        for each in observer:
            each.check_run(simulation)
    return simulation


def check_copies(built: Built, data: Data, stages: Sequence[Stage]) -> None:
    """Log how many test examples are equal to examples that clients train on, if there are any.

    Raises ConfigError if the surrogate set comes from a data set of the run, but contains test
    examples, because other options divide it into training and test examples.
    """
    parts = [part for stage in stages for part in stage.federation.parts]
    total = f"{len(data.y_test):,}"
    if copies := data.count_copies(np.unique(np.concatenate(parts))):
        log.info(
            "dataset=%s: %s of the %s test examples are equal to training examples",
            *(data.name, f"{copies:,}", total),
        )
    surrogate = built.surrogate.dataset
    if surrogate is not None and shares_source(built, surrogate):
        copied = data.find_copies(stages[0].federation.unlabelled)
        # an image that a data set has in both parts is no sign of another division
        copied &= ~data.find_copies(np.flatnonzero(data.y_train.numpy() >= 0))
        if copies := int(copied.sum()):
            raise ConfigError(
                f"surrogate.dataset={surrogate.name}: {copies:,} of the {total} test examples are"
                " surrogate examples, because the surrogate set is divided into training and test"
                " examples by other options than the data set of the run; give surrogate.options"
                " the same values, or use surrogate.fraction=0.1, which withholds a part of the"
                " training data"
            )


def warn_of_unused(built: Built) -> None:
    """Warn if momentum or weight decay is set, but the algorithm takes plain SGD steps."""
    algorithm, local = built.algorithm, built.local
    if not algorithm.plain_sgd or local.optimizer != "sgd":
        return
    values = {"local.momentum": local.momentum, "local.weight_decay": local.weight_decay}
    unused = ", ".join(f"{key}={value:g}" for key, value in values.items() if value)
    if unused:
        name = type(algorithm).__name__
        log.warning("%s has no effect: %s takes plain SGD steps", unused, name)


def plan_cohorts(built: Built, rounds: int, federation: Federation) -> Rounds | None:
    """Return the cohorts of all rounds, or None if they are drawn in each round."""
    size, seed = built.settings.cohort_size, built.seeds.sampling
    clients = Clients(rounds, size, federation.counts, seed)
    cohorts = built.cohorts.plan(clients)
    if cohorts is not None:
        cohorts = check_plan(f"cohorts: plan of {type(built.cohorts).__name__}", cohorts, clients)
        sizes = [len(cohort) for cohort in cohorts.values()]
        times = np.bincount(np.concatenate([*cohorts.values()]), minlength=federation.num_clients)
        log.info(
            "cohorts: %d to %d (median %g) clients in a round; a client takes part in %d to %d"
            " (median %g) of the %d rounds",
            *(min(sizes), max(sizes), np.median(sizes)),
            *(times.min(), times.max(), np.median(times), rounds),
        )
    return cohorts


def fit_engine(built: Built, hardware: Resolved, module: nn.Module, data: Data) -> Resolved:
    """Return the hardware. If the vectorised engine cannot train the clients, replace the engine.

    module: the network of the model.
    """
    model, algorithm, asked = built.model, built.algorithm, built.hardware
    if not hardware.vectorises or (model.vectorises and not algorithm.plain):
        return hardware
    obstacle: str | None = f"{type(model).__name__} has vectorises = False"
    if algorithm.plain:
        obstacle = f"each client of {type(algorithm).__name__} trains a module of its own"
    elif model.vectorises is None:
        obstacle = find_obstacle(module, first_inputs(data, torch.float32))
    if obstacle is None:
        return hardware
    changed = asked.without_vmap(hardware, obstacle)
    log.info(
        "clients train one after another, because the vectorised engine does not support this"
        " run: %s",
        obstacle,
    )
    return changed


def make_model(built: Built, data: Data, federation: Federation) -> tuple[nn.Module, FedAvg]:
    """Return the initial model and the algorithm.

    Some algorithms adapt the model, for example by adding a head. These algorithms are then fitted
    to the adapted model.
    """
    model, algorithm = built.model, built.algorithm

    def build() -> nn.Module:
        return model.build(data.shape, data.num_classes)

    require_memory(lambda: algorithm.adapt(build(), federation))
    with model_file_errors(model), seeded(torch_seed(built.seeds.training, "initial model")):
        module = build()
        check_parts(module, algorithm)
        pass_normalisation(module, data)
        module = algorithm.adapt(module, federation)
    return module, algorithm.fitted(module)


def runtime_of(
    built: Built,
    module: nn.Module,
    data: Data,
    federation: Federation,
    hardware: Resolved,
    fixed: bool,
) -> ClientRuntime:
    """Return the runtime that trains and tests all clients.

    fixed: whether the features of an input never change, so that they may be stored.
    """
    dataset = built.dataset
    heads = built.algorithm.heads(federation.tasks)
    # The augmentation of text draws the keys for dropout, which are always needed.
    augments = dataset.augmentation.active and (built.settings.augment or dataset.kind == "text")
    runtime = ClientRuntime(
        net=FunctionalNetwork(module, hardware.precision),
        data=data.to(hardware.device),
        augmentation=dataset.augmentation if augments else None,
        local=built.local,
        dtype=hardware.dtype,
        heads=None if heads is None else torch.from_numpy(heads).to(hardware.device),
        load=partial(load_data, built),
        views=built.views,
        seed=built.seeds.training,
    )
    check_reads(built.model, runtime)
    return with_features(runtime) if fixed and not augments else runtime


def metrics_of(built: Built) -> Metrics:
    """Return the metrics of the run.

    These are the metrics that every run computes, those of the group `forgetting_metric`, the tests
    that `evaluate` asks for, and those of domains if the data set has any.
    """
    chosen: list[ForgettingMetric] = [
        BackwardTransfer(),
        RoundDrop(local=False),
        *built.forgetting_metric,
    ]
    if built.dataset.has_domains and built.scenario.name == "none":
        chosen.append(ByDomain())
    own, tests_clients = overrides(built.algorithm, "personal_model"), built.algorithm.tests_clients
    if PERSONAL in built.settings.evaluate:
        local = any(metric.needs_local for metric in built.forgetting_metric)
        chosen.append(Personal(own=own, local=local, tests_clients=tests_clients))
    if OWN in built.settings.evaluate:
        chosen.append(OwnTest(personal=own, tests_clients=tests_clients))
    return Metrics(members=chosen)


def centralized_config(built: Built) -> Built:
    """Return the configuration of a centralized run, with one client that has all training data.

    If `algorithm.paradigm` is not `centralized`, the configuration is returned unchanged.
    """
    if built.algorithm.paradigm != "centralized":
        return built
    if built.cohorts != Uniform(draw=getattr(built.cohorts, "draw", "seed")):
        raise ConfigError(
            "cohorts: must be uniform, with cohorts.path=null, cohorts.size=fixed,"
            " cohorts.dropout=0 and cohorts.stragglers=0, if algorithm.paradigm=centralized, which"
            " has only one client"
        )
    settings = replace(built.settings, num_clients=1, participation=1.0)
    surrogate = replace(built.surrogate, shards=1, server_shards=1, total_shards=1)
    return replace(built, settings=settings, surrogate=surrogate, partition=IID())
