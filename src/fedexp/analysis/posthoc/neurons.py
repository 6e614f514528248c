"""Find the class that each neuron prefers, for the models of one round (FedNTD Fig. 17)."""

from dataclasses import dataclass

import numpy as np

from fedexp.analysis.posthoc.subject import (
    Examples,
    Subject,
    models_of_round,
    round_to_show,
    subject_of,
)
from fedexp.core.errors import ConfigError
from fedexp.engine.measures import class_means
from fedexp.metrics.neurons import preferences
from fedexp.rundir.kept_models import LOCAL_HINT
from fedexp.rundir.reader import RunDirectory

MOST_CLIENTS = 20  # maximum number of clients whose models are shown


@dataclass(frozen=True)
class Preferences:
    """The classes that the neurons of the last hidden layer prefer, for each model of a round."""

    round: int
    names: tuple[str, ...]  # of the models: global before, clients, global after
    classes: np.ndarray  # int64 [models, neurons]

    @property
    def agreement(self) -> float:
        """Return the fraction of neurons that prefer the same class as in the first model.

        It is averaged over local models: alignment as in FedNTD Table 2.
        """
        return float((self.classes[1:-1] == self.classes[0]).mean())


def preferred_classes(
    run: RunDirectory,
    examples: int = 1000,
    number: int | None = None,
    subject: Subject | None = None,
) -> Preferences:
    """Return the neurons' preferred classes in a round.

    number: the round; None for the last round with kept local models. subject: the subject of that
    round, if it has already been built. Raises ConfigError if no local models are kept, or if the
    model has no fully connected hidden layer.
    """
    number = round_to_show(run) if number is None else number
    models = [] if number is None else models_of_round(run, number, MOST_CLIENTS)
    if number is None or len(models) < 3:
        raise ConfigError(
            f"{run.directory}: no local models of a round are kept with the global one before;"
            f" {LOCAL_HINT}"
        )
    subject = subject or subject_of(run, number, examples=Examples(most=examples))
    if not hasattr(subject.runtime.net.module, "hidden_activations"):
        raise ConfigError(
            f"{run.directory}: its model has no fully connected hidden layer whose neurons could be"
            " compared; model=cnn and model=cnn_3fc have"
        )
    found = []
    for each in models:
        means = class_means(
            subject.runtime, {"params": subject.use(each.kept), "buffers": each.kept.buffers}
        )
        found.append(preferences(means[-1]))
    return Preferences(number, tuple(each.name for each in models), np.stack(found))
