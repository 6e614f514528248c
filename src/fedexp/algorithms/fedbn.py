"""FedBN: batch norm layers stay on the client, and the server averages all other parameters.

Each client thus normalises features with statistics of its own data.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, "FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization", ICLR 2021, Algorithm 1. Each client keeps the scale, shift and running
statistics of all batch norm layers; they are neither sent nor averaged. A client that takes part
for the first time uses the values of the initial model.

FedBN has no generic model. The accuracy reported for the generic model is that of the averaged
parameters with the averaged batch norm layers of the last cohort. Sending these layers is not
counted as traffic. `evaluate=[global,personal]` tests the personal models.

Checked against the authors' code (med-air/FedBN, `communication` in federated/fed_digits.py), which
does not average entries of the state dict with "bn" in their name. Differs from the released code:
Batch norm layers are found by their type. The server weights clients by n_k; `weighting=uniform`
gives equal weights.
"""

import copy
from typing import ClassVar, Self

from torch import nn

from fedexp.algorithms.mixins import KeepsPart
from fedexp.core.errors import ConfigError


class FedBN(KeepsPart):
    keeps_buffers = True

    # names of the batch norm layers' parameters and statistics; set by `fitted`
    local: ClassVar[frozenset[str]] = frozenset()

    def fitted(self, module: nn.Module) -> Self:
        names = {
            f"{layer}.{name}"
            for layer, part in module.named_modules()
            if isinstance(part, nn.modules.batchnorm._BatchNorm)
            for name in part.state_dict()
        }
        if not names:
            raise ConfigError(
                "algorithm=fedbn: the model has no batch norm layers; use a model that has"
                " them, such as model=resnet10"
            )
        made = copy.copy(self)
        object.__setattr__(made, "local", frozenset(names))
        return made

    def keeps(self, name: str) -> bool:
        return name in self.local
