"""Functions that use undocumented parts of torch.

They detect torch.func transforms, copy many tensors at once, and let torch.func compute gradients
without loading torch's compiler.
"""

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch._functorch import pyfunctorch as interpreters

COMPILER = "torch._dynamo"


def in_transform() -> bool:
    """Return whether a transform (grad, vmap) is active.

    Inside a transform, existing tensors cannot be modified in place.
    """
    return torch._C._are_functorch_transforms_active()


def size_of_vmap() -> int:
    """Return the number of slices of the active vmap.

    The result is 0 if other transforms are active, except a single `grad` inside the vmap.
    """
    active: list[Any] = interpreters.retrieve_all_functorch_interpreters()
    kinds = [each.key().name for each in active]
    return active[0].batch_size() if kinds in (["Vmap"], ["Vmap", "Grad"]) else 0


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a wrapper made by a transform, such as a single slice in vmap."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def outside_transforms() -> AbstractContextManager[None]:
    """Create ordinary tensors inside the block, even if a transform is active."""
    return torch._C._DisableFuncTorch()


def copy_each(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy many tensors at once.

    On a GPU, this launches one kernel instead of one kernel for each copy.
    """
    torch._foreach_copy_(targets, values)


def changes_in_place(tensors: list[torch.Tensor]) -> list[int]:
    """Return how often each tensor has been changed in place; 0 for tensors of inference mode."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Unloaded(ModuleType):
    """A placeholder for a module that is not loaded. It has a few of the module's names.

    Access to any other name loads the module and replaces the placeholder with it.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def without_compiler() -> None:
    """Let torch.func compute gradients without loading torch's compiler. Loading takes seconds.

    From version 2.8 on, torch loads the compiler to switch off autograd's compiled mode. This is
    not needed, since the mode cannot be on while the compiler is not loaded. torch 2.6 imports the
    compiler by name, so the compiler is loaded there anyway.
    """
    if COMPILER not in sys.modules:
        mode, compiler = _Unloaded(f"{COMPILER}.compiled_autograd"), _Unloaded(COMPILER)
        mode._disable = nullcontext  # type: ignore[attr-defined]
        compiler.compiled_autograd = mode  # type: ignore[attr-defined]
        torch._dynamo = compiler  # type: ignore[assignment]
