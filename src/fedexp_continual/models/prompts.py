"""Frozen vision transformers with prompts: learned tokens, or learned prefixes of attention.

A token prompt is prepended to the tokens of the first block. A prefix (prefix tuning) consists of
additional keys and values, which are prepended to the keys and values of a block's tokens in the
attention. Prompts are selected for each image by the image's query: the class token that the
network computes without prompts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.errors import ConfigError
from fedexp.models import Output
from fedexp.models.own import Headed

QUERY, PROMPTS = "query", "prompts"  # names of parameters of `Prompted`


class PrefixAttention(nn.Module):
    """The attention of a block, with an optional prefix.

    The attribute `prefix` [B, 2 L, D] contains L keys followed by L values. It is used in the next
    call only.
    """

    def __init__(self, attention: Any):
        super().__init__()
        self.qkv, self.proj, self.num_heads = attention.qkv, attention.proj, attention.num_heads

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Return the output for tokens x [B, n, D].

        timm's blocks also pass options for masks. Vision transformers do not use these options.
        """
        q, k, v = self.qkv(x).chunk(3, -1)
        prefix = vars(self).pop("prefix", None)
        if prefix is not None:
            keys, values = prefix.chunk(2, 1)
            k, v = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (q, k, v))
        # not F.scaled_dot_product_attention, which torch.func.vmap computes client by client
        attention = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.proj((attention @ v).transpose(1, 2).flatten(2))


class Prompted(Headed, ABC):
    """Base class of vision transformers whose prompts and head are trained; the rest is frozen.

    The network must be built like timm's: it has `patch_embed` with the convolution `proj`,
    `cls_token`, `pos_embed`, `norm`, and `blocks`, each with `attn` (`qkv`, `proj`, `num_heads`).
    Its features are the class token. Subclasses add the parameter `prompts` and, if needed, other
    parameters. If `prompts` has length 0, the network returns the output without prompts. If the
    parameter `query` is not empty, [B, D], the network uses these queries instead of computing
    them.

    Raises ConfigError for any other network, or if a block does not exist.
    """

    prompts: nn.Parameter

    def __init__(self, model: nn.Module, layers: Sequence[int], method: str):
        """Freeze the network, and prepare some blocks for prefixes.

        layers: the blocks that can have prefixes, from 0. method: the algorithm's name, for
        messages.
        """
        blocks = getattr(getattr(model, "backbone", None), "blocks", ())
        if len(blocks) and max(layers, default=0) >= len(blocks):
            raise ConfigError(
                f"algorithm: needs prompts in block {max(layers)} (counted from 0), but the model"
                f" has {len(blocks)} blocks"
            )
        if isinstance(model, Headed):
            super().__init__(model.backbone.requires_grad_(False), model.classifier, model.reading)
        if not isinstance(model, Headed) or not self.prepare(layers):
            raise ConfigError(
                f"model: {method} needs a vision transformer built like timm's, with a class token;"
                " use, for example, model=timm model.name=vit_tiny_patch16_224"
            )
        self.width = self.classifier.in_features
        self.query = nn.Parameter(torch.zeros(0, self.width), requires_grad=False)

    @torch.no_grad()
    def prepare(self, layers: Sequence[int]) -> bool:
        """Replace the attention of blocks, and return whether the network is supported.

        It is supported if `embed` and `encode` together compute the features of the original
        network.
        """
        backbone: Any = self.backbone.eval()
        try:
            first = backbone.patch_embed.proj
            side = math.isqrt(backbone.pos_embed.shape[1]) * first.stride[0]
            pixels = torch.linspace(-1, 1, first.in_channels * side * side).to(first.weight)
            image = pixels.view(1, -1, side, side)
            expected = backbone(image)
            for number in layers:
                backbone.blocks[number].attn = PrefixAttention(backbone.blocks[number].attn)
            found = self.encode(self.embed(image))[:, 0]
        except Exception:  # a part is missing, or has another form
            return False
        # on the meta device, values are unknown
        return found.is_meta or torch.allclose(found, expected, atol=1e-4)

    def embed(self, x: Tensor) -> Tensor:
        """Return the tokens of images, [B, 1 + patches, D]; the first is the class token."""
        backbone: Any = self.backbone
        patches = backbone.patch_embed(x).flatten(1, -2)
        start = backbone.cls_token.expand(len(x), -1, -1)
        return torch.cat([start, patches], 1) + backbone.pos_embed

    def encode(self, tokens: Tensor, prefixes: Mapping[int, Tensor] | None = None) -> Tensor:
        """Return the output of the last norm for tokens [B, n, D].

        prefixes: block -> prefix [B, 2 L, D] (see `PrefixAttention`).
        """
        backbone: Any = self.backbone
        for number, block in enumerate(backbone.blocks):
            if prefixes and number in prefixes:
                block.attn.prefix = prefixes[number]
            tokens = block(tokens)
        return backbone.norm(tokens)

    @abstractmethod
    def prompted(self, tokens: Tensor, query: Tensor) -> Tensor:
        """Return the features [B, D] with prompts, for tokens [B, n, D] and queries [B, D]."""

    def forward(self, x: Tensor) -> Output:
        tokens = self.embed(x if self.reading is None else self.reading(x))
        if len(self.prompts) and len(self.query):
            features = self.prompted(tokens, self.query)
        else:
            features = self.encode(tokens)[:, 0]
            if len(self.prompts):
                features = self.prompted(tokens, features)
        return Output(features, self.classifier(features))


def uniform(*shape: int) -> Tensor:
    """Return values drawn uniformly from [0, 0.01], as in the code of L2P and DualPrompt."""
    return 0.01 * torch.rand(shape)


def cosines(query: Tensor, keys: Tensor) -> Tensor:
    """Return the cosine similarities [B, M] of queries [B, D] and keys [M, D]."""
    return F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).T


def take_rows(rows: Tensor, values: Tensor) -> Tensor:
    """Return values[rows], [*rows.shape, ...], for values [M, ...] and integer indices `rows`.

    The rows are selected by a matrix product, because the gradient of indexing is not deterministic
    on a GPU.
    """
    chosen = (rows[..., None] == torch.arange(len(values), device=rows.device)).to(values)
    return (chosen @ values.flatten(1)).unflatten(-1, values.shape[1:])


def in_use(rows: Tensor) -> Tensor:
    """Return a mask, bool [M], of the rows of a parameter [M, ...] that are not all zeros."""
    return rows.flatten(1).square().sum(-1) > 0
