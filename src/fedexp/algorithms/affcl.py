"""AF-FCL: clients replay generated features of earlier tasks and weight them by credibility.

A normalising flow generates the features. It is trained and averaged together with the model.
Generated features that are unlikely for the client's own data get small weights.

A. Wuerkaixi et al., "Accurate Forgetting for Heterogeneous Federated Continual Learning", ICLR
2024, implemented as in the authors' code (zaocan666/AF-FCL: model.py, userPreciseFCL.py). The flow
(see flow.py) models the features h given the class. p is the density of the flow, u is its noise,
and D is the number of features. theta' and p' are the model and the flow from the end of the
previous task; h' and z' are the features and logits of theta'. For a batch (x, y), a classifier g,
and features h~ drawn from the flow for labels y~ of all classes met so far, the loss is
    L = CE(z, y) + kd_last [ kd_feature mean_d (h'_d - h_d)^2 + kd_output L_d(z, z') ]
        + replay { e * mean_j w_j CE(g(h~_j), y~_j) + kd_last kd_output L_d(g(h~), g'(h~)) }
        - (1 / D) { log p(h | y) + flow_last log p(h~' | y~') },
          where h~' and y~' are drawn from p' for the classes of earlier tasks,
    P = mean over the batch of p(h | y)^(1/D),   e = (1 - theta) P + theta,
    w_j = mean_d N(s_jd; mean and variance of u_d over the examples of class y~_j in the batch),
          or P if the batch has no such example.
L_d is the distillation loss of continual.py with T = 2. In task 1, theta' does not exist. With
`credibility=latent`, s is the noise from which h~ was generated. With `credibility=released`, as in
the authors' code, s is h~.

The third line trains only the flow. The second line trains the part of g that `replay_trains`
selects. With `hidden`, g is a linear layer of D units with leaky ReLU followed by the classifier,
and the second line trains only this hidden layer, because the code's `classifier_fb_optimizer`
contains only `fc2`. With `classifier`, g is the model's classifier, and the second line trains all
of it. On digits (experiment=benchmark/digits_class_incremental local.optimizer=adam local.lr=0.001;
mean and standard deviation over seeds 0 to 2), `hidden`, `classifier` and FedAvg have average
accuracies of 0.235 (0.027), 0.255 (0.030) and 0.200 (0.042), and task forgetting of 0.568 (0.088),
0.638 (0.117) and 0.584 (0.142).

The default values are those of the code. The code can also use the global model as a second
teacher, but sets the weights of these terms to 0, so they are omitted. The text of the paper was
not available, so the equations follow the code.

Differs from the released code: One optimizer step minimises all three lines; the code takes three
steps of Adam, one after another. Once per round, `bank` features are drawn from the received flow;
for each batch, the code draws new features from the flow that is being trained. The features are
the input of the model's last layer. The third line is divided by D, which does not affect Adam and
stabilises SGD. Variances are at least 1e-6.
"""

import copy
import math
from typing import ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.algorithms import heads
from fedexp.algorithms.base import cross_entropies, masked_mean, rows_of_step
from fedexp.algorithms.continual import Remembering, distillation_loss
from fedexp.algorithms.families import OwnModel
from fedexp.algorithms.flow import Density, Flow
from fedexp.algorithms.interfaces import Batch, ClientData, Context, Federation, Needs, Network
from fedexp.algorithms.prototypes import one_hot
from fedexp.core.limits import Count, NonNegative, Share
from fedexp.core.tree import Params, Tree
from fedexp.models import classifier_of

FLOW, HIDDEN = "flow.", "classifier.hidden."  # prefixes of parameter names
TEMPERATURE, VARIANCE = 2.0, 1e-6


