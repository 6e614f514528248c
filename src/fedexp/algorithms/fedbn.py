"""FedBN: batch normalisation stays with the client, all other parameters are averaged.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, "FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization", ICLR 2021, Algorithm 1: scale, shift and running statistics of every batch
norm layer are the client's own and are neither sent nor averaged. A client that takes part for the
first time has the initial ones. Checked against the authors' code (med-air/FedBN, `communication`
in federated/fed_digits.py), which leaves out all entries of the state dict with "bn" in their name.
Deviations from it: here layers are found by their type; the server's weights are n_k, not equal
ones (`weighting=uniform`). No client uses a generic model. The accuracy reported for one is that of
the averaged parameters with the mean batch norm of the last cohort, which no client uses and which
is no part of the traffic that is counted. `evaluate=[global,personal]` tests the clients' own
models.
"""

import copy
from typing import ClassVar, Self

from torch import nn

from fedexp.algorithms.families import OwnModel, Personal
from fedexp.algorithms.interfaces import ClientData, Context, Federation, Needs, Network
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree


class FedBN(Personal, OwnModel):
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

    def counted(self, sent: Tree, up: bool) -> Tree:
        return sent | {part: self.without(sent[part]) for part in ("params", "buffers")}

    def without(self, values: Params) -> Params:
        return {name: value for name, value in values.items() if name not in self.local}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return {name: value for name, value in params.items() if name in self.local}

    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        return ctx.server["params"] | ctx.client

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        trained = params | net.buffers()
        return {"params": params}, {name: trained[name] for name in ctx.client}

    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the averaged parameters with the client's batch norm."""
        return server["params"] | state
