"""Python values with tensors between two processes of one machine, without copying the tensors
through a pipe.

A parcel is a short pickle, which goes through a socket, and a file in memory with the tensors,
whose descriptor goes with it. The receiver maps the file: a model that is sent to N processes is in
memory once. The files have no name and no size limit of a shared-memory mount, and vanish with the
last process that holds them.
"""

import io
import mmap
import os
import pickle
import socket
import struct
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

ALIGNMENT = 64  # bytes, for vector instructions
HEADER = struct.Struct("<QQ")  # bytes of the pickle, bytes of the tensors


@dataclass(frozen=True)
class Parcel:
    """A value ready to be sent, once or to several processes."""

    pickled: bytes
    size: int  # bytes of the tensors
    descriptor: int | None  # of the file that holds them; None: no tensors

    @classmethod
    def pack(cls, value: Any) -> "Parcel":
        """Pack a value: tensors keep their values, dtype and strides, and arrive on the CPU without
        gradient."""
        buffer = io.BytesIO()
        pickler = TensorPickler(buffer)
        pickler.dump(value)
        if not pickler.size:
            return cls(buffer.getvalue(), 0, None)
        descriptor = _memory_file(pickler.size)
        memory = mmap.mmap(descriptor, pickler.size)
        for tensor, place in pickler.tensors:
            place.view(memory).copy_(tensor.detach())
        return cls(buffer.getvalue(), pickler.size, descriptor)

    def unpack(self) -> Any:
        """Return the value; its tensors lie in the file, shared with everyone who has it until they
        are written to. Closes the descriptor."""
        memory = (
            None
            if self.descriptor is None
            else mmap.mmap(self.descriptor, self.size, access=mmap.ACCESS_COPY)
        )
        self.close()
        return _Unpickler(io.BytesIO(self.pickled), memory).load()

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


class Channel:
    """One end of a connection. A process that has died shows as EOFError or ConnectionError."""

    def __init__(self, connection: socket.socket):
        self.connection = connection

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, parcel: Parcel) -> None:
        header = HEADER.pack(len(parcel.pickled), parcel.size)
        descriptors = [] if parcel.descriptor is None else [parcel.descriptor]
        socket.send_fds(self.connection, [header], descriptors)
        self.connection.sendall(parcel.pickled)

    def send_value(self, value: Any) -> None:
        parcel = Parcel.pack(value)
        try:
            self.send(parcel)
        finally:
            parcel.close()

    def receive(self) -> Any:
        header, descriptors, _, _ = socket.recv_fds(self.connection, HEADER.size, 1)
        header += self._read(HEADER.size - len(header))
        length, size = HEADER.unpack(header)
        return Parcel(self._read(length), size, descriptors[0] if descriptors else None).unpack()

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = self.connection.recv(min(count, 1 << 20))
            if not part:
                raise EOFError("the other end is closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self.connection.close()


@dataclass(frozen=True)
class Place:
    """The place and the layout of a tensor in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # bytes
    count: int  # elements, more than none

    def view(self, memory: mmap.mmap) -> torch.Tensor:
        flat = torch.frombuffer(memory, dtype=self.dtype, count=self.count, offset=self.offset)
        return flat.as_strided(self.shape, self.strides)


class TensorPickler(pickle.Pickler):
    """A pickler that leaves the tensors out and gives each a place in the file."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[torch.Tensor, Place]] = []
        self.size = 0

    def persistent_id(self, value: Any) -> Any:
        # Parameters are pickled as what they are, around a plain tensor. Empty tensors need no
        # place.
        if type(value) is not torch.Tensor or not value.numel():
            return None
        strides = (
            value.stride() if _is_dense(value) else torch.empty(value.shape, device="meta").stride()
        )
        place = Place(value.dtype, tuple(value.shape), tuple(strides), self.size, value.numel())
        self.tensors.append((value, place))
        self.size += -(-value.numel() * value.element_size() // ALIGNMENT) * ALIGNMENT
        return place


class _Unpickler(pickle.Unpickler):
    """An unpickler that only ever reads what this user's own processes have sent."""

    def __init__(self, file: io.BytesIO, memory: mmap.mmap | None):
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, place: Any) -> torch.Tensor:
        assert self.memory is not None
        return place.view(self.memory)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory, each once, in whatever order
    (channels-last is such an order)."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _memory_file(size: int) -> int:
    """Return a descriptor of an unnamed file of `size` bytes, in memory where the system has such
    files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fedexp", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
