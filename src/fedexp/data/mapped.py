"""Images that stay on disk: files of decoded images, which are read batch by batch.

A data set larger than memory is decoded once into such a file (see fedexp.data.cache). `Chosen`
takes the place of the tensor of images in `ImageData`: indexing it chooses images without reading
them, and only `fetch` reads the pixels of a batch. Files are sent to worker processes as paths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedexp.core.errors import ConfigError


@dataclass(frozen=True)
class ImageFile:
    """A file of decoded images, uint8 [N, height, width, channels], without a header."""

    path: str
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return a copy of some images. rows: int64 [n].

        The file is mapped anew for each batch, so that the process does not hold pages of it.
        """
        try:
            pixels = np.memmap(self.path, np.uint8, "r", shape=self.shape)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path}: this file of decoded images cannot be read ({error}). All processes"
                " of a run need the data_dir in which the run has stored it; a run without this"
                " file decodes the images again"
            ) from error
        return torch.from_numpy(pixels[rows.numpy()])


@dataclass(frozen=True)
class Chosen:
    """Some of the images of several files or tensors, in any order."""

    parts: tuple[ImageFile | Tensor, ...]  # each uint8 [N, height, width, channels]
    rows: Tensor  # int64 [n], numbers of the images, counted over all parts

    @classmethod
    def all_of(cls, images: ImageFile | Tensor) -> "Chosen":
        return cls((images,), torch.arange(len(images)))

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self.rows), *self.parts[0].shape[1:]])

    @property
    def device(self) -> torch.device:
        """Return the device that `fetch` copies images to."""
        return self.rows.device

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> "Chosen":
        """Return the images that an index of one dimension chooses, such as a mask or a slice."""
        return replace(self, rows=self.rows[index])

    def to(self, device: torch.device | str) -> "Chosen":
        return replace(self, rows=self.rows.to(device))

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield the pixels of `size` images at a time, uint8 [., height, width, channels]."""
        for rows in self.rows.split(size):
            yield self.read(rows)

    def read(self, rows: Tensor) -> Tensor:
        """Return the pixels of the images with these numbers, on the device of the numbers.

        rows: int64 [...], counted over all parts.
        """
        wanted = rows.flatten().cpu()
        edges = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        places = torch.bucketize(wanted, edges, right=True)
        pixels = torch.empty(len(wanted), *self.shape[1:], dtype=torch.uint8)
        for number in places.unique().tolist():
            mine = places == number
            first = edges[number] - len(self.parts[number])
            pixels[mine] = self.parts[number][wanted[mine] - first]
        return pixels.view(*rows.shape, *self.shape[1:]).to(rows.device)

    def fetch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Read the images of a batch; this also works under torch.func.vmap.

        index: int64 [..., B]. Returns (images, positions), uint8 [n, height, width, channels] and
        int64 [..., B]: images[positions[i]] is the image of index[i].
        """
        pixels = Fetch.apply(self, self.rows[index])
        positions = torch.arange(index.numel(), device=index.device).view(index.shape)
        return pixels.flatten(0, index.dim() - 1), positions


class Fetch(torch.autograd.Function):
    """`Chosen.read` as a function for torch.func.vmap, which reads all batches at once."""

    @staticmethod
    def forward(images: Chosen, rows: Tensor) -> Tensor:
        return images.read(rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, images: Chosen, rows: Tensor) -> tuple[Tensor, int]:
        return Fetch.apply(images, rows.movedim(in_dims[1], 0)), 0


Stored: TypeAlias = Tensor | Chosen


def join(parts: Sequence[Stored]) -> Stored:
    """Return the images of all parts, one after the other."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    files: list[ImageFile | Tensor] = []
    rows, start = [], 0
    for part in parts:
        chosen = Chosen.all_of(part) if isinstance(part, Tensor) else part
        files += chosen.parts
        rows.append(chosen.rows + start)
        start += sum(len(each) for each in chosen.parts)
    return Chosen(tuple(files), torch.cat(rows))
