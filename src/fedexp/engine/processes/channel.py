"""Python values with tensors between two processes of one machine, without copying the tensors
through a pipe.

A parcel is a file in memory as torch.save writes it, whose descriptor goes through a socket. The
receiver maps the file: a model that is sent to N processes is in memory once. The files have no
name and no size limit of a shared-memory mount, and vanish with the last process that holds them.
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
    """A pickler that writes of each tensor its own elements, where torch.save would write all of
    the memory that it is a view of, and no gradient."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        own = value.untyped_storage().nbytes() <= value.nbytes
        plain = value.detach() if own else value.detach().clone()
        return plain.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def save(value: Any, file: BinaryIO) -> None:
    """Write a value; its tensors keep their values, dtype and strides."""
    torch.save(value, file, pickle_module=SimpleNamespace(__name__=__name__, Pickler=_Pickler))


def load(file: Any, mapped: bool = False) -> Any:
    """Return a value from this user's own processes, with its tensors on the CPU. mapped: they stay
    in the file, given by its path, shared with everyone who has it until they are written to."""
    return torch.load(file, "cpu", weights_only=False, mmap=mapped)


def pack(value: Any) -> BinaryIO:
    """Return a file with a value, ready to be sent to several processes."""
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
    """One end of a connection. A process that has died shows as EOFError or ConnectionError."""

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
