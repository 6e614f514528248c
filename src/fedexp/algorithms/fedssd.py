"""FedSSD: clients distil the global model, weighted by its credibility per class and example.

The server measures on public examples how reliably the global model recognises each class. The
weights keep clients from learning the teacher's mistakes.

Y. He et al., "Learning Critically: Selective Self-Distillation in Federated Learning on Non-IID
Data", IEEE Trans. on Big Data 10 (6), 2024 (arXiv 2504.14694). A_jk is the fraction of the server's
public examples of class j that the global model classifies as class k, p_y(x) is the probability
that the global model assigns to the true label of x, z_global are its logits, and z are the logits
of the local model:
    M_class[k] = A_kk (1 - max_{j != k} A_jk)
    M_sample(x) = 1 - sqrt(1 - p_y(x))
    M(x)[k] = m_max [ M_class[k] M_sample(x) - threshold ]^+
    L = CE + sum_k ( M(x)[k] (z_global[k] - z[k]) )^2
The server computes M_class for each new global model and sends it with the model. In round 1,
M_class is 0.

No code by the authors was found, and only the paper's abstract was available. The formulas, and
threshold = 0.1, come from a reimplementation (evgafanboi/fl_clean, README and
FL/strategy/FedSSD.py); the tests of fedexp implement them independently. M(x) is as in the README.
In the reimplementation's code, m_max is inside the bracket: [ m_max M_class[k] M_sample(x) -
threshold ]^+. The two formulas agree only for the default m_max = 1; with a smaller value, the
second one distils fewer logits. It is not known which formula the paper uses.

Other differences from the reimplementation: The reimplementation also evaluates the initial model,
so its M_class is not 0 in round 1, and it clips gradients at norm 0.5.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Network,
    ServerNetwork,
    ServerRound,
)
from fedexp.core.limits import NonNegative, ShareBelow1
from fedexp.core.tree import Params, Tree


def credibility(answers: Tensor, labels: Tensor) -> Tensor:
    """Return M_class [C], the credibility of each class, for logits [n, C] and labels [n].

    The credibility of a class without examples is 0.

    """
    classes = answers.shape[-1]
    truth, taken = (
        F.one_hot(each, classes).to(answers.dtype) for each in (labels, answers.argmax(-1))
    )
    rates = truth.T @ taken / truth.sum(0).clamp(min=1)[:, None]  # A
    others = rates.masked_fill(torch.eye(classes, dtype=torch.bool, device=rates.device), 0)
    return rates.diagonal() * (1 - others.amax(0))


class FedSSD(FedAvg):
    sends = ("params", "credibility")
    needs_public = 1

    m_max: NonNegative  # largest weight of a logit; 0: FedAvg
    threshold: ShareBelow1  # minimum credibility for a logit to be distilled

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {
            "params": params,
            "credibility": next(iter(params.values())).new_zeros(federation.num_classes),
        }

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        student = net(params, batch.x).logits
        teacher = net(ctx.server["params"], batch.x).logits.detach()
        doubt = 1 - teacher.softmax(-1).gather(-1, batch.y[:, None])
        believed = ctx.server["credibility"] * (1 - doubt.clamp(min=0).sqrt())
        weight = self.m_max * (believed - self.threshold).relu()
        distance = (weight * (teacher - student)).square().sum(-1)
        return cross_entropies(student, batch.y) + distance

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        public = round.public
        assert public is not None
        _, labels = public.take(np.arange(len(public)))
        answers = public.logits([server["params"] | server["buffers"]])[0]
        return server | {"credibility": credibility(answers, labels.to(answers.device))}
