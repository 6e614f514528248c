"""Send Python values with tensors between two processes.

A parcel is a file in memory, written by torch.save. On one machine, its descriptor is sent through
a socket and the receiver maps the file, so a model that is sent to N processes is in memory only
once. The files have no name and are not limited by the size of a shared-memory mount. They
disappear with the last process that holds them. To another machine, the file's bytes are sent.
"""

import io
import os
import pickle
import socket
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

LENGTH = 8  # bytes of a parcel's size, which NetworkChannel sends before the parcel


class _Pickler(pickle.Pickler):
    """A pickler that writes only a tensor's elements, without gradient.

    torch.save would write all of the memory that the tensor is a view of.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        own = value.untyped_storage().nbytes() <= value.nbytes
        plain = value.detach() if own else value.detach().clone()
        return plain.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def pack(value: Any) -> BinaryIO:
    """Return a parcel with a value, whose tensors keep their dtypes and strides."""
    file: BinaryIO
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("fedexp", os.MFD_CLOEXEC), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    torch.save(value, file, pickle_module=SimpleNamespace(__name__=__name__, Pickler=_Pickler))
    file.flush()
    return file


@dataclass(frozen=True)
class Channel:
    """One end of a connection on one machine.

    If the other process has ended, `send` and `receive` raise EOFError or ConnectionError.
    """

    connection: socket.socket

    def send(self, parcel: BinaryIO) -> None:
        socket.send_fds(self.connection, [b"."], [parcel.fileno()])

    def send_value(self, value: Any) -> None:
        with pack(value) as parcel:
            self.send(parcel)

    def receive(self) -> Any:
        """Return the next value, with its tensors on the CPU.

        Only a process of the same user may be at the other end, because values are unpickled.
        """
        mark, descriptors, _, _ = socket.recv_fds(self.connection, 1, 1)
        if not mark:
            raise EOFError("the other end is closed")
        with os.fdopen(descriptors[0], "rb") as file:
            # Tensors stay in the file, which processes share until they write to it.
            return torch.load(f"/dev/fd/{file.fileno()}", "cpu", weights_only=False, mmap=True)

    def close(self) -> None:
        self.connection.close()


class NetworkChannel(Channel):
    """One end of a TCP connection."""

    def send(self, parcel: BinaryIO) -> None:
        size = parcel.seek(0, io.SEEK_END)
        self.connection.sendall(size.to_bytes(LENGTH))
        self.connection.sendfile(parcel)

    def receive(self) -> Any:
        size = int.from_bytes(self.receive_bytes(LENGTH))
        return torch.load(io.BytesIO(self.receive_bytes(size)), "cpu", weights_only=False)

    def receive_bytes(self, size: int) -> bytearray:
        """Return the next `size` bytes."""
        content = bytearray(size)
        rest = memoryview(content)
        while rest:
            count = self.connection.recv_into(rest)
            if not count:
                raise EOFError("the other end is closed")
            rest = rest[count:]
        return content
