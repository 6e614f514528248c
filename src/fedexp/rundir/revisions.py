"""Corrections to the code that change the results of a configuration.

A run made before a correction must not be used in place of a run made after it, and must not be
compared with published values. So the key `revisions` of a configuration has the revision number of
each corrected part, and the fingerprint includes these numbers. A part without corrections has no
number, so its runs keep their fingerprint.

When you correct a method, add a row to REVISIONS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
Condition = Callable[[Values], bool]


@dataclass(frozen=True)
class Revision:
    """A correction of a class that changes the results of some configurations."""

    part: str  # dotted key of the configuration node
    name: str  # name of the class
    number: int  # from 2 on
    what: str  # the corrected behaviour
    # the correction changes the results of a configuration if all of these conditions hold
    when: tuple[Condition, ...] = ()

    def concerns(self, container: Values) -> bool:
        return class_in(container, self.part) == self.name and all(
            holds(container) for holds in self.when
        )


def value_of(container: Values, key: str) -> Any:
    """Return the value at a dotted key, or None if the key does not exist."""
    node: Any = container
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def class_in(container: Values, part: str) -> str:
    """Return the name, without the module, of the class of a configuration node."""
    return str(value_of(container, f"{part}._target_")).rpartition(".")[2]


def equals(key: str, *values: Any) -> Condition:
    """Return a condition that holds if the key has one of the values."""
    return lambda container: value_of(container, key) in values


def is_set(key: str) -> Condition:
    """Return a condition that holds unless the key is missing, null, 0 or false."""
    return lambda container: bool(value_of(container, key))


def differs(key: str, value: Any) -> Condition:
    """Return a condition that holds unless the key has the value."""
    return lambda container: value_of(container, key) != value


def cfed_changes(container: Values) -> bool:
    has_dropout = class_in(container, "model") == "TextCNN"
    distils = value_of(container, "algorithm.server_distillation") is True
    centralized = value_of(container, "algorithm.paradigm") == "centralized"
    return centralized or (has_dropout and distils)


def has_statistics(container: Values) -> bool:
    """Return whether the model may have running statistics."""
    without = ("CNN", "CifarResNet", "TextCNN")
    return class_in(container, "model") not in without or has_optional_batch_norm(container)


def has_optional_batch_norm(container: Values) -> bool:
    return value_of(container, "model.batch_norm") is True


def has_batch_norm(container: Values) -> bool:
    """Return whether the model may have batch norm."""
    without = ("CNN", "TextCNN")
    return class_in(container, "model") not in without or has_optional_batch_norm(container)


def uses_batch_statistics(container: Values) -> bool:
    """Return whether the model may have batch norm without running statistics.

    This holds for resnet10 and for users' models.
    """
    target = str(value_of(container, "model._target_") or "fedexp.")
    return target.endswith(".CifarResNet") or not target.startswith("fedexp.")


def evaluates_personal(container: Values) -> bool:
    return "personal" in (value_of(container, "evaluate") or ())


def sends_another_model(container: Values) -> bool:
    """Return whether the server may send clients a model that differs from the tested model."""
    name = class_in(container, "algorithm")
    student = value_of(container, "algorithm.student")
    return name in ("LoRM", "PILoRA") or (name == "FedDMC" and student == "initial")


def compares_with_sent(container: Values) -> bool:
    """Return whether one of several analyses compares local models with the sent model."""
    members = value_of(container, "analysis.members") or ()
    names = [class_in({"member": node}, "member") for node in members]
    return not {"WeightDivergence", "GradientDiversity"}.isdisjoint(names)


LATE_CLIENTS = differs("participation", 1)
BLURRED = is_set("scenario.blur")
VALIDATED = is_set("validation.fraction")
BALANCED = (is_set("scenario.replay"), equals("scenario.replay_policy", "class_balanced"))
DISTILLED = (
    differs("algorithm.on_server", False),
    uses_batch_statistics,
)  # Flashback has on_server
UNTOUCHED = "a client that has not participated is tested with its initial parameters"
ORIGIN = "with blurred tasks, a validation example belongs to its original task"
SINGLE = "distillation omits a batch with a single example"
PADDING = "batch norm without running statistics ignores padding"
SHARED = "class_balanced also keeps examples of a class from later tasks"
SENT = "local models are compared with the model that was sent"
LOCAL_DROPS = "local round forgetting starts in round 2"
REVISIONS: tuple[Revision, ...] = (
    Revision("algorithm", "FedCurv", 2, "the Fisher information is taken on a pass of its own"),
    Revision(
        "algorithm", "FedALA", 2, "the search for W stops by the population standard deviation"
    ),
    Revision(
        "algorithm",
        "FedDF",
        2,
        "the result is the student, never the averaged model",
        (equals("algorithm.epochs_on_server", 0),),
    ),
    Revision(
        "algorithm",
        "CFeD",
        2,
        "each client uses a random part of the surrogate set; the student uses dropout",
        (cfed_changes,),
    ),
    Revision(
        "partition",
        "Natural",
        2,
        "the public set only contains examples of the clients",
        (is_set("public.fraction"),),
    ),
    Revision("surrogate.dataset", "Caltech256", 2, "the surrogate set contains all of its images"),
    Revision(
        "forgetting_metric", "RoundDrop", 2, LOCAL_DROPS, (is_set("forgetting_metric.local"),)
    ),
    Revision("forgetting_metric", "All", 2, LOCAL_DROPS),
    Revision(
        "algorithm",
        "Moon",
        2,
        "the first previous model of a client has separate running statistics",
        (has_statistics, LATE_CLIENTS),
    ),
    Revision(
        "algorithm", "TARGET", 2, "the generator is trained only on the logits of old classes"
    ),
    Revision(
        "algorithm",
        "FedFOMO",
        2,
        "weights and validation examples stay the same when the clients' examples change",
    ),
    Revision(
        "algorithm",
        "FedAlign",
        2,
        "the narrow stage reads the first channels of its input, and has scale and shift",
    ),
    Revision("algorithm", "FedDF", 3, SINGLE, DISTILLED),
    Revision("algorithm", "Flashback", 2, SINGLE, DISTILLED),
    Revision(
        "algorithm",
        "CFeD",
        3,
        SINGLE,
        (is_set("algorithm.server_distillation"), uses_batch_statistics),
    ),
    Revision(
        "algorithm",
        "FedReg",
        2,
        "generated images do not change running statistics",
        (has_statistics,),
    ),
    Revision(
        "algorithm",
        "FedKA",
        2,
        "batch norm ignores the padding of the anchors",
        (has_batch_norm,),
    ),
    Revision("algorithm", "FedALA", 3, PADDING, (uses_batch_statistics,)),
    Revision("algorithm", "FedFOMO", 3, PADDING, (uses_batch_statistics,)),
    Revision(
        "partition",
        "File",
        2,
        "the file's indices also count surrogate examples",
        (is_set("surrogate.fraction"),),
    ),
    Revision("scenario", "DomainIncremental", 2, SHARED, BALANCED),
    Revision("scenario", "Rotations", 2, SHARED, BALANCED),
    Revision(
        "scenario",
        "Rotations",
        3,
        "no client trains on a validation image at another angle",
        (VALIDATED,),
    ),
    Revision("scenario", "ClassIncremental", 2, SHARED, (*BALANCED, BLURRED)),
    Revision(
        "model",
        "Torchvision",
        2,
        "images are normalised as the weights require",
        (
            # the weights of these models expect pixels from -1 to 1
            equals("model.name", "efficientnet_v2_l", "googlenet", "inception_v3"),
            differs("model.weights", None),
        ),
    ),
    Revision("model", "BottleneckResNet", 2, "convolutions are initialised as in FedAlign's code"),
    Revision(
        "algorithm",
        "CCVR",
        2,
        "virtual features do not depend on the signs of eigenvectors",
        (equals("algorithm.covariance", "full"),),
    ),
    Revision("analysis", "WeightDivergence", 2, SENT, (sends_another_model,)),
    Revision("analysis", "GradientDiversity", 2, SENT, (sends_another_model,)),
    Revision("analysis", "SeveralAnalyses", 2, SENT, (sends_another_model, compares_with_sent)),
    Revision("scenario", "ClassIncremental", 3, ORIGIN, (BLURRED, VALIDATED)),
    Revision("scenario", "DomainIncremental", 3, ORIGIN, (BLURRED, VALIDATED)),
    *(
        # personal models may be tested before all clients have participated
        Revision("algorithm", name, number, UNTOUCHED, (evaluates_personal, LATE_CLIENTS))
        for name, number in (
            ("FedRep", 2),
            ("FedBN", 2),
            ("Ditto", 2),
            ("FedProto", 2),
            ("FedFOMO", 4),
        )
    ),
)


def latest_revisions(container: Values) -> dict[str, int]:
    """Return a dict that maps each corrected part of a configuration to its latest revision."""
    found: dict[str, int] = {}
    for revision in REVISIONS:
        if revision.concerns(container):
            found[revision.part] = max(revision.number, found.get(revision.part, 1))
    return found


def recorded_revisions(container: Values) -> dict[str, int]:
    """Return a dict that maps parts to the revision numbers listed in a configuration."""
    found = container.get("revisions")
    if not isinstance(found, Mapping):
        return {}
    return {str(part): number for part, number in found.items() if isinstance(number, int)}


def outdated(container: Values) -> list[str]:
    """Return the corrections that were made after a run with this configuration.

    An example is `older code: FedCurv (the Fisher information ...)`. The list is empty if the run's
    revision numbers are current.
    """
    before = recorded_revisions(container)
    return [
        f"older code: {revision.name} ({revision.what})"
        for revision in REVISIONS
        if revision.concerns(container) and revision.number > before.get(revision.part, 1)
    ]
