"""FedRep: a shared body, and a classifier that stays on its client.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting Shared Representations for
Personalized Federated Learning", ICML 2021, Algorithm 1. With phi the body and h_k client k's
classifier:
    client   `head_epochs` epochs of SGD on h_k with phi as received, then E epochs on phi with the
             new h_k
    server   phi <- mean of the bodies, with n_k (the paper: equal weights, `weighting=uniform`).
A client has the initial classifier until it first takes part, and its classifier changes only when
it takes part. No client uses a generic model. The accuracy reported for the generic model is that
of the body with the mean classifier of the last cohort; this classifier is not counted as traffic.
`evaluate=[global,personal]` tests the personal models.

Checked against copies of the authors' repository (lgcollins/FedRep: main_fedrep.py,
models/Update.py and scripts/, which train 10 + 1 epochs with 2 classes per client and 10 + 5 with
5).

Deviations from it: Its optimizer (SGD, momentum 0.5, weight decay 1e-4 except for biases) is used
for both phases. Here each phase starts with a fresh optimizer. Here parameters that are not trained
do not change at all. After the last round, it trains all clients' classifiers for ten more epochs
before testing. Its initial classifiers are views of the global model's parameters, so a client that
never took part has the mean classifier of the last cohort. Here it has the initial classifier, as
in Algorithm 1.
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
