"""FedRep: a shared body, and a classifier that never leaves its client.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting Shared Representations for
Personalized Federated Learning", ICML 2021, Algorithm 1. With phi the body and h_k the classifier
of client k:
    client   `head_epochs` epochs of SGD on h_k with phi as received, then E epochs on phi with h_k
             as it is now
    server   phi <- mean of the bodies, with n_k (the paper: equal weights, `weighting=uniform`).
A client's classifier is the initial one before it first takes part, and stays as it is in between.
No client uses a generic model. The accuracy reported for one is that of the body with the mean
classifier of the last cohort, which no client uses; that classifier is not counted as traffic.
`evaluate=[global,personal]` tests the clients' own models.

Checked against copies of the authors' repository (lgcollins/FedRep: main_fedrep.py,
models/Update.py and scripts/, which train 10 + 1 epochs with 2 classes a client and 10 + 5 with 5).
Deviations from it: its optimizer (SGD, momentum 0.5, weight decay 1e-4 but for biases) serves both
phases, here each phase begins with a fresh one; parameters that are not trained stay exactly as
they are; after the last round it trains all clients' classifiers for ten epochs more before it
tests them. There the initial classifiers are views of the global model's parameters, so that a
client that never took part has the mean classifier of the last cohort; here, as in Algorithm 1, it
has the initial one.
"""

from fedexp.algorithms.families import KeepsPart
from fedexp.algorithms.heads import HEAD
from fedexp.algorithms.interfaces import Needs
from fedexp.algorithms.phases import HeadThenBody


class FedRep(HeadThenBody, KeepsPart):
    @property
    def needs(self) -> Needs:
        return Needs(
            client_state="classifier", unsent="the classifier", gradient_passes=self.head_epochs
        )

    def keeps(self, name: str) -> bool:
        return name in HEAD
