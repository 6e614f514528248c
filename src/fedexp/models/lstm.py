"""LEAF's recurrent network for next-character prediction (Caldas et al., arXiv 1812.01097;
shakespeare/stacked_lstm)."""

import torch
from torch import nn

from fedexp.core.limits import Count
from fedexp.data.types import TextShape
from fedexp.models import Model, Output


class LSTM(Model):
    """Character embeddings, LSTM layers, and a classifier on the top layer's last output."""

    reads = "text"
    mixes_examples = False  # no layer mixes the examples of a batch
    vectorises = False  # torch.func.vmap does not support torch's LSTM

    dimension: Count  # size of the embeddings, unless the data set provides pre-trained ones
    hidden: Count  # units per layer
    layers: Count

    def build(self, shape: TextShape, num_classes: int) -> nn.Module:
        """Return a freshly initialised network for texts of `shape`.

        The embeddings start from the pre-trained ones, if any.
        """
        return LSTMModule(self, shape, num_classes)


class LSTMModule(nn.Module):
    """The network that `LSTM.build` returns."""

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
        """Return the output for x, int64 [B, length] or [B, length + 1].

        The extra column contains the example's dropout key; this network ignores it.
        """
        outputs, _ = self.recurrent(self.embedding(x[:, : self.length]))
        features = outputs[:, -1]
        return Output(features, self.classifier(features))
