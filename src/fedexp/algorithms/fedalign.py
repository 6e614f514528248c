"""FedAlign: a client aligns the last stage of its model with a narrower version of this stage.

The alignment is a regulariser, meant to make the last stage smoother. The server averages as in
FedAvg.

M. Mendieta et al., "Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning",
CVPR 2022, Eq. (4)-(6), and the authors' code. FedNTD's Table 13 compares with this method. f_in and
f_out are the input and output of the last stage. n_in contains the first fraction `width` of f_in's
channels, treated as a constant. n_out is the output for n_in of the narrow stage, which has the
first fraction `width` of the stage's channels. s(a, b) is the spectral norm of the "transmitting
matrix" of two feature maps a and b. The loss is
    L = CE + mu * (CE / L_lip) * L_lip,   L_lip = MSE( s(n_in, n_out), s(f_in, f_out) )
The quotient CE / L_lip and s(f_in, f_out) are treated as constants in the gradient. Gradients are
clipped at norm `clip`.

To compute s, a is average-pooled to the size h x w of b, and X = A B^T / (h w), where A and B are a
and b as matrices [channels, h w]. After 10 power iterations m <- X X^T m / ||m||, which start from
a vector of ones, s = sqrt(||m||) estimates the square root of the largest eigenvalue. The model
must have stages (`models.Staged`). The CNNs and model=resnet56_bottleneck, which Table 13 uses,
have stages. The last stage of a CNN is its last convolution.
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.algorithms.base import FedAvg, cross_entropies, masked_mean
from fedexp.algorithms.interfaces import Batch, Context, Federation, Network
from fedexp.algorithms.optimizers import clipped
from fedexp.core.errors import ConfigError
from fedexp.core.limits import NonNegative, PositiveShare
from fedexp.core.tree import Params
from fedexp.models import Staged, slim_channels

log = logging.getLogger("fedexp")
ITERATIONS, SMALLEST = 10, 1e-12
NORMED = "model=resnet56_bottleneck or model.batch_norm=true"


def spectral_norm(first: Tensor, second: Tensor) -> Tensor:
    """Return the spectral norm s(a, b) of two feature maps for each example, [B].

    first: a, [B, C1, H, W]; second: b, [B, C2, h, w], with h <= H and w <= W.
    """
    pixels = second.shape[-2] * second.shape[-1]
    a = F.adaptive_avg_pool2d(first, (second.shape[-2], second.shape[-1])).flatten(2)
    matrix = a @ second.flatten(2).transpose(1, 2) / pixels  # [B, C1, C2]
    vector = torch.ones_like(matrix[..., :1])
    norm = vector[:, :1]
    for _ in range(ITERATIONS):
        product = matrix @ (matrix.transpose(1, 2) @ vector)
        norm = (product * product).sum(1, keepdim=True).clamp(min=SMALLEST**2).sqrt()
        vector = product / norm
    return norm[:, 0, 0].sqrt()


class FedAlign(FedAvg):
    inputs = ("images",)
    hint = f"FedAlign learns less if the last stage has no batch norm; use {NORMED}"

    mu: NonNegative  # weight of the smoothing relative to the cross-entropy
    width: PositiveShare  # fraction of channels in the narrow last stage
    clip: NonNegative  # maximum norm of the gradient; 0: no clipping

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        if not isinstance(module, Staged):
            raise ConfigError(
                "algorithm=fedalign: this model has no last stage that can be narrowed; use"
                " model=resnet56_bottleneck (the paper's model) or a CNN"
            )
        if not any(isinstance(part, nn.BatchNorm2d) for part in module.modules()):
            log.warning("FedAlign learns less if the last stage has no batch norm; use %s", NORMED)
        module.keeps_maps = True
        return module

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        output = net(params, batch.x)
        loss = masked_mean(cross_entropies(output.logits, batch.y), batch.mask)
        before, after = (m.detach() for m in output.maps)
        part = before[:, : slim_channels(before.shape[1], self.width)]
        narrow = spectral_norm(part, net.slim(params, part, self.width, batch.mask))
        lipschitz = masked_mean((narrow - spectral_norm(before, after)) ** 2, batch.mask)
        scale = (loss / lipschitz.clamp(min=SMALLEST)).detach()
        return loss + self.mu * scale * lipschitz

    def transform_grads(self, grads: Params, params: Params, batch: Batch, ctx: Context) -> Params:
        return clipped(grads, self.clip)
