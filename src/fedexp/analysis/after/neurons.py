"""The class that each neuron prefers in the models of one round (FedNTD Fig. 17)."""

from dataclasses import dataclass

import numpy as np

from fedexp.analysis.after.subject import (
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

MOST_CLIENTS = 20  # whose models are shown


@dataclass(frozen=True)
class Preferences:
    """Preferred classes of the neurons of the last hidden layer, in each model of a round."""

    round: int
    names: tuple[str, ...]  # of the models: global before, clients, global after
    classes: np.ndarray  # int64 [models, neurons]

    @property
    def agreement(self) -> float:
        """Return the share of neurons whose class is that of the first model, mean over the local
        models: alignment as in FedNTD Table 2."""
        return float((self.classes[1:-1] == self.classes[0]).mean())


def preferred_classes(
    run: RunDirectory,
    examples: int = 1000,
    number: int | None = None,
    subject: Subject | None = None,
) -> Preferences:
    """Return the preferences in a round (None: the last whose local models are kept). subject: of
    that round, where it is there already. Raises ConfigError where no local model is kept or the
    model has no such neurons."""
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
