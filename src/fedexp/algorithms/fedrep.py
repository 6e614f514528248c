"""FedRep: clients share the body of the model, and each client keeps its own classifier.

In each round, a client first trains its classifier and then the body. The server averages the
bodies.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting Shared Representations for
Personalized Federated Learning", ICML 2021, Algorithm 1. With the body phi and client k's
classifier h_k:
    client   trains h_k for `head_epochs` epochs with phi as received, then phi for E epochs with
             the new h_k
    server   phi <- mean of the bodies, weighted by n_k (the paper uses equal weights:
             `weighting=uniform`).
A client has the initial classifier until it first takes part, and its classifier changes only when
it takes part. No client uses a generic model. The accuracy reported for the generic model is
measured with the body and the mean classifier of the last cohort; sending the classifiers is not
counted as traffic. `evaluate=[global,personal]` also tests the personal models.

Checked against copies of the authors' repository (lgcollins/FedRep: main_fedrep.py,
models/Update.py and scripts/). The scripts train for 10 + 1 epochs with 2 classes per client, and
for 10 + 5 epochs with 5 classes per client.

Differs from the released code: In that code, one optimizer (SGD, momentum 0.5, weight decay 1e-4
except for biases) serves both phases. In fedexp, each phase starts with a fresh optimizer, and
parameters that are not trained do not change at all. After the last round, the authors' code trains
all clients' classifiers for ten more epochs before testing. Its initial classifiers are views of
the global model's parameters, so a client that never took part has the mean classifier of the last
cohort. In fedexp, such a client has the initial classifier, as in Algorithm 1.
"""

from fedexp.algorithms.heads import HEAD
from fedexp.algorithms.mixins import KeepsPart
from fedexp.algorithms.phases import HeadThenBody


class FedRep(HeadThenBody, KeepsPart):
    def keeps(self, name: str) -> bool:
        return name in HEAD
