"""Corrections of the code that change the results of a configuration.

A run made before a correction must not replace a run made after it, and must not be compared with
published values. So a configuration lists under `revisions` the revision number of each corrected
part, and the fingerprint includes these numbers. A part without corrections has no number, so its
runs keep their fingerprint.

When you correct a method, add a row to REVISIONS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Revision:
    """A correction of one class."""

    part: str  # dotted key of the configuration node
    name: str  # name of the class
    number: int  # from 2 on
    what: str  # the corrected behaviour
    # whether the results of a configuration have changed
    when: Callable[[Values], bool] = lambda container: True

    def concerns(self, container: Values) -> bool:
        node = value_of(container, self.part)
        target = str(node.get("_target_")) if isinstance(node, Mapping) else ""
        return target.rpartition(".")[2] == self.name and self.when(container)


def value_of(container: Values, key: str) -> Any:
    """Return the value at a dotted key, or None if the key does not exist."""
    node: Any = container
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def has(**wanted: Any) -> Callable[[Values], bool]:
    """Return a condition that is true if all these keys (with __ for a dot) have these values."""
    keys = {name.replace("__", "."): value for name, value in wanted.items()}
    return lambda container: all(value_of(container, key) == value for key, value in keys.items())


def cfed_has_changed(container: Values) -> bool:
    text = str(value_of(container, "model._target_")).endswith(".TextCNN")  # the model with dropout
    return has(algorithm__paradigm="centralized")(container) or (
        text and has(algorithm__server_distillation=True)(container)
    )


def has_statistics(container: Values) -> bool:
    """Return whether the model may have running statistics."""
    target = str(value_of(container, "model._target_"))
    without = target.endswith((".CNN", ".CifarResNet", ".LSTM", ".TextCNN"))
    return not without or value_of(container, "model.batch_norm") is True


def moon_has_changed(container: Values) -> bool:
    """Return whether late clients may compare with a model that has running statistics."""
    return has_statistics(container) and value_of(container, "participation") != 1


def balances_classes(container: Values) -> bool:
    return bool(value_of(container, "scenario.replay")) and has(
        scenario__replay_policy="class_balanced"
    )(container)


def counts_the_batch(container: Values) -> bool:
    """Return whether the model may have batch norm without running statistics.

    This holds for resnet10 and for users' models.
    """
    target = str(value_of(container, "model._target_") or "fedexp.")
    return target.endswith(".CifarResNet") or not target.startswith("fedexp.")


def has_batch_norm(container: Values) -> bool:
    """Return whether the model may have batch norm.

    LSTM and TextCNN have none, and a CNN has it only with `model.batch_norm=true`.
    """
    target = str(value_of(container, "model._target_"))
    return (
        not target.endswith((".CNN", ".LSTM", ".TextCNN"))
        or value_of(container, "model.batch_norm") is True
    )


def distils_by_the_batch(container: Values) -> bool:
    """Return whether the server may distil into a model that `counts_the_batch`."""
    distils = value_of(container, "algorithm.on_server") is not False  # an option of Flashback
    return distils and counts_the_batch(container)


def tests_untouched_clients(container: Values) -> bool:
    """Return whether personal models may be tested before all clients have participated."""
    return (
        "personal" in (value_of(container, "evaluate") or ())
        and value_of(container, "participation") != 1
    )


def reads_from_minus_one(container: Values) -> bool:
    """Return whether the model has torchvision weights that expect pixels from -1 to 1."""
    names = ("efficientnet_v2_l", "googlenet", "inception_v3")
    return (
        value_of(container, "model.name") in names
        and value_of(container, "model.weights") is not None
    )


def sends_another_model(container: Values) -> bool:
    """Return whether an analysis compares with a sent model that differs from the tested model."""
    name = str(value_of(container, "algorithm._target_")).rpartition(".")[2]
    another = name in ("LoRM", "PILoRA") or (
        name == "FedDMC" and has(algorithm__student="initial")(container)
    )
    members = value_of(container, "analysis.members")
    nodes = members if isinstance(members, list) else [value_of(container, "analysis")]
    targets = [str(node.get("_target_")) for node in nodes if isinstance(node, Mapping)]
    return another and any(
        each.endswith((".WeightDivergence", ".GradientDiversity")) for each in targets
    )


def mixes_tasks(container: Values) -> bool:
    return value_of(container, "scenario.order") == "per_client" or bool(
        value_of(container, "scenario.blur")
    )


def validates_blurred(container: Values) -> bool:
    return bool(value_of(container, "scenario.blur")) and bool(
        value_of(container, "validation.fraction")
    )


UNTOUCHED = "a client that never took part is tested with its initial part"
ORIGIN = "a validation example counts for its own task where tasks are blurred"
SINGLE = "distillation leaves out a batch of one example"
PADDING = "batch norm on the batch at hand leaves out padding"
SHARED = "class_balanced keeps examples of later tasks of a class too"
SENT = "local models are compared with the model that was sent"
LOCAL_DROPS = "local round forgetting begins in round 2"
REVISIONS: tuple[Revision, ...] = (
    Revision("algorithm", "FedCurv", 2, "the Fisher information is taken on a pass of its own"),
    Revision("algorithm", "FedALA", 2, "the search stops by the population standard deviation"),
    Revision(
        "algorithm",
        "FedDF",
        2,
        "a student is the result, never the average",
        has(algorithm__epochs_on_server=0),
    ),
    Revision(
        "algorithm",
        "CFeD",
        2,
        "a random part of the surrogate set, dropout of the student",
        cfed_has_changed,
    ),
    Revision(
        "partition",
        "Natural",
        2,
        "the public set is that of the clients alone",
        lambda container: bool(value_of(container, "public.fraction")),
    ),
    Revision("surrogate.dataset", "Caltech256", 2, "all of its images are in the surrogate set"),
    Revision("forgetting_metric", "RoundDrop", 2, LOCAL_DROPS, has(forgetting_metric__local=True)),
    Revision("forgetting_metric", "All", 2, LOCAL_DROPS),
    Revision(
        "algorithm",
        "Moon",
        2,
        "a client's first previous model has its own statistics",
        moon_has_changed,
    ),
    Revision(
        "algorithm", "TARGET", 2, "the generator is trained on the logits of the old classes alone"
    ),
    Revision(
        "algorithm",
        "FedFOMO",
        2,
        "validation examples by their numbers, an average with the first n_k",
    ),
    Revision(
        "algorithm",
        "FedAlign",
        2,
        "the narrow stage has the first channels of its input, and scale and shift",
    ),
    Revision(
        "algorithm",
        "AFFCL",
        2,
        "features of earlier tasks are of all classes that were met",
        mixes_tasks,
    ),
    Revision(
        "algorithm",
        "LANDER",
        2,
        "the server's student has a new order of images with every pass",
        lambda container: bool(value_of(container, "algorithm.student_steps")),
    ),
    Revision(
        "algorithm",
        "AFFCL",
        3,
        "replayed features train a hidden layer, not the classifier",
        lambda container: value_of(container, "algorithm.replay_trains") != "classifier",
    ),
    Revision("algorithm", "FedDF", 3, SINGLE, distils_by_the_batch),
    Revision("algorithm", "Flashback", 2, SINGLE, distils_by_the_batch),
    Revision(
        "algorithm",
        "CFeD",
        3,
        SINGLE,
        lambda container: (
            has(algorithm__server_distillation=True)(container) and counts_the_batch(container)
        ),
    ),
    Revision(
        "algorithm", "FedReg", 2, "generated images do not enter running statistics", has_statistics
    ),
    Revision(
        "algorithm", "FedKA", 2, "batch norm leaves out what fills up the anchors", has_batch_norm
    ),
    Revision("algorithm", "FedALA", 3, PADDING, counts_the_batch),
    Revision("algorithm", "FedFOMO", 3, PADDING, counts_the_batch),
    Revision(
        "partition",
        "File",
        2,
        "its numbers count the surrogate examples too",
        lambda container: bool(value_of(container, "surrogate.fraction")),
    ),
    Revision("scenario", "DomainIncremental", 2, SHARED, balances_classes),
    Revision("scenario", "Rotations", 2, SHARED, balances_classes),
    Revision(
        "scenario",
        "Rotations",
        3,
        "no validation image is trained on at another angle",
        lambda container: bool(value_of(container, "validation.fraction")),
    ),
    Revision(
        "scenario",
        "ClassIncremental",
        2,
        SHARED,
        lambda container: (
            balances_classes(container) and bool(value_of(container, "scenario.blur"))
        ),
    ),
    Revision(
        "model",
        "Torchvision",
        2,
        "images are normalised as the weights want them",
        reads_from_minus_one,
    ),
    Revision("model", "BottleneckResNet", 2, "convolutions begin as in FedAlign's code"),
    Revision("analysis", "WeightDivergence", 2, SENT, sends_another_model),
    Revision("analysis", "GradientDiversity", 2, SENT, sends_another_model),
    Revision("analysis", "SeveralAnalyses", 2, SENT, sends_another_model),
    *(
        Revision("scenario", name, 3, ORIGIN, validates_blurred)
        for name in ("ClassIncremental", "DomainIncremental")
    ),
    *(
        Revision("algorithm", name, number, UNTOUCHED, tests_untouched_clients)
        for name, number in (
            ("FedRep", 2),
            ("FedBN", 2),
            ("Ditto", 2),
            ("FedProto", 2),
            ("FedFOMO", 4),
        )
    ),
)


def latest(container: Values) -> dict[str, int]:
    """Return part -> number of its last correction, for the corrected parts of a configuration."""
    found: dict[str, int] = {}
    for revision in REVISIONS:
        if revision.concerns(container):
            found[revision.part] = max(revision.number, found.get(revision.part, 1))
    return found


def noted(container: Values) -> dict[str, int]:
    """Return part -> revision number as listed in a configuration."""
    found = container.get("revisions")
    if not isinstance(found, Mapping):
        return {}
    return {str(part): number for part, number in found.items() if isinstance(number, int)}


def outdated(container: Values) -> list[str]:
    """Return the corrections made since a run with this configuration.

    An example is `older code: FedCurv (the Fisher information ...)`. The list is empty if the run's
    revision numbers are current.
    """
    before = noted(container)
    return [
        f"older code: {revision.name} ({revision.what})"
        for revision in REVISIONS
        if revision.concerns(container) and revision.number > before.get(revision.part, 1)
    ]
