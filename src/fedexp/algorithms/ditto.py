"""Ditto: each client also trains a personal model and keeps it close to the global model.

T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, Algorithm 1. The global model w is trained with FedAvg. Each client of
the cohort also trains its personal model v_k, with a proximal term that pulls v_k towards the
received w:
    min_v  F_k(v) + lambda/2 ||v - w||^2.
Both models are trained on the same batches. v_k starts from its value at the end of the client's
last participation, or from the initial model. v_k and its running statistics stay on the client.
The reported accuracy is that of w and equals FedAvg's. The reported training loss is that of the
personal models and includes the proximal term. `evaluate=[global,personal]` tests the personal
models.

Checked against the authors' code (litian96/ditto, flearn/trainers_MTL/ditto.py), which also trains
both models on each batch. In the code, lambda is 1, or each client chooses it from 0.1, 1 and 2;
this choice is not implemented.

Differs from the released code: The proximal term is added to the gradient before weight decay and
momentum; the code uses neither. v_k is trained for as many epochs as w. The server weights clients
by n_k, not equally.
"""

from collections.abc import Sequence

import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Context, Federation, Network
from fedexp.algorithms.mixins import KeepsModel
from fedexp.core import tree
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params


class Ditto(KeepsModel):
    """First exchange of a round: clients train personal models. The second exchange is FedAvg.

    Only the FedAvg exchange sends the global model.
    """

    # weight of the proximal term; with 0, the personal models are independent of w
    lambda_: NonNegative

    def exchanges(self, federation: Federation) -> Sequence[FedAvg]:
        return self, FedAvg()

    def penalty(self, net: Network, params: Params, ctx: Context) -> torch.Tensor:
        return 0.5 * self.lambda_ * tree.squared_distance(params, ctx.server["params"])
