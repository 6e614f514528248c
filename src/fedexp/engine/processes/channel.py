"""Send Python values that contain tensors between two processes.

A parcel is a file in memory, written by torch.save. Between processes on the same machine, the
file descriptor is sent through a socket, and the receiver maps the file. So a model that is sent
to N processes is stored in memory only once. The files have no names and are not limited by the
size of a shared-memory mount. They disappear when the last process closes them. Between machines,
the contents of the file are sent.
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

LENGTH = 8  # number of bytes that encode the size of a parcel in a NetworkChannel


class _Pickler(pickle.Pickler):
    """Pickler that writes only the elements of a tensor, without its gradient.

    By default, torch.save writes the whole storage of a tensor, even if the tensor is a small view.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        own = value.untyped_storage().nbytes() <= value.nbytes
        plain = value.detach() if own else value.detach().clone()
        return plain.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def pack(value: Any) -> BinaryIO:
    """Return a parcel that contains a value. Tensors keep their dtypes and strides."""
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
    """One end of a connection between two processes on the same machine.

    The methods `send` and `receive` raise EOFError or ConnectionError if the other process has
    ended.
    """

    connection: socket.socket

    def send(self, parcel: BinaryIO) -> None:
        socket.send_fds(self.connection, [b"."], [parcel.fileno()])

    def send_value(self, value: Any) -> None:
        with pack(value) as parcel:
            self.send(parcel)

    def receive(self) -> Any:
        """Return the next value, with its tensors on the CPU.

        The value is unpickled, so the other process must be trusted.
        """
        mark, descriptors, _, _ = socket.recv_fds(self.connection, 1, 1)
        if not mark:
            raise EOFError("the other process has closed the connection")
        with os.fdopen(descriptors[0], "rb") as file:
            # The tensors are mapped from the file, which the processes share until they write.
            return torch.load(f"/dev/fd/{file.fileno()}", "cpu", weights_only=False, mmap=True)

    def close(self) -> None:
        self.connection.close()


class NetworkChannel(Channel):
    """One end of a TCP connection between two processes."""

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
                raise EOFError("the other process has closed the connection")
            rest = rest[count:]
        return content
