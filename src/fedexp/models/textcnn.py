"""The TextCNN that CFeD uses, with reproducible dropout.

See Ma et al., IJCAI 2022 (CFeD). The network was introduced by Y. Kim, EMNLP 2014.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedexp.core.errors import ConfigError
from fedexp.core.limits import Count, Counts, ShareBelow1
from fedexp.core.private.torch_internals import in_transform
from fedexp.data.types import TextShape
from fedexp.models import Model, Output

# constants of SplitMix64 as signed 64-bit numbers
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class TextCNN(Model):
    """A network of character embeddings, parallel convolutions, a linear layer and a classifier.

    The convolutions have different filter heights. Each of them is followed by ReLU and the maximum
    over the text. Dropout is applied before the linear layer. The outputs of the linear layer,
    without an activation function, are the features. Padding is treated like any other character.
    Weights are initialised from the Xavier normal distribution and biases with zeros, as in CFeD's
    code.
    """

    reads = "text"
    mixes_examples = False
    vectorises = True  # dropout is a function of each example's key, so vmap supports it

    filters: Count  # number of filters for each height
    heights: Counts  # filter heights in characters
    hidden: Count  # number of features
    dropout: (
        ShareBelow1  # probability that an output of the convolutions is set to zero in training
    )
    dimension: Count  # size of the embeddings, unless the data set has pre-trained embeddings

    def build(self, shape: TextShape, num_classes: int) -> nn.Module:
        """Return a newly initialised network for texts of `shape`.

        If the data set has pre-trained embeddings, the network starts from them. Raises ConfigError
        if the texts are shorter than the largest filter height.
        """
        if shape.length < max(self.heights):
            raise ConfigError(
                f"model.heights={list(self.heights)}: needs texts of at least {max(self.heights)}"
                f" characters, but the texts have {shape.length} (dataset.length)"
            )
        return TextCNNModule(self, shape, num_classes)


class TextCNNModule(nn.Module):
    """The network that `TextCNN.build` returns."""

    def __init__(self, spec: TextCNN, shape: TextShape, num_classes: int) -> None:
        super().__init__()
        self.length, self.dropout = shape.length, spec.dropout
        width = spec.dimension if shape.vectors is None else shape.vectors.shape[1]
        self.embedding = nn.Embedding(shape.words, width)
        if shape.vectors is not None:
            with torch.no_grad():
                self.embedding.weight.copy_(shape.vectors)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(1, spec.filters, (height, width)) for height in spec.heights
        )
        self.hidden = nn.Linear(spec.filters * len(spec.heights), spec.hidden)
        self.classifier = nn.Linear(spec.hidden, num_classes)
        for layer in (*self.convolutions, self.hidden, self.classifier):
            # for a convolution, fan-out is filters * height * width
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Output:
        """Return the output for texts x, int64 [B, length] or [B, length + 1].

        An additional last column contains dropout keys, which are used only in training.
        """
        words, keys = x[:, : self.length], x[:, self.length :]
        maps = self._convolved(self.embedding(words))
        if self.training and self.dropout and keys.shape[1]:
            maps = maps * dropout_mask(keys, maps.shape[1], self.dropout) / (1 - self.dropout)
        features = self.hidden(maps)
        return Output(features, self.classifier(features))

    def _convolved(self, vectors: Tensor) -> Tensor:
        """Return each filter's maximum over the text after ReLU, [B, filters * heights].

        For each filter height, all windows of the text are multiplied by all filters in one matrix
        product. On a CPU, this is twice as fast as conv1d or conv2d. ReLU is applied after the
        maximum, which gives the same result.

        vectors: embeddings, [B, length, D].
        """
        best = []
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            assert convolution.bias is not None
            height = convolution.kernel_size[0]
            last = self.length - height + 1
            # [B, last, height * D]
            windows = torch.cat([vectors[:, k : k + last] for k in range(height)], 2)
            best.append(max_over_windows(windows, convolution.weight.flatten(1), convolution.bias))
        return F.relu(torch.cat(best, 1))


def max_over_windows(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the maximum over the windows of a text for each filter, [B, F].

    windows: [B, W, K], the W windows of each text, with K values each.
    weight, bias: [F, K] and [F], for F filters.
    """
    if not torch.is_grad_enabled():
        return F.linear(windows, weight, bias).amax(1)
    if windows.device.type == "cpu" and windows.dtype == weight.dtype and not in_transform():
        return _Maxima.apply(windows, weight, bias)
    return F.linear(windows, weight, bias).max(1).values


class _Maxima(Function):
    """Maximum over windows. The backward pass skips windows without a gradient.

    For each text and filter, only the window with the maximum has a gradient. The gradient of a
    filter is the weighted sum of the best windows of all texts. The gradient of a window is the
    weighted sum of the filters that have their maximum there. Both sums are computed with torch's
    `embedding_bag`. If the gradient must itself be differentiable, it is computed with ordinary
    operations.
    """

    @staticmethod
    def forward(ctx: Any, windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # autocast returns bf16, for which max is slow
        products = F.linear(windows, weight, bias).to(windows.dtype)
        values, places = products.max(1)
        ctx.save_for_backward(windows, weight, places)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        windows, weight, places = ctx.saved_tensors
        batch, number, _ = windows.shape
        if torch.is_grad_enabled():
            each = torch.zeros_like(places[:, None], dtype=grad.dtype).expand(-1, number, -1)
            each = each.scatter(1, places[:, None], grad[:, None])
            return each @ weight, torch.einsum("bwf,bwk->fk", each, windows), grad.sum(0)
        rows = places + number * torch.arange(batch)[:, None]
        of_windows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_windows = _by_row(rows, grad, weight, batch * number).view_as(windows)
        if ctx.needs_input_grad[1]:
            best, parts = rows.t().contiguous(), grad.t().contiguous()  # [F, B]
            of_weight = F.embedding_bag(
                best, windows.flatten(0, 1), per_sample_weights=parts, mode="sum"
            )
        return of_windows, of_weight, grad.sum(0)


def _by_row(rows: Tensor, grad: Tensor, weight: Tensor, number: int) -> Tensor:
    """Return the gradients of all windows: the sums of grad * weight over filters that select them.

    rows: [B, F], the row number of the window that each filter selects in each text.
    number: number of windows in all texts.
    """
    named, order = rows.flatten().sort(stable=True)
    begins = torch.searchsorted(named, torch.arange(number))
    filters = order % weight.shape[0]
    return F.embedding_bag(
        filters, weight, begins, per_sample_weights=grad.flatten()[order], mode="sum"
    )


def dropout_mask(keys: Tensor, units: int, dropout: float) -> Tensor:
    """Return a mask of the units that dropout keeps, bool [..., units].

    The result depends only on the keys. A unit is kept if its 64-bit hash is at least `dropout` *
    2^64. The hashes of the units are the output of the random generator SplitMix64 (Steele, Lea and
    Flood, OOPSLA 2014) with the hash of the key as its seed.

    keys: int64 [..., 1].
    units: number of units.
    dropout: probability that a unit is set to zero.
    """
    numbers = torch.arange(1, units + 1, device=keys.device)
    hashed = _mix(_mix(keys) + numbers * GOLDEN)
    return hashed >= round(dropout * 2**64) - 2**63


def _mix(z: Tensor) -> Tensor:
    """Apply the hash function of SplitMix64 to 64-bit integers (products overflow as intended)."""
    z = (z ^ _shift_right(z, 30)) * MIX[0]
    z = (z ^ _shift_right(z, 27)) * MIX[1]
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift signed integers to the right and fill with zeros (a logical shift)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
