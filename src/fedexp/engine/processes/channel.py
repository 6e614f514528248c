"""Send Python values with tensors between two processes on one machine, without copying tensors.

A parcel is a file in memory, written by torch.save, whose descriptor is sent through a socket. The
receiver maps the file, so a model that is sent to N processes is in memory only once. The files
have no name and are not limited by the size of a shared-memory mount. They disappear with the last
process that holds them.
"""

import os
import pickle
import socket
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch


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


def save(value: Any, file: BinaryIO) -> None:
    """Write a value. Its tensors keep their values, dtypes and strides."""
    torch.save(value, file, pickle_module=SimpleNamespace(__name__=__name__, Pickler=_Pickler))


def load(file: Any, mapped: bool = False) -> Any:
    """Return a value from one of this user's processes, with its tensors on the CPU.

    mapped: whether tensors stay in the file, given by its path. They are shared with all processes
    that have the file until they are written to.
    """
    return torch.load(file, "cpu", weights_only=False, mmap=mapped)


def pack(value: Any) -> BinaryIO:
    """Return a file with a value, which can be sent to several processes."""
    file: BinaryIO
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("fedexp", os.MFD_CLOEXEC), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    save(value, file)
    file.flush()
    return file


@dataclass(frozen=True)
class Channel:
    """One end of a connection. If the other process dies, EOFError or ConnectionError is raised."""

    connection: socket.socket

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, parcel: BinaryIO) -> None:
        socket.send_fds(self.connection, [b"."], [parcel.fileno()])

    def send_value(self, value: Any) -> None:
        with pack(value) as parcel:
            self.send(parcel)

    def receive(self) -> Any:
        """Return the next value."""
        mark, descriptors, _, _ = socket.recv_fds(self.connection, 1, 1)
        if not mark:
            raise EOFError("the other end is closed")
        with os.fdopen(descriptors[0], "rb") as file:
            return load(f"/dev/fd/{file.fileno()}", mapped=True)

    def close(self) -> None:
        self.connection.close()
