"""FedBN: batch normalisation stays with the client, all other parameters are averaged.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, "FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization", ICLR 2021, Algorithm 1: scale, shift and running statistics of every batch
norm layer are the client's own and are neither sent nor averaged. A client that takes part for the
first time has the initial ones. Checked against the authors' code (med-air/FedBN, `communication`
in federated/fed_digits.py), which leaves out all entries of the state dict with "bn" in their name.
Deviations from it: here layers are found by their type; the server's weights are n_k, not equal
ones (`weighting=uniform`). No client uses a generic model. The accuracy reported for one is that of
the averaged parameters with the mean batch norm of the last cohort, which no client uses and which
is not counted as traffic. `evaluate=[global,personal]` tests the clients' own
models.
"""

import copy
from typing import ClassVar, Self

from torch import nn

from fedexp.algorithms.families import KeepsPart, OwnModel
from fedexp.algorithms.interfaces import Needs
from fedexp.core.errors import ConfigError


class FedBN(KeepsPart, OwnModel):
    keeps_buffers = True

    # names of what batch norm layers hold; known once it is `fitted`
    local: ClassVar[frozenset[str]] = frozenset()

    needs = Needs(client_state="batch norm", unsent="batch norm")

    def fitted(self, module: nn.Module) -> Self:
        names = {
            f"{layer}.{name}"
            for layer, part in module.named_modules()
            if isinstance(part, nn.modules.batchnorm._BatchNorm)
            for name in part.state_dict()
        }
        if not names:
            raise ConfigError(
                "algorithm=fedbn: the model has no batch normalisation (model=resnet10 and others"
                " have)"
            )
        made = copy.copy(self)
        object.__setattr__(made, "local", frozenset(names))
        return made

    def keeps(self, name: str) -> bool:
        return name in self.local