class AFFCL(Remembering, OwnModel):
    needs_features = True
    needs_head = True
    must_train = heads.HEAD
    hint = "the authors use local.optimizer=adam local.lr=0.0001"
    # the flow's module, whose parameters belong to the model; set by `fitted`
    shape: ClassVar[Flow]

    replay: NonNegative  # weight of the loss on generated features
    kd_last: NonNegative  # weight of the distillation from the model of the previous task
    kd_feature: NonNegative
    kd_output: NonNegative
    # weight of the loss on features drawn from the flow of the previous task
    flow_last: NonNegative
    theta: Share  # minimum weight of generated features
    replay_trains: Literal["hidden", "classifier"]
    credibility: Literal["latent", "released"]
    hidden: Count  # number of hidden units in each of the flow's networks
    bank: Count  # number of features generated per round

    @property
    def needs(self) -> Needs:
        layer = " and a layer" if self.replay_trains == "hidden" else ""
        small = f"a flow{layer} (both ways)"
        return Needs(
            server_state="model and flow of the previous task",
            down=1,
            small=small,
            teachers=1,
            work="training of the flow in each step",
        )

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        last = classifier_of(module)
        module.flow = Flow(last.in_features, federation.num_classes, self.hidden)
        if self.replay_trains == "hidden":
            module.classifier = Deeper(last)
        return module

    def fitted(self, module: nn.Module) -> Self:
        made = copy.copy(self)
        object.__setattr__(made, "shape", copy.deepcopy(module.flow))
        return made

    def flow_of(self, params: Params) -> Density:
        return Density(
            self.shape, {k.removeprefix(FLOW): v for k, v in params.items() if k.startswith(FLOW)}
        )

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        """Return the noise and labels from which the flow generates features in this round.

        From the second task on, there are separate noise and labels for the previous task's flow.
        """
        before = np.array(federation.classes_met(), dtype=np.int64)
        plan = self.draw("new", np.union1d(before, np.flatnonzero(federation.counts.sum(0))), rng)
        return plan | (self.draw("old", before, rng) if federation.task else {})

    def draw(self, name: str, classes: np.ndarray, rng: np.random.Generator) -> Tree:
        noise = rng.normal(size=(self.bank, self.shape.width))
        return {f"{name}_noise": noise, f"{name}_labels": rng.choice(classes, self.bank)}

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        models, made = {"new": ctx.server["params"], "old": ctx.server.get("old")}, {}
        for name, model in models.items():
            if model is not None:
                like, labels = model[heads.BIAS], ctx.plan[f"{name}_labels"]
                noise = ctx.plan[f"{name}_noise"].to(like.dtype)
                features = self.flow_of(model).features(noise, one_hot(labels, like))
                made[name] = {"noise": noise, "features": features, "labels": labels}
        return made

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        features, logits, _ = net(params, batch.x)
        learning = cross_entropies(logits, batch.y)
        if "old" in ctx.server:
            before = net(ctx.server["old"], batch.x)
            apart = (before.features.detach() - features).square().mean(-1)
            answers = distillation_loss(logits, before.logits.detach(), TEMPERATURE)
            learning = learning + self.kd_last * (
                self.kd_feature * apart + self.kd_output * answers
            )
        flow, given = self.flow_of(params), one_hot(batch.y, logits[0])
        density, noise = flow.log_density(features.detach(), given)
        fit = masked_mean(density, batch.mask)
        rows = rows_of_step(batch.step, self.bank, ctx)
        if "old" in ctx.setup:
            old = {k: v.index_select(0, rows) for k, v in ctx.setup["old"].items()}
            fit = (
                fit
                + self.flow_last
                * flow.log_density(old["features"], one_hot(old["labels"], logits[0]))[0].mean()
            )
        typical = masked_mean((density.detach() / self.shape.width).exp(), batch.mask)
        present = given if batch.mask is None else given * batch.mask[:, None]
        drawn = {k: v.index_select(0, rows) for k, v in ctx.setup["new"].items()}
        space = drawn["noise" if self.credibility == "latent" else "features"]
        weights = replay_weights(space, drawn["labels"], noise.detach(), present, typical)
        replayed = self.replay_loss(params, drawn, weights, typical, ctx)
        return masked_mean(learning, batch.mask) + self.replay * replayed - fit / self.shape.width

    def replay_loss(
        self,
        params: Params,
        drawn: Tree,
        weights: Tensor,
        typical: Tensor,
        ctx: Context,
    ) -> Tensor:
        """Return the loss on generated features: the second line of L divided by `replay`.

        drawn: noise, features and labels, [n, ...]. weights: w [n]. typical: P.

        """
        if self.replay_trains == "hidden":
            params = params | {k: v.detach() for k, v in heads.head(params).items()}
        answers = classify(drawn["features"], params)
        loss = (weights * cross_entropies(answers, drawn["labels"])).mean()
        loss = loss * ((1 - self.theta) * typical + self.theta)
        if "old" not in ctx.server:
            return loss
        before = classify(drawn["features"], ctx.server["old"])
        distilled = distillation_loss(answers, before, TEMPERATURE).mean()
        return loss + self.kd_last * self.kd_output * distilled


class Deeper(nn.Linear):
    """A linear classifier preceded by a hidden layer of the same width as the features."""

    def __init__(self, classifier: nn.Linear):
        super().__init__(classifier.in_features, classifier.out_features)
        self.load_state_dict(classifier.state_dict())
        self.hidden = nn.Linear(self.in_features, self.in_features)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(F.leaky_relu(self.hidden(features)))


def classify(features: Tensor, params: Params) -> Tensor:
    """Return the logits [n, C] that a model's classifier computes for features [n, D]."""
    if HIDDEN + "weight" in params:
        hidden = F.linear(features, params[HIDDEN + "weight"], params[HIDDEN + "bias"])
        features = F.leaky_relu(hidden)
    return heads.logits(features, heads.head(params))


def replay_weights(
    space: Tensor,
    labels: Tensor,
    noise: Tensor,
    present: Tensor,
    typical: Tensor,
) -> Tensor:
    """Return the weights w [n] of generated features in the replay loss.

    The symbols are defined at the top of this module. space: s [n, D]; labels: y~ [n]; noise: u of
    the batch's examples, [B, D]; present: the one-hot labels of the batch, [B, C], with zeros for
    padding; typical: P.
    """
    count = present.sum(0)
    shares = present / count.clamp(min=1)
    mean = shares.T @ noise
    variance = (shares.T @ (noise - present @ mean).square()).clamp(min=VARIANCE)
    mean, variance = mean.index_select(0, labels), variance.index_select(0, labels)
    normal = (-0.5 * (space - mean).square() / variance).exp() / (2 * math.pi * variance).sqrt()
    return torch.where(count.index_select(0, labels) > 0, normal.mean(-1), typical)
