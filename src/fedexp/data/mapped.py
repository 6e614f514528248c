"""Images that stay on disk and are read batch by batch.

A data set that is too large for memory is decoded once into a file (see fedexp.data.cache). In
`ImageData`, a `Chosen` then replaces the tensor of images. Indexing a `Chosen` selects images
without reading them; `fetch` reads the pixels of a batch. Only the path of the file is sent to
other ranks.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedexp.core.errors import ConfigError

CRC_BYTES = 4  # of the checksum at the end of a file of decoded images


@dataclass(frozen=True)
class ImageFile:
    """A file of decoded images, uint8 [N, height, width, channels], and their CRC-32 checksum."""

    path: str
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def crc(self, before: int) -> int:
        """Return the checksum at the end of the file, joined with that of earlier inputs."""
        with open(self.path, "rb") as file:
            file.seek(math.prod(self.shape))
            return zlib.crc32(file.read(CRC_BYTES), before)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return a copy of some images. rows: int64 [n], the numbers of the images.

        The file is mapped again for each batch, so that its pages do not stay in memory.
        """
        try:
            pixels = np.memmap(self.path, np.uint8, "r", shape=self.shape)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path}: this file of decoded images cannot be read ({error}). All processes"
                " of a run must have access to the data_dir with this file; a run without this file"
                " decodes the images again"
            ) from error
        return torch.from_numpy(pixels[rows.numpy()])


@dataclass(frozen=True)
class Chosen:
    """A selection of images from several files or tensors, in any order."""

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
        """Return the device to which `fetch` copies images."""
        return self.rows.device

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> "Chosen":
        """Return the images selected by a one-dimensional index, such as a mask or a slice."""
        return replace(self, rows=self.rows[index])

    def to(self, device: torch.device | str) -> "Chosen":
        return replace(self, rows=self.rows.to(device))

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield the pixels of the images in chunks, uint8 [size, height, width, channels] each."""
        for rows in self.rows.split(size):
            yield self.read(rows)

    def read(self, rows: Tensor) -> Tensor:
        """Return the pixels of images, uint8 [..., height, width, channels].

        rows: int64 [...], the numbers of the images, counted over all parts. The result is on the
        device of `rows`.
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
        """Read the images of a batch. This also works under torch.func.vmap.

        index: int64 [..., B], positions in this selection.

        Returns (images, positions), uint8 [n, height, width, channels] and int64 [..., B]. The
        image at index[i] is images[positions[i]].
        """
        pixels = Fetch.apply(self, self.rows[index])
        positions = torch.arange(index.numel(), device=index.device).view(index.shape)
        return pixels.flatten(0, index.dim() - 1), positions


class Fetch(torch.autograd.Function):
    """`Chosen.read` for torch.func.vmap: the batches of all clients are read at once."""

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


def crc_of_inputs(stored: Stored, before: int) -> int:
    """Return the CRC-32 checksum of inputs or labels, continued from that of earlier ones.

    A file of decoded images ends with the checksum of its images, so they are not read.
    """
    if isinstance(stored, Tensor):
        return zlib.crc32(np.ascontiguousarray(stored.numpy()).data, before)
    for part in stored.parts:
        before = crc_of_inputs(part, before) if isinstance(part, Tensor) else part.crc(before)
    return crc_of_inputs(stored.rows, before)


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
