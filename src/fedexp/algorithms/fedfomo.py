"""FedFOMO: every client has a model of its own and moves it towards the others' models that help it.

M. Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021, Eq. (3)-(4). A client
receives `models` other clients' models theta_j, and with its loss l_i on its own validation data
    w_j proportional to max(0, (l_i(theta_i) - l_i(theta_j)) / ||theta_j - theta_i||),   sum_j w_j = 1 if any is > 0
    theta_i <- theta_i + sum_j w_j (theta_j - theta_i),  then local training.
The server keeps an affinity P (identity at first), adds w_ij to P_ij, and sends the largest; with probability epsilon,
which falls by `epsilon_decay` a round, random ones instead (the authors' code).
Validation: `validation` of a client's examples, the same in all rounds, which it does not train on.
There is no global model: what is tested is the average of all K clients' latest models with n_k (FedKA's Table 9 says
"generic accuracy" without a rule). The upload is the change of the client's model, from which the server knows the
model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fedexp import tree
from fedexp.algorithms.base import FedAvg, masked_mean, padded_numbers
from fedexp.algorithms.contract import ClientData, Context, Federation, Needs, Network, ServerRound
from fedexp.errors import require
from fedexp.rng import stream
from fedexp.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedFOMO(FedAvg):
    models: int  # M, received in each round
    validation: float  # fraction of a client's examples
    epsilon: float  # chance of random models instead of the best, in the first round
    epsilon_decay: float  # taken off in every round

    def __post_init__(self) -> None:
        require(self.models >= 1, "algorithm.models", self.models, "at least 1")
        require(0 < self.validation < 1, "algorithm.validation", self.validation, "greater than 0 and less than 1")
        require(0 <= self.epsilon <= 1, "algorithm.epsilon", self.epsilon, "between 0 and 1")
        require(0 <= self.epsilon_decay <= 1, "algorithm.epsilon_decay", self.epsilon_decay, "between 0 and 1")

    @property
    def needs(self) -> Needs:
        kept = "models of all clients, affinities P"
        return Needs(client_state="its model", server_state=kept, down=self.models, small="w_j up")

    def server_init(self, params: Params, info: Federation) -> Tree:
        like = next(iter(params.values()))
        affinity = torch.eye(info.num_clients, dtype=like.dtype, device=like.device)
        return {"params": params, "affinity": affinity, "round": like.new_zeros(())}

    def client_init(self, params: Params, info: Federation) -> Tree:
        return {"params": params}

    def held_out(self, info: Federation, client: int) -> np.ndarray:
        """Validation examples of a client; those that have a single example validate on it."""
        part = info.parts[client]
        number = max(int(self.validation * len(part)), 1)
        return stream(client, "FedFOMO validation", len(part)).permutation(part)[:number]

    def training_part(self, info: Federation, client: int) -> np.ndarray:
        part = info.parts[client]
        return np.setdiff1d(part, self.held_out(info, client)) if len(part) > 1 else part

    def plan(self, info: Federation, client: int, rng: np.random.Generator) -> Tree:
        return padded_numbers(self.held_out(info, client), max(int(self.validation * info.largest), 1))

    def personal(
        self, server: Tree, client: int, kept: Mapping[int, Tree], info: Federation, rng: np.random.Generator
    ) -> Tree:
        others = np.array(sorted(set(kept) - {client}), dtype=np.int64)
        if rng.random() < self.epsilon - self.epsilon_decay * float(server["round"]):
            chosen = rng.permutation(others)[: self.models]
        else:
            affinity = server["affinity"][client].cpu().numpy()[others]
            chosen = others[np.argsort(-affinity, kind="stable")[: self.models]]
        # Slots without a model, in early rounds, hold the initial average and do not count.
        like = server["affinity"]
        models = [tree.map(lambda leaf: leaf.to(like.device), kept[int(j)]["params"]) for j in chosen]
        models += [server["params"]] * (self.models - len(chosen))
        numbers = torch.as_tensor(np.resize(chosen, self.models) if len(chosen) else np.zeros(self.models, np.int64))
        valid = (torch.arange(self.models) < len(chosen)).to(like)
        return {"models": tree.stack(models), "numbers": numbers.to(like.device), "valid": valid}

    def begin(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        """w_j, [M]."""
        own, others = ctx.client["params"], ctx.personal["models"]
        x, y = data.take(ctx.plan["numbers"])
        mask = ctx.plan["mask"].to(ctx.steps.dtype)

        def loss(params: Params) -> torch.Tensor:
            return masked_mean(F.cross_entropy(net(params, x).logits, y, reduction="none"), mask)

        gains = []
        for j in range(self.models):
            model = tree.row(others, j)
            distance = tree.squared_distance(model, own).sqrt()
            gains.append((loss(own) - loss(model)) / torch.where(distance > 0, distance, 1.0))
        gain = torch.stack(gains).clamp(min=0) * ctx.personal["valid"]
        return {"weights": gain / torch.where(gain.sum() > 0, gain.sum(), 1.0)}

    def start(self, net: Network, data: ClientData, ctx: Context) -> Params:
        own, others, weights = ctx.client["params"], ctx.personal["models"], ctx.begin["weights"]
        return {k: v + torch.tensordot(weights, others[k] - v, 1) for k, v in own.items()}

    def finish(self, net: Network, params: Params, data: ClientData, ctx: Context) -> tuple[Tree, Tree]:
        message = {"change": tree.subtract(params, ctx.client["params"]), "weights": ctx.begin["weights"]}
        return message | {"numbers": ctx.personal["numbers"]}, {"params": params}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        shares = round.weights / float(round.info.weights.sum())
        average = {k: v + torch.tensordot(shares.to(v), messages["change"][k], 1) for k, v in server["params"].items()}
        affinity = server["affinity"].clone()
        for i, client in enumerate(round.clients):
            affinity[client].index_add_(0, messages["numbers"][i], messages["weights"][i])
        return server | {"params": average, "affinity": affinity, "round": server["round"] + 1}
