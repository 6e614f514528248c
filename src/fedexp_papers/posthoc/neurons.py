"""Find the class that each neuron prefers in the models of one round (FedNTD Fig. 17)."""

from dataclasses import dataclass

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.rundir.kept_models import LOCAL_HINT
from fedexp_papers.analyses.neurons import class_means, preferences
from fedexp_papers.posthoc.subject import Subject, model_name, models_of_round

MOST_CLIENTS = 20  # maximum number of clients whose models are shown


@dataclass(frozen=True)
class Preferences:
    """The classes that the neurons of the last hidden layer prefer in each model of a round."""

    names: list[str]  # names of the models: global before, clients, global after
    classes: np.ndarray  # int64 [models, neurons]

    @property
    def agreement(self) -> float:
        """Return the fraction of neurons that prefer the same class as in the first model.

        The fraction is averaged over the local models. This is the alignment in FedNTD Table 2.
        """
        return float((self.classes[1:-1] == self.classes[0]).mean())


def preferred_classes(subject: Subject) -> Preferences:
    """Return the neurons' preferred classes in the models of the subject's round.

    Raises ConfigError if no local models were saved, or if the model has no fully connected hidden
    layer.
    """
    folder = subject.run.directory
    models = models_of_round(subject.run, subject.model.round, MOST_CLIENTS)
    if len(models) < 3:
        raise ConfigError(
            f"{folder}: the local models from round {subject.model.round} and the global model from"
            f" before this round were not saved; {LOCAL_HINT}"
        )
    if not hasattr(subject.runtime.net.module, "hidden_activations"):
        raise ConfigError(
            f"{folder}: the model has no fully connected hidden layer; model=cnn and model=cnn_3fc"
            " have one"
        )
    found = []
    for model in models:
        means = class_means(
            subject.runtime, {"params": subject.load(model), "buffers": model.buffers}
        )
        found.append(preferences(means[-1]))
    return Preferences([model_name(model) for model in models], np.stack(found))
