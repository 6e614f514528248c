"""Local only: every client trains alone during the whole run, as a lower reference.

Clients start from the same initial model and exchange nothing. Each client's model is tested on the
whole test set, and the reported accuracies are means over all clients. `evaluate=[global,personal]`
also tests each model on its client's label distribution. F and the round forgetting are those of
the mean class accuracies over all clients, not means of the clients' forgetting. With
participation=1, all clients train in every round. The optimizer state is reset in every round, as
in FedAvg.

No client uses a generic model, so the model that the run saves is the initial one.
"""

from fedexp.algorithms.mixins import KeepsModel


class LocalOnly(KeepsModel):
    own_step = "its server does nothing"
    tests_clients = True
