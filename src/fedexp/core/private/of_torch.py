"""torch: whether code runs within torch.func's transforms, which no public function of it tells, and a fused copy."""

from contextlib import AbstractContextManager

import torch


def in_transform() -> bool:
    """Return whether a transform (grad, vmap) is active, within which memory cannot be written in place."""
    return torch._C._are_functorch_transforms_active()


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether it stands for one slice, or a traced value, of a transform."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def outside_transforms() -> AbstractContextManager[None]:
    """Inside, new tensors are ordinary ones with memory of their own, also when a transform is active."""
    return torch._C._DisableFuncTorch()


def copy_each(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy many tensors at once: one kernel on a GPU, where a copy of each would launch one each."""
    torch._foreach_copy_(targets, values)
