"""Send Python values that contain tensors between two processes.

A parcel is a file in memory, written by torch.save. Its file descriptor is sent through a socket,
and the receiver maps the file into its memory. A model that is sent to N processes is therefore
stored only once. The files have no names and are not limited by the size of a shared-memory mount.
They disappear when the last process closes them.
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
    """Pickler that writes only the elements of a tensor, and not the gradient.

    By default, torch.save writes the whole storage of a tensor, even if the tensor is a small view.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        own = value.untyped_storage().nbytes() <= value.nbytes
        plain = value.detach() if own else value.detach().clone()
        return plain.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def pack(value: Any) -> BinaryIO:
    """Return a parcel (see above) that contains a value. Tensors keep their dtypes and strides."""
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
    """One end of a connection between two processes.

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
        """Return the next value. Tensors in this value are on the CPU.

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
