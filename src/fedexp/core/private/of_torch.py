"""torch: whether code runs within torch.func's transforms, which no public function of it tells, a
fused copy, and gradients without its compiler."""

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"


def in_transform() -> bool:
    """Return whether a transform (grad, vmap) is active, within which memory cannot be written in
    place."""
    return torch._C._are_functorch_transforms_active()


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether it stands for one slice, or a traced value, of a transform."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def outside_transforms() -> AbstractContextManager[None]:
    """Inside, new tensors are ordinary ones with memory of their own, also when a transform is
    active."""
    return torch._C._DisableFuncTorch()


def copy_each(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy many tensors at once: one kernel on a GPU, where a copy of each would launch one
    each."""
    torch._foreach_copy_(targets, values)


class _Unloaded(ModuleType):
    """Stands where a module is not loaded yet, with a few of its names; asked for any other, it
    loads the module, and that takes its place."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def without_compiler() -> None:
    """Let torch.func take gradients without loading torch's compiler, which takes seconds.

    From torch 2.8 on, it loads it in order to switch off autograd's compiled mode. While the
    compiler is not loaded, that mode cannot be on. torch 2.6 imports it by name, so there it is
    loaded all the same.
    """
    if COMPILER not in sys.modules:
        mode, compiler = _Unloaded(f"{COMPILER}.compiled_autograd"), _Unloaded(COMPILER)
        mode._disable = nullcontext  # type: ignore[attr-defined]
        compiler.compiled_autograd = mode  # type: ignore[attr-defined]
        torch._dynamo = compiler  # type: ignore[assignment]
