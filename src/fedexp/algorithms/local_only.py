"""Local only: every client trains alone during the whole run, as a lower reference.

Clients start from the same initial model and exchange nothing. Each client's model is tested on the
whole test set, and the reported accuracies are means over all clients. `evaluate=[global,personal]`
also tests each model on its client's label distribution. With participation=1, all clients train in
every round. The optimizer state is reset in every round, as in FedAvg.

No client uses a generic model, so the model that the run saves is the initial one.
"""

from fedexp.algorithms.families import KeepsPart
from fedexp.algorithms.interfaces import ClientData, Context, Needs, Network, ServerRound
from fedexp.core.tree import Params, Tree


class LocalOnly(KeepsPart):
    own_step = "its server does nothing"
    trains_model = False
    keeps_buffers = True
    tests_clients = True

    needs = Needs(client_state="personal model", up=-1, down=-1)

    def keeps(self, name: str) -> bool:
        return True

    def counted(self, sent: Tree, up: bool) -> Tree:
        return {}

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return {}, params | net.buffers()

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        return server
