"""LEAF's recurrent network for next-character prediction.

See Caldas et al., arXiv 1812.01097; in LEAF's code, the network is shakespeare/stacked_lstm.
"""

import torch
from torch import nn

from fedexp.core.limits import Count
from fedexp.data.types import TextShape
from fedexp.models import Model, Output
from fedexp.models.textcnn import make_embedding


class LSTM(Model):
    """A network of character embeddings, LSTM layers and a classifier.

    The input of the classifier is the output of the top layer at the last character.
    """

    reads = "text"
    mixes_examples = False
    vectorises = False  # torch.func.vmap does not support torch's LSTM

    dimension: Count  # size of the embeddings, unless the data set has pre-trained embeddings
    hidden: Count  # number of units per LSTM layer
    layers: Count  # number of LSTM layers

    def build(self, shape: TextShape, num_classes: int) -> nn.Module:
        """Return a newly initialised network for texts of `shape`.

        If the data set has pre-trained embeddings, the network starts from them.
        """
        return LSTMModule(self, shape, num_classes)


class LSTMModule(nn.Module):
    """The network that `LSTM.build` returns."""

    def __init__(self, spec: LSTM, shape: TextShape, num_classes: int) -> None:
        super().__init__()
        self.length = shape.length
        self.embedding = make_embedding(shape, spec.dimension)
        width = self.embedding.embedding_dim
        self.recurrent = nn.LSTM(width, spec.hidden, spec.layers, batch_first=True)
        self.classifier = nn.Linear(spec.hidden, num_classes)

    def forward(self, x: torch.Tensor) -> Output:
        """Return the output for texts x, int64 [B, length] or [B, length + 1].

        An additional last column contains dropout keys, which this network ignores.
        """
        outputs, _ = self.recurrent(self.embedding(x[:, : self.length]))
        features = outputs[:, -1]
        return Output(features, self.classifier(features))
