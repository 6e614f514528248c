"""ReLU of 2 x 2 max-pooling, which is a good part of a step of a small network."""

import torch
import torch.nn.functional as F

from fedexp.core.private.of_torch import in_transform


def pooled(x: torch.Tensor) -> torch.Tensor:
    """ReLU of 2 x 2 max-pooling of x [N, C, H, W]: ReLU is monotone, so it commutes with max, 4
    times fewer of them."""
    if x.shape[-1] % 2 == 0 and x.shape[-2] % 2 == 0:
        ordinary = torch.is_grad_enabled() or in_transform() or x.device.type != "cpu"
        if not ordinary and x.is_contiguous(memory_format=torch.channels_last):
            return _maxima(x).relu_()
    return F.relu(F.max_pool2d(x, 2, 2))


def _maxima(x: torch.Tensor) -> torch.Tensor:
    """torch's pooling notes where each maximum was, which only a gradient needs: a third of the
    time without."""
    n, c, h, w = x.shape
    rows = x.permute(0, 2, 3, 1).view(n, h // 2, 2, w // 2, 2 * c)
    pairs = torch.maximum(rows[:, :, 0], rows[:, :, 1]).view(n, h // 2, w // 2, 2, c)
    return torch.maximum(pairs[..., 0, :], pairs[..., 1, :]).permute(0, 3, 1, 2)
