"""Triton kernels: loaded where they work, and what the rules of their torch.autograd.Functions
under vmap share."""

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from fedexp.core.private.of_torch import outside_transforms

log = logging.getLogger("fedexp")


def load_kernels(module: str, attempt: Callable[[Any], object], what: str) -> Any:
    """Return a module of kernels (Triton is part of torch for CUDA on Linux), or None.

    None where Triton is missing, or where `attempt`, a first use of the module, fails. `what` then
    goes on without kernels of its own, which is logged.
    """
    if find_spec("triton") is None:
        return None
    try:
        kernels = import_module(module)
        # in torch.func.grad even new tensors have no memory of their own
        with outside_transforms():
            attempt(kernels)
        return kernels
    except Exception as error:  # such as no C compiler, which Triton needs
        reason = str(error).strip().split("\n")[0]
        log.warning("%s without kernels of its own: Triton does not work here (%s)", what, reason)
        return None


def stacked_first(info: Any, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return a tensor with the dimension of vmap first; where it has none, as often as is
    stacked."""
    return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
