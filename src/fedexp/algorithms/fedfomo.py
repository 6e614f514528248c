"""FedFOMO: each client has a personal model and moves it towards the models that help it.

In each round, a client receives models of other clients and weights them by how much they lower the
loss on its validation data. The server has no global model. It keeps all clients' models and
chooses which ones to send.

M. Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021,
Eq. (3)-(4), and the authors' code. theta is client i's model before its last local training (the
baseline). The candidates theta_j are the models of `models` other clients and the model that client
i trained last. With l_i the loss on client i's validation data,
    d_j = (l_i(theta) - l_i(theta_j)) / ||theta_j - theta||
    w_j = max(0, d_j) / sum_k max(0, d_k), or 0 if no d_k is > 0
    theta <- theta + sum_j w_j (theta_j - theta),  followed by local training.
A client whose last training did not lower its validation loss therefore returns to the model before
that training. `distance` selects the norm: l1, the released code's default, or l2.

The server keeps an affinity matrix P, which is initially the identity. It adds d_j / |sum_k d_k| to
P_ij, even if this value is negative, and sends client i the models with the largest P_ij. Ties are
broken at random. With probability epsilon, which decreases by `epsilon_decay` per round, it sends a
random model instead.

With `federations` = F > 0, there are F + 1 more candidates, as in the released code
(NVlabs/FedFomo, server.py and federation.py, where F is 5). Spectral clustering of P (softmax of
its rows, made symmetric) divides the clients into F sub-federations. The additional candidates are
the average of each sub-federation's latest trained models, weighted by numbers of examples, and the
mean of these averages. The values d_k of these candidates are part of the sum, but are not added to
P.

Each example is used for validation with probability `validation`. The draw depends only on the
example's index, so it is the same in all rounds, even if a client's examples change. Clients do not
train on these examples. A client that would have no validation example uses the example with the
lowest draw. A client that would have only validation examples trains on the one with the highest
draw.

No client uses a global model. The reported accuracy is that of the average of all K clients' latest
models and running statistics, weighted by n_k. (FedKA's Table 9 reports a "generic accuracy"
without defining it.) The weights are the n_k of the first task or partition, so that the weights
still sum to 1 if the numbers of examples change. Clients upload the changes of their models, and
the server computes the models from these changes. The models that a client keeps include running
statistics.

Differs from the released code: By default, F is 0, as in the paper. P_ii stays 1, and
sub-federations without a trained model have no average. The validation examples are drawn
independently, not as a fixed number. The server offers the models of all clients that have taken
part so far, not only of the last cohort. epsilon decreases once per round, not once per local
epoch.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import FedAvg, cross_entropies, masked_mean, padded_numbers
from fedexp.algorithms.interfaces import (
    ClientData,
    Context,
    Federation,
    Network,
    ServerNetwork,
    ServerRound,
)
from fedexp.core import tree
from fedexp.core.errors import require
from fedexp.core.limits import Count, CountFrom0, OpenShare, Share
from fedexp.core.rng import generator_for
from fedexp.core.tree import Params, Tree

# added to |sum_k d_k| if this sum is smaller than the constant, as in the authors' code
SMALLEST = 1e-9


@functools.lru_cache(maxsize=2)
def validation_draws(examples: int) -> np.ndarray:
    """Return a random number from 0 to 1 for each training example, [N].

    The numbers are the same in every run. Do not modify the array.
    """
    return generator_for(0, "FedFOMO validation").random(examples)


class FedFOMO(FedAvg):
    own_step = "it has no global model; each client has a personal model"
    keeps_buffers = True
    needs_messages = "its server sends models of clients to others, also those of a lost message"

    models: Count  # M, number of models received per round
    validation: OpenShare  # probability that an example is used for validation
    epsilon: Share  # probability of a random model instead of the best one, in the first round
    epsilon_decay: Share  # subtracted from epsilon after each round
    distance: Literal["l1", "l2"]
    # F, number of sub-federations whose averages are candidates; 0: none
    federations: CountFrom0 = 0

    @property
    def slots(self) -> int:
        """Return the maximum number of candidate models that the server sends to a client."""
        return self.models + (self.federations + 1 if self.federations else 0)

    def counted(self, sent: Tree, up: bool) -> Tree:
        """Return the values that count as traffic.

        Download: the candidate models. Upload: the change of the client's model and the numbers
        d_j. The average model, which no client uses, and empty slots are not counted.
        """
        if up:
            return {"change": sent["change"], "d": sent["affinity"][sent["valid"] > 0]}
        number = int(sent["personal"]["valid"].sum())
        return tree.map(lambda leaf: leaf[:number], sent["personal"]["models"])

    def server_init(self, params: Params, federation: Federation) -> Tree:
        clients, like = federation.num_clients, next(iter(params.values()))
        server = {
            "params": params,
            "affinity": torch.eye(clients).to(like),
            "shares": like.new_tensor(federation.weights / federation.weights.sum()),  # [K]
            "round": like.new_zeros(()),
        }
        if not self.federations:
            return server
        few, allowed = self.federations < clients, f"less than num_clients={clients}"
        require(few, "algorithm.federations", self.federations, allowed)
        return server | {k: like.new_zeros(clients) for k in ("federation", "trained")}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "before": params}

    def held_out(self, federation: Federation, client: int) -> np.ndarray:
        """Return the indices of a client's validation examples.

        A client has at least one validation example and at least one training example. A client
        with a single example uses it for validation and training.
        """
        part = federation.parts[client]
        drawn = validation_draws(len(federation.labels))[part]
        low = drawn < self.validation
        return part[low & (drawn < drawn.max()) | (drawn == drawn.min())]

    def training_part(self, federation: Federation, client: int) -> np.ndarray:
        part = federation.parts[client]
        return np.setdiff1d(part, self.held_out(federation, client)) if len(part) > 1 else part

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        owners = np.repeat(
            np.arange(federation.num_clients), [len(part) for part in federation.parts]
        )
        low = (
            validation_draws(len(federation.labels))[np.concatenate(federation.parts)]
            < self.validation
        )
        # maximum number of validation examples over all clients
        most = max(int(np.bincount(owners[low]).max(initial=0)), 1)
        mean = self.validation * federation.largest
        # a size that is usually sufficient, so that the shape rarely differs between partitions
        usual = int(mean + 3 * (mean * (1 - self.validation)) ** 0.5) + 1
        return padded_numbers(
            self.held_out(federation, client), max(most, min(usual, federation.largest))
        )

    def personal_broadcast(
        self, server: Tree, client: int, kept: Mapping[int, Tree], rng: np.random.Generator
    ) -> Tree:
        chosen = self.choose_models_for(server, client, sorted(kept.keys() - {client}), rng)
        chosen.sort()  # so that sums do not depend on the order of the choice
        like, averages = server["affinity"], self.average_federations(server, kept)
        # In early rounds, some slots have no model. They are filled with the average, which is
        # ignored.
        filler, empty = [server["params"] | server["buffers"]], self.models - len(chosen)
        rest = self.slots - self.models - len(averages)
        models = last_models(chosen, kept, like) + empty * filler + averages + rest * filler
        valid = len(chosen) * [1.0] + empty * [0.0] + len(averages) * [1.0] + rest * [0.0]
        return {
            "models": tree.stack(models),
            "numbers": torch.tensor(chosen + empty * [client], device=like.device),
            "valid": like.new_tensor(valid),
            # A client that has not taken part yet has the running statistics of the initial model.
            "first_buffers": server.get("first_buffers", server["buffers"]),
        }

    def average_federations(self, server: Tree, kept: Mapping[int, Tree]) -> list[Params]:
        """Return the average model of each sub-federation, followed by the mean of these averages.

        Sub-federations without trained models are skipped.

        """
        found: list[Params] = []
        for number in range(self.federations):
            trained = server["trained"] * (server["federation"] == number)
            if trained.max() > 0:
                last = torch.nonzero(trained == trained.max()).flatten()
                models = last_models(last.tolist(), kept, server["affinity"])
                found.append(tree.average_buffers(tree.stack(models), server["shares"][last]))
        equal = server["affinity"].new_ones(len(found))
        return [*found, tree.average_buffers(tree.stack(found), equal)] if found else []

    def choose_models_for(
        self, server: Tree, client: int, others: Sequence[int], rng: np.random.Generator
    ) -> list[int]:
        """Return the clients whose models are sent to `client`.

        With probability epsilon, a choice is a random client. Otherwise, it is the client with the
        largest affinity among the clients that are not chosen yet. others: the clients that have a
        model.
        """
        affinity = server["affinity"][client].cpu().numpy()[list(others)]
        best = [others[i] for i in np.lexsort((rng.random(len(others)), -affinity))]
        random = rng.permutation(others).tolist()
        epsilon, found = self.epsilon - self.epsilon_decay * float(server["round"]), []
        for _ in range(min(self.models, len(others))):
            order = random if rng.random() < epsilon else best
            found.append(next(j for j in order if j not in found))
        return found

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        """Return the candidates' weights, the affinity changes, and the start of local training.

        "weights" contains w_j for all candidates, [slots + 1]; the last candidate is the client's
        own model. "affinity" contains the changes of P, [M]. "start" is the model from which local
        training starts.
        """
        base, own = (ctx.personal["first_buffers"] | ctx.client[k] for k in ("before", "params"))
        x, y = data.take(ctx.plan["numbers"])
        mask = ctx.plan["mask"].to(ctx.steps.dtype)

        def loss(model: Params) -> Tensor:
            return masked_mean(cross_entropies(net(model, x, mask).logits, y), mask)

        reference, gains = loss(base), []
        models = [*(tree.row(ctx.personal["models"], j) for j in range(self.slots)), own]
        for model in models:
            distance = self.norm({k: model[k] - base[k] for k in ctx.server["params"]})
            gains.append((reference - loss(model)) / torch.where(distance > 0, distance, 1.0))
        gain = torch.stack(gains) * F.pad(ctx.personal["valid"], (0, 1), value=1.0)
        helpful, total = gain.clamp(min=0), gain.sum().abs()
        weights = helpful / torch.where(helpful.sum() > 0, helpful.sum(), 1.0)
        stacked = tree.stack(models)
        start = {
            k: v + torch.tensordot(weights.to(v), stacked[k] - v, 1)
            if v.is_floating_point()
            else v  # batch counts
            for k, v in base.items()
        }
        affinity = gain / torch.where(total < SMALLEST, total + SMALLEST, total)
        return {"weights": weights, "affinity": affinity[: self.models], "start": start}

    def norm(self, difference: Params) -> Tensor:
        if self.distance == "l1":
            return torch.stack([v.abs().sum() for v in difference.values()]).sum()
        return tree.dot(difference, difference).sqrt()

    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        return ctx.setup["start"]

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        own, trained = ctx.personal["first_buffers"] | ctx.client["params"], params | net.buffers()
        return {
            "change": tree.subtract(trained, own),
            "affinity": ctx.setup["affinity"],
            "numbers": ctx.personal["numbers"],
            "valid": ctx.personal["valid"][: self.models],
        }, {"params": trained, "before": ctx.setup["start"]}

    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the model that the client trained last, including running statistics."""
        return state["params"]

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        average = self.update_average(server["params"], messages, round)
        affinity = server["affinity"].clone()
        for i, client in enumerate(round.clients):
            affinity[client].index_add_(0, messages["numbers"][i], messages["affinity"][i])
        new = {"params": average, "affinity": affinity, "round": server["round"] + 1}
        if self.federations:
            cohort = torch.tensor(round.clients, device=affinity.device)
            new["trained"] = server["trained"].index_fill(0, cohort, float(new["round"]))
            new["federation"] = cluster_clients(affinity, self.federations)
        return server | new | {"first_buffers": server.get("first_buffers", server["buffers"])}

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        """Replace the running statistics by their average over the models of all clients."""
        return server | {"buffers": self.update_average(round.previous["buffers"], messages, round)}

    def update_average(self, average: Params, messages: Tree, round: ServerRound) -> Params:
        """Return the average of all clients' models after a round.

        average: the average before the round. The batch counts of batch norm are not averaged; the
        largest count is used.
        """
        shares = round.previous["shares"][list(round.clients)]
        return {
            k: v + torch.tensordot(shares.to(v), messages["change"][k], 1)
            if v.is_floating_point()
            else torch.maximum(v, round.buffers[k].amax(0))
            for k, v in average.items()
        }


def last_models(clients: Sequence[int], kept: Mapping[int, Tree], like: Tensor) -> list[Params]:
    """Return the models that the clients trained last, on the device of `like`."""
    return [tree.to(kept[j]["params"], like.device) for j in clients]


def cluster_clients(affinity: Tensor, number: int) -> Tensor:
    """Divide the clients into sub-federations by spectral clustering.

    Returns each client's sub-federation, 0 to number - 1, [K].

    affinity: P, [K, K]. number: the number of sub-federations.
    """
    from sklearn.cluster import SpectralClustering  # slow to import

    if not affinity.isfinite().all():
        return torch.zeros_like(affinity[0])
    close = affinity.double().softmax(1).cpu().numpy()
    clustering = SpectralClustering(
        number, affinity="precomputed", assign_labels="discretize", random_state=0
    )
    return torch.from_numpy(clustering.fit_predict((close + close.T) / 2)).to(affinity)
