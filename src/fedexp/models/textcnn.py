"""TextCNN of CFeD (Ma et al., IJCAI 2022; the network is Y. Kim's, EMNLP 2014) with reproducible
dropout."""

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


class TextCNN(Model):
    """Character embeddings, parallel convolutions of several heights, dropout, a linear layer and a
    classifier.

    Each convolution is followed by ReLU and the maximum over the text. The linear layer has no
    activation; its outputs are the features. Padding is treated like any other character. Weights
    are initialised Xavier-normal and biases with zeros, as in CFeD's code.
    """

    reads = "text"
    mixes_examples = False  # no layer mixes the examples of a batch
    vectorises = True  # dropout is a function of each example's key

    filters: Count  # number of filters of each height
    heights: Counts  # filter heights in characters
    hidden: Count  # number of features
    dropout: (
        ShareBelow1  # probability that an output of the convolutions is set to zero in training
    )
    dimension: Count  # size of the embeddings, unless the data set provides pre-trained ones

    def build(self, shape: TextShape, num_classes: int) -> nn.Module:
        """Return a freshly initialised network for texts of `shape`.

        The embeddings start from the pre-trained ones, if any. Raises ConfigError if the texts are
        shorter than the highest filter.
        """
        if shape.length < max(self.heights):
            raise ConfigError(
                f"model.heights={list(self.heights)}: needs texts of at least {max(self.heights)}"
                f" characters; the texts have {shape.length} (dataset.length)"
            )
        return TextCNNModule(self, shape, num_classes)


class TextCNNModule(nn.Module):
    """The network that `TextCNN.build` returns."""

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
            # for a convolution, fan-out is filters * height * width
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        if shape.vectors is not None:
            with torch.no_grad():
                self.embedding.weight.copy_(shape.vectors)

    def forward(self, x: Tensor) -> Output:
        """Return the output for x, int64 [B, length] or [B, length + 1].

        The extra column contains the example's dropout key, which is used only in training.
        """
        words, keys = x[:, : self.length], x[:, self.length :]
        maps = self._convolved(self.embedding(words))
        if self.training and self.dropout and keys.shape[1]:
            maps = maps * dropout_mask(keys, maps.shape[1], self.dropout) / (1 - self.dropout)
        features = self.hidden(maps)
        return Output(features, self.classifier(features))

    def _convolved(self, vectors: Tensor) -> Tensor:
        """Return the maximum over the text of each filter's ReLU, [B, filters * heights].

        vectors: [B, length, D]. All windows are multiplied with the filters in one product: on a
        CPU, this is twice as fast as conv1d or conv2d. ReLU commutes with max.
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
    """Return the maximum over the windows for each filter, [B, F].

    windows: [B, W, K], the W windows of each text with K numbers each; weight: [F, K]; bias: [F].
    """
    if not torch.is_grad_enabled():
        return F.linear(windows, weight, bias).amax(1)
    if windows.device.type == "cpu" and windows.dtype == weight.dtype and not in_transform():
        return _Maxima.apply(windows, weight, bias)
    return F.linear(windows, weight, bias).max(1).values


class _Maxima(Function):
    """Maximum over windows whose backward pass skips windows without a gradient.

    For each filter, only the window with the maximum has a gradient. Both gradients are weighted
    sums of rows, computed with torch's `embedding_bag`: for a filter, the sum over its B best
    windows; for a window, the sum over the filters whose maximum it is. If the gradient itself
    needs a gradient, it is computed with ordinary operations.
    """

    @staticmethod
    def forward(ctx: Any, windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # autocast returns bf16, whose max is slow
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
    """Return, for each of `number` rows, the sum of grad * weight[filter] over the filters that
    point to it.

    rows: [B, F], the row that each filter points to.
    """
    named, order = rows.flatten().sort(stable=True)
    begins = torch.searchsorted(named, torch.arange(number))
    filters = order % weight.shape[0]
    return F.embedding_bag(
        filters, weight, begins, per_sample_weights=grad.flatten()[order], mode="sum"
    )


def dropout_mask(keys: Tensor, units: int, dropout: float) -> Tensor:
    """Return which units dropout keeps, bool [..., units].

    The result is a pure function of the key, int64 [..., 1], and the unit's number. A unit is kept
    if its 64-bit hash is at least `dropout` * 2^64. The hash is that of SplitMix64 (Steele, Lea and
    Flood, OOPSLA 2014) at the unit's position in the sequence that starts at the hash of the key.
    """
    numbers = torch.arange(1, units + 1, device=keys.device)
    hashed = _mix(_mix(keys) + numbers * _to_signed(0x9E3779B97F4A7C15))
    return hashed >= round(dropout * 2**64) - 2**63


def _mix(z: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to 64-bit integers; products wrap around."""
    z = (z ^ _shift_right(z, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _to_signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift signed integers logically to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed(number: int) -> int:
    """Return the signed 64-bit number with the same bits as an unsigned one."""
    return number - (number >> 63 << 64)
