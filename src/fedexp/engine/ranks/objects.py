"""Send Python values between ranks, and share large values among the ranks of a machine.

A value is pickled without the elements of its tensors. They follow one tensor at a time, directly
from and into memory. gloo carries them, also between GPUs: NCCL refuses two ranks on one GPU.
"""

import hmac
import io
import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

FOREVER = timedelta(days=3650)  # gloo's own timeout would end a rank during another's long order


class Packed(NamedTuple):
    """A value that was pickled without its tensors."""

    text: bytes
    tensors: list[Tensor]  # on the CPU, without gradients and without gaps between the elements

    def unpack(self) -> Any:
        return _Unpickler(self).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        # id of a tensor -> (its position, the tensor: it must live as long as its id is used)
        self._found: dict[int, tuple[int, Tensor]] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor:
            return None
        if id(value) not in self._found:
            self._found[id(value)] = len(self.tensors), value
            self.tensors.append(without_gaps(value.detach().cpu()))
        return self._found[id(value)][0]


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed):
        super().__init__(io.BytesIO(packed.text))
        self._tensors = packed.tensors

    def persistent_load(self, position: int) -> Tensor:
        return self._tensors[position]


def pack(value: Any) -> Packed:
    """Pickle a value. Its tensors keep their dtypes, and their strides unless they have gaps."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return Packed(file.getvalue(), pickler.tensors)


def without_gaps(value: Tensor) -> Tensor:
    """Return the tensor, or a copy if its elements overlap or are not next to each other."""
    strides = torch.empty_like(value, device="meta").stride()  # unchanged if there are no gaps
    return value if strides == value.stride() else value.clone()


def signature(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")


def send(value: Any, to: int, key: bytes) -> None:
    """Send a value to a rank. It is signed with `key`, which the receiver must know.

    Raises ConnectionError if the rank has ended.
    """
    text, tensors = pack(value)
    forms = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
    body = pickle.dumps((forms, text))
    signed = bytearray(signature(key, body) + body)
    head = torch.tensor([len(signed)])
    for part in (head, torch.frombuffer(signed, dtype=torch.uint8), *tensors):
        _transfer(dist.isend, part, to)


def receive(source: int, key: bytes) -> Packed:
    """Return the next value from a rank, before it is unpickled.

    Raises ConnectionError if the rank has ended, or if the value was not signed with `key`.
    """
    head = torch.empty(1, dtype=torch.int64)
    _transfer(dist.irecv, head, source)
    signed = torch.empty(int(head), dtype=torch.uint8)
    _transfer(dist.irecv, signed, source)
    content = signed.numpy().tobytes()
    size = len(signature(key, b""))
    body = content[size:]
    if not hmac.compare_digest(content[:size], signature(key, body)):
        raise ConnectionError(f"an object from rank {source} has a wrong signature")
    forms, text = pickle.loads(body)
    tensors = [torch.empty_strided(shape, stride, dtype=dtype) for dtype, shape, stride in forms]
    for tensor in tensors:
        _transfer(dist.irecv, tensor, source)
    return Packed(text, tensors)


def _transfer(operation: Callable[..., dist.Work | None], tensor: Tensor, rank: int) -> None:
    """Send a tensor to a rank or receive it, and wait until this is done."""
    if not tensor.numel():
        return
    try:
        work = operation(flat(tensor), rank)
        assert work is not None, "this process belongs to the group"
        work.wait(FOREVER)
    except RuntimeError as error:
        raise ConnectionError(f"rank {rank}: {error}") from error


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor without gaps as a vector, in the order of their addresses."""
    return tensor.as_strided((tensor.numel(),), (1,))


class Mapped(NamedTuple):
    """A value whose tensors are in a file. Processes that unpickle it map them into memory."""

    text: bytes
    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return map_value, tuple(self)


def map_value(text: bytes, path: str) -> Any:
    return Packed(text, torch.load(path, "cpu", weights_only=True, mmap=True)).unpack()


def share(value: Any) -> tuple[Mapped, BinaryIO]:
    """Store a value in memory for the processes of this machine.

    Returns the stored value, and the file. It may be closed when all processes have mapped it.
    """
    text, tensors = pack(value)
    file: BinaryIO
    if hasattr(os, "memfd_create"):  # not limited by the size of a shared-memory mount
        file = os.fdopen(os.memfd_create("fedexp", os.MFD_CLOEXEC), "w+b")
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        file = tempfile.NamedTemporaryFile()  # type: ignore[assignment]  # noqa: SIM115
        path = file.name
    # torch.save would write the whole storage of a tensor that is a part of it.
    torch.save(
        [t if t.untyped_storage().nbytes() <= t.nbytes else t.clone() for t in tensors], file
    )
    file.flush()
    return Mapped(text, path), file
