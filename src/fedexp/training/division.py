"""Load the data and divide the examples among the server and the clients for each task."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from fedexp.algorithms.interfaces import Federation
from fedexp.config.build import Built
from fedexp.core.errors import ConfigError
from fedexp.core.rng import generator_for, seeded, torch_seed
from fedexp.data.changes import reduce_classes
from fedexp.data.held_out import Validation
from fedexp.data.partition import NO_EXAMPLES, Natural
from fedexp.data.partitioned import Partition
from fedexp.data.surrogate import SurrogateShards
from fedexp.data.tasks import Scenario, TaskSequence
from fedexp.data.types import Data, Task
from fedexp.training.simulation import Stage


def divide(built: Built) -> tuple[Data, list[Stage]]:
    """Load the data, and return them with the stages of the run."""
    seed, scenario = built.seeds.partition, built.scenario
    sequence = scenario.sequence(built.dataset, generator_for(seed, "tasks"))
    require_classes(sequence.data)
    tasks, held = hold_out_from_all_tasks(built, sequence)
    # each example's task before the scenario mixes the tasks
    origin = np.zeros(len(sequence.data.y_train), np.int64)
    for number, task in enumerate(sequence.tasks):
        origin[task.train] = number
    tasks = scenario.mix(tasks, seed)
    data, tasks, unlabelled = built.surrogate.attach(
        sequence.data, tasks, generator_for(seed, "surrogate split")
    )
    shards = SurrogateShards((), unlabelled)
    if len(unlabelled):
        rng = generator_for(seed, "surrogate")
        shards = built.surrogate.draw_shards(unlabelled, built.settings.num_clients, rng)
    parts = []
    for number, task in enumerate(tasks):
        # the first task uses the same random numbers as a run without tasks
        key = (number,) if number else ()
        partition = make_task_partition(built, data, task, key, held=held[number])
        federation = Federation(
            parts=partition.parts,
            counts=partition.counts,
            labels=data.y_train.numpy(),
            shared=draw_shared_examples(
                np.setdiff1d(task.train, np.union1d(partition.validation, partition.test)),
                data,
                generator_for(seed, "shared", *key),
            ),
            weighting=built.settings.weighting,
            task=number,
            tasks=tuple(each.classes for each in tasks),
            surrogate=shards.clients,
            unlabelled=unlabelled,
        )
        first_round = 1 + number * scenario.rounds_per_task
        parts.append(Stage(first_round, partition, federation, shards.server))
    partitions = [part.partition for part in parts]
    parts = add_replayed_examples(scenario, apply_task_orders(built, parts), seed)
    parts += scheduled_changes(built, data, tasks[0], parts[0])
    data = add_client_tests(built, data, partitions[0])
    return add_validation_set(built, data, partitions, origin), parts


def load_data(built: Built) -> Data:
    return divide(built)[0]


def load_checksum(built: Built) -> str:
    """Load the data, and return the checksum that `divide(built)` gives them."""
    seed = built.seeds.partition
    sequence = built.scenario.sequence(built.dataset, generator_for(seed, "tasks"))
    rng = generator_for(seed, "surrogate split")
    return built.surrogate.attach(sequence.data, sequence.tasks, rng)[0].checksum


def add_client_tests(built: Built, data: Data, partition: Partition) -> Data:
    """Return the data with the client of each test example, if the clients have test examples.

    These are examples that clients hold out, or those of natural clients.
    """
    if built.holds_out_test:
        test = partition.test
        owners = partition.clients[test]
        return data.with_test_from_training(torch.from_numpy(test), torch.from_numpy(owners))
    is_natural = isinstance(built.partition, Natural) and built.scenario.name == "none"
    if not is_natural or data.owners is None or data.test_owners is None:
        return data
    clients = {data.owners[part[0]]: client for client, part in enumerate(partition.parts)}
    of_test = [clients.get(owner, -1) for owner in data.test_owners]
    return replace(data, test_clients=torch.tensor(of_test))


def require_classes(data: Data) -> None:
    """Raise ConfigError if there is only one class, since every prediction would be correct."""
    if data.num_classes < 2:
        raise ConfigError(
            f"dataset: {data.name} has only one class ({', '.join(data.classes)}), but"
            " classification needs two. For images in folders, set dataset.root to the folder that"
            " contains the folders of the classes or of the splits"
        )


def hold_out_from_all_tasks(
    built: Built, sequence: TaskSequence
) -> tuple[Sequence[Task], Sequence[np.ndarray | None]]:
    """Hold out the same validation examples from all tasks if the tasks share their examples.

    If each task had separate validation examples, a client could train on the form that a
    validation example has in another task. The validation set of the data set itself, which has
    one task, is also held out.

    Returns the tasks without the validation examples, and the validation examples of each task. If
    the tasks do not share their examples, the tasks are unchanged and their validation examples are
    None, because `make_task_partition` draws validation examples for each task separately.
    """
    tasks = sequence.tasks
    if sequence.data.validation is not None:
        chosen = sequence.data.validation.numpy()
    elif built.validation.fraction and built.scenario.repeats_examples:
        rng = generator_for(built.seeds.partition, "validation")
        chosen = built.validation.choose(len(tasks[0].train), rng)
    else:
        return tasks, [None] * len(tasks)
    rest = [replace(task, train=np.delete(task.train, chosen)) for task in tasks]
    return rest, [task.train[chosen] for task in tasks]


def apply_task_orders(built: Built, parts: list[Stage]) -> list[Stage]:
    """Return the stages if each client learns the tasks in a different order.

    If all clients learn the tasks in the same order, return the stages unchanged.

    parts: the stage of each task.
    """
    clients, seed = built.settings.num_clients, built.seeds.partition
    orders = built.scenario.orders(clients, len(parts), seed)
    if orders is None:
        return parts
    federation = parts[0].federation
    # Combine the shared examples of all tasks, because clients may learn any task at any stage.
    known = np.max([part.federation.shared for part in parts], axis=0)
    made = []
    for part, tasks in zip(parts, orders.T, strict=True):  # each client's task in this stage
        rows = [parts[task].partition.parts[client] for client, task in enumerate(tasks)]
        partition = part.partition.with_parts(rows, federation.labels, federation.num_classes)
        made.append(part.with_partition(partition).with_federation(shared=known))
    return made


def add_replayed_examples(scenario: Scenario, parts: list[Stage], seed: int) -> list[Stage]:
    """Add the examples of earlier tasks that clients replay to their training examples.

    Only the federation of each stage changes: the partition still contains only the examples of
    the new task.
    """
    labels, classes = parts[0].federation.labels, parts[0].federation.num_classes
    own = [part.partition.parts for part in parts]
    replayed = scenario.replayed(own, labels, seed)
    if replayed is own:
        return parts
    made = []
    for part, rows in zip(parts, replayed, strict=True):
        counts = np.stack([np.bincount(labels[row], minlength=classes) for row in rows])
        made.append(part.with_federation(parts=tuple(rows), counts=counts.astype(np.int64)))
    return made


def add_validation_set(
    built: Built, data: Data, partitions: Sequence[Partition], origin: np.ndarray
) -> Data:
    """Return the data with a validation set that joins the validation examples of all tasks.

    partitions: the partition of each task.
    origin: int [N], the task that each training example belonged to before the tasks were mixed.

    Raises ConfigError if a task has no validation examples.
    """
    numbers = np.concatenate([partition.validation for partition in partitions])
    if not len(numbers):
        return data
    tasks = origin[numbers]
    if missing := set(range(len(partitions))) - set(tasks.tolist()):
        raise ConfigError(
            f"validation.fraction: selects no examples from task {min(missing) + 1}; use a larger"
            " fraction"
        )
    of_task = None if data.test_tasks is None else torch.from_numpy(tasks)
    of_client = None
    if built.validation.per_client:
        of_client = torch.from_numpy(partitions[0].clients[numbers])
    return replace(
        data,
        validation=torch.from_numpy(numbers),
        validation_tasks=of_task,
        validation_clients=of_client,
    )


def make_task_partition(
    built: Built,
    data: Data,
    task: Task,
    key: tuple[int, ...],
    name: str = "",
    held: np.ndarray | None = None,
) -> Partition:
    """Return the partition of a task's examples.

    The partitioner receives only the examples that clients may have, with their classes renumbered
    from 0.

    key: selects the random numbers: the number of the task, or an empty tuple for the first task.
    name: a suffix that selects different random numbers for later partitions of the same task.
    held: the task's validation examples if they have already been drawn. They are not in `task`.
    """
    seed, settings, validation = built.seeds.partition, built.settings, built.validation
    partitioner, rng = built.partition, generator_for(seed, f"partition{name}", *key)
    every_label, numbers = data.y_train.numpy(), task.train
    owners = None if data.owners is None else data.owners[numbers]
    kept = partitioner.choose_examples(settings.num_clients, rng, owners)
    if kept is not None:
        numbers = numbers[kept]
    validated = NO_EXAMPLES if held is None else held
    if validation.fraction and not validation.per_client and held is None:
        chosen = validation.choose(len(numbers), generator_for(seed, "validation", *key))
        validated, numbers = numbers[chosen], np.delete(numbers, chosen)
    # If the scenario mixes the tasks, a task also has examples of other tasks' classes.
    classes = np.union1d(task.classes, np.unique(every_label[numbers]))
    labels = np.searchsorted(classes, every_label)
    public = draw_public(built, labels[numbers], len(classes), key)
    public, allowed = numbers[public], np.delete(numbers, public)
    parts, test, info = deal(built, data, allowed, public, labels, len(classes), rng, key)
    clients = np.full(len(every_label), -1, np.int64)
    for client, own in chain(enumerate(parts), enumerate(test)):
        clients[own] = client
    if validation.fraction and validation.per_client:
        validated = hold_out_per_client(validation, parts, seed, key)
        parts = [np.setdiff1d(part, validated) for part in parts]
    if validation.fraction and not len(validated):
        raise ConfigError(
            f"validation.fraction={validation.fraction}: selects none of the {len(numbers)}"
            " training examples; use a larger fraction"
        )
    if data.domains:
        info["domain_names"] = list(data.domains)
    tested = np.sort(np.concatenate(test))
    if unused := len(np.setdiff1d(task.train, np.concatenate([*parts, public, validated, tested]))):
        info["unused"] = unused
    held_out = {"public": public, "validation": np.sort(validated), "test": tested}
    made = Partition.build(parts, every_label, data.num_classes, info, **held_out)
    return replace(made, clients=clients)


def deal(
    built: Built,
    data: Data,
    allowed: np.ndarray,
    public: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    rng: np.random.Generator,
    key: tuple[int, ...],
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, Any]]:
    """Return each client's training examples and test examples, and facts about both.

    allowed: the examples that clients may have. A partition with global indices is checked instead:
    none of its examples may be public or a surrogate example. labels: of all training examples,
    from 0 to num_classes - 1. key: as in `make_task_partition`, for a partition that draws from
    global generators.
    """
    partitioner, settings = built.partition, built.settings
    dealt_from = np.arange(len(labels))
    owners = data.train_domains if partitioner.by_domain else data.owners
    if not partitioner.has_global_indices:
        dealt_from = allowed
        owners = None if owners is None else owners[allowed]
    with seeded(torch_seed(built.seeds.partition, "assign", *key)):
        parts, test, info = partitioner.deal(
            labels[dealt_from],
            settings.num_clients,
            rng,
            owners,
            num_classes=num_classes,
            test_fraction=settings.test_per_client,
        )
    parts, test = ([dealt_from[part] for part in each] for each in (parts, test))
    if partitioner.has_global_indices:
        surrogate = np.flatnonzero(data.y_train.numpy() < 0)
        for each in (parts, test):
            reject_examples(each, public, "in the public set")
            reject_examples(each, surrogate, "a surrogate example")
    return parts, test, info


def reject_examples(parts: Sequence[np.ndarray], forbidden: np.ndarray, what: str) -> None:
    """Raise ConfigError if a client has an example that clients must not have.

    parts: each client's examples. forbidden: indices. what: description of these, for messages.
    """
    for client, part in enumerate(parts):
        if len(wrong := np.intersect1d(part, forbidden)):
            raise ConfigError(f"partition: client {client} has example {wrong[0]}, which is {what}")


def draw_public(
    built: Built, labels: np.ndarray, num_classes: int, key: tuple[int, ...]
) -> np.ndarray:
    """Draw the public set, and return the indices of its examples in `labels`.

    Raises ConfigError if it is empty or smaller than the algorithm needs.
    """
    fraction, needed = built.public.fraction, max(built.algorithm.needs_public, 1)
    rng = generator_for(built.seeds.partition, "public", *key)
    chosen = built.public.split(labels, num_classes, rng)
    if fraction and len(chosen) < needed:
        raise ConfigError(
            f"public.fraction={fraction}: selects {len(chosen)} of the {len(labels)} training"
            f" examples, but {type(built.algorithm).__name__} with these options needs at least"
            f" {needed}"
        )
    return chosen


def hold_out_per_client(
    validation: Validation, parts: Sequence[np.ndarray], seed: int, key: tuple[int, ...]
) -> np.ndarray:
    """Return the indices of the validation examples that are held out from each client."""
    chosen = [
        part[validation.choose(len(part), generator_for(seed, "validation", *key, client))]
        for client, part in enumerate(parts)
    ]
    return np.concatenate(chosen)


def draw_shared_examples(numbers: np.ndarray, data: Data, rng: np.random.Generator) -> np.ndarray:
    """Draw FedKA's shared set: one random training example of each class.

    numbers: the indices of the training examples to draw from.

    Returns the index of the example for each class, int64 [C]. The value is -1 for a class without
    examples.
    """
    labels = data.y_train.numpy()[numbers]
    chosen = np.full(data.num_classes, -1, dtype=np.int64)
    for c in range(data.num_classes):
        examples = numbers[labels == c]
        if len(examples):
            chosen[c] = rng.choice(examples)
    return chosen


def scheduled_changes(built: Built, data: Data, task: Task, first: Stage) -> Iterator[Stage]:
    """Yield the stages after the scheduled changes of the data, which need a run without tasks.

    first: the stage at the start of the run.
    """
    schedule, labels, seed = built.schedule, first.federation.labels, built.seeds.partition
    drawn = {0: first.partition}  # the first round of each partition -> the partition
    for number in schedule.rounds:
        new = schedule.partition_at(number)
        since = new.round if new else 0
        if new and since not in drawn:
            changed = replace(built, partition=new.partition)
            drawn[since] = make_task_partition(changed, data, task, (), f" from round {since}")
        partition = drawn[since]
        if shares := schedule.shares_at(number):
            clients, classes = schedule.clients, data.num_classes
            partition = reduce_classes(partition, shares, clients, labels, classes, seed)
        partition = replace(partition, info=partition.info | {"from_round": number})
        yield replace(first, first_round=number).with_partition(partition)
