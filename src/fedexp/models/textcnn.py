"""TextCNN of CFeD (Ma et al., IJCAI 2022; the network is Y. Kim's, EMNLP 2014) with a dropout that
can be repeated."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedexp.core.errors import ConfigError
from fedexp.core.limits import Count, Counts, ShareBelow1
from fedexp.core.private.of_torch import in_transform
from fedexp.data.types import TextShape
from fedexp.models import Model, Output


class TextCNN(Model):
    """Vectors of the characters, convolutions of several heights side by side, each with ReLU and
    maximum over the text, dropout, a linear layer without activation (the features) and a
    classifier.

    Padding is a character like any other. Weights begin Xavier-normal and biases at zero, as in
    CFeD's code.
    """

    reads = "text"
    mixes_examples = False  # no layer looks across the batch
    vectorises = True  # dropout is a function of each example's key

    filters: Count  # of each height
    heights: Counts  # characters that a filter sees
    hidden: Count  # width of the features
    dropout: (
        ShareBelow1  # probability that an output of the convolutions is set to zero in training
    )
    dimension: Count  # of the characters' vectors, unless the data set brings pre-trained ones

    def build(self, shape: TextShape, num_classes: int) -> nn.Module:
        """Return a freshly initialised network for texts of `shape`; its vectors begin as
        pre-trained, if any.

        Raises ConfigError when the texts are shorter than the highest filter.
        """
        if shape.length < max(self.heights):
            raise ConfigError(
                f"model.heights={list(self.heights)}: needs texts of at least {max(self.heights)}"
                f" characters; these have {shape.length} (dataset.length)"
            )
        return TextCNNModule(self, shape, num_classes)


class TextCNNModule(nn.Module):
    """The network that `TextCNN.build` makes."""

    def __init__(self, spec: TextCNN, shape: TextShape, num_classes: int) -> None:
        super().__init__()
        self.length, self.dropout = shape.length, spec.dropout
        width = spec.dimension if shape.vectors is None else shape.vectors.shape[1]
        self.embedding = nn.Embedding(shape.words, width)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(1, spec.filters, (height, width)) for height in spec.heights
        )
        self.hidden = nn.Linear(spec.filters * len(spec.heights), spec.hidden)
        self.classifier = nn.Linear(spec.hidden, num_classes)
        for layer in (*self.convolutions, self.hidden, self.classifier):
            # of a convolution: fan-out is filters * height * width
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        if shape.vectors is not None:
            with torch.no_grad():
                self.embedding.weight.copy_(shape.vectors)

    def forward(self, x: Tensor) -> Output:
        """x int64 [B, length], or [B, length + 1] with the key of the example's dropout, which is
        used in training."""
        words, keys = x[:, : self.length], x[:, self.length :]
        maps = self._convolved(self.embedding(words))
        if self.training and self.dropout and keys.shape[1]:
            maps = maps * kept(keys, maps.shape[1], self.dropout) / (1 - self.dropout)
        features = self.hidden(maps)
        return Output(features, self.classifier(features))

    def _convolved(self, vectors: Tensor) -> Tensor:
        """Return the maximum over the text of every filter's ReLU, [B, filters * heights], for
        vectors [B, length, D].

        A product of all windows with the filters: on a CPU twice as fast as conv1d or conv2d. ReLU
        commutes with max.
        """
        best = []
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            assert convolution.bias is not None
            height = convolution.kernel_size[0]
            last = self.length - height + 1
            # [B, last, height * D]
            windows = torch.cat([vectors[:, k : k + last] for k in range(height)], 2)
            best.append(maxima(windows, convolution.weight.flatten(1), convolution.bias))
        return F.relu(torch.cat(best, 1))


def maxima(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the maximum over the windows of each filter, [B, F].

    windows: [B, W, K], for each text its W windows of K numbers; weight: [F, K]; bias: [F].
    """
    if not torch.is_grad_enabled():
        return F.linear(windows, weight, bias).amax(1)
    if windows.device.type == "cpu" and windows.dtype == weight.dtype and not in_transform():
        return _Maxima.apply(windows, weight, bias)
    return F.linear(windows, weight, bias).max(1).values


class _Maxima(Function):
    """One of W windows gives a filter its maximum and alone has a gradient; products with the
    others are spared.

    Both gradients are sums of rows with weights, for which torch has `embedding_bag`: one of the B
    best windows of a filter, one of the filters that found their maximum in a window. Where the
    gradient is to have a gradient, it is computed by ordinary operations.
    """

    @staticmethod
    def forward(ctx: Any, windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # autocast's are bf16, whose max is slow
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
    """Return for each of so many rows the sum of grad * weight[filter] over the filters [B, F] that
    name it."""
    named, order = rows.flatten().sort(stable=True)
    begins = torch.searchsorted(named, torch.arange(number))
    filters = order % weight.shape[0]
    return F.embedding_bag(
        filters, weight, begins, per_sample_weights=grad.flatten()[order], mode="sum"
    )


def kept(keys: Tensor, units: int, dropout: float) -> Tensor:
    """Return which units dropout keeps, bool [..., units], a pure function of the key int64 [...,
    1] and unit's number.

    A unit is kept when its 64-bit hash is at least `dropout` * 2^64. The hash is that of SplitMix64
    (Steele, Lea and Flood, OOPSLA 2014) at the unit's position of the sequence that starts at the
    hash of the key.
    """
    numbers = torch.arange(1, units + 1, device=keys.device)
    hashed = _mixed(_mixed(keys) + numbers * _signed(0x9E3779B97F4A7C15))
    return hashed >= round(dropout * 2**64) - 2**63


def _mixed(z: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 on 64-bit integers; products wrap around."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift signed integers logically to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Return an unsigned 64-bit number as the signed one of the same bits."""
    return number - (number >> 63 << 64)
