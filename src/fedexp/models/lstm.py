"""The recurrent network of LEAF for the next character (Caldas et al., arXiv 1812.01097;
shakespeare/stacked_lstm)."""

import torch
from torch import nn

from fedexp.core.limits import Count
from fedexp.data.types import TextShape
from fedexp.models import Model, Output


class LSTM(Model):
    """Vectors of the characters, layers of an LSTM, and a classifier on the last output of the
    uppermost one."""

    reads = "text"
    mixes_examples = False  # no layer looks across the batch
    vectorises = False  # torch.func.vmap does not know torch's LSTM

    dimension: Count  # of the characters' vectors, unless the data set brings pre-trained ones
    hidden: Count  # units of each layer
    layers: Count

    def build(self, shape: TextShape, num_classes: int) -> nn.Module:
        """Return a freshly initialised network for texts of `shape`; its vectors begin as
        pre-trained, if any."""
        return LSTMModule(self, shape, num_classes)


class LSTMModule(nn.Module):
    """The network that `LSTM.build` makes."""

    def __init__(self, spec: LSTM, shape: TextShape, num_classes: int) -> None:
        super().__init__()
        self.length = shape.length
        width = spec.dimension if shape.vectors is None else shape.vectors.shape[1]
        self.embedding = nn.Embedding(shape.words, width)
        self.recurrent = nn.LSTM(width, spec.hidden, spec.layers, batch_first=True)
        self.classifier = nn.Linear(spec.hidden, num_classes)
        if shape.vectors is not None:
            with torch.no_grad():
                self.embedding.weight.copy_(shape.vectors)

    def forward(self, x: torch.Tensor) -> Output:
        """x int64 [B, length], or [B, length + 1] with the key of the example's dropout, which this
        network does not have."""
        outputs, _ = self.recurrent(self.embedding(x[:, : self.length]))
        features = outputs[:, -1]
        return Output(features, self.classifier(features))
