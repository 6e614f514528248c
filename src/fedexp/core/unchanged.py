"""Notice that a hook, which may be a user's, has changed what it may only read.

Such a change breaks a run without an error: the next client, round or metric reads other values,
which may also differ between engines.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedexp.core.errors import ConfigError
from fedexp.core.private.torch_internals import changes_in_place
from fedexp.core.tree import Tree

Modes = tuple[bool, torch.dtype]


def modes() -> Modes:
    """Return whether torch records gradients, and its default type of numbers."""
    return torch.is_grad_enabled(), torch.get_default_dtype()


def require_modes(before: Modes, what: str) -> None:
    """Raise ConfigError if a hook has left other modes, after restoring those `before` it.

    Otherwise, the next code that trains would fail or compute other results.

    what: the hook that was called, the first words of the message.
    """
    if modes() == before:
        return
    (grad, dtype), (old_grad, old_dtype) = modes(), before
    call = f"default_dtype({dtype})" if grad == old_grad else f"grad_enabled({grad})"
    torch.set_grad_enabled(old_grad)
    torch.set_default_dtype(old_dtype)
    raise ConfigError(
        f"{what} leaves torch.set_{call} to the run; it must restore what it changes, as"
        " `with torch.no_grad():` does"
    )


class Unchanged:
    """Trees as they were when they were added.

    torch counts the changes of a tensor, so this needs no copy and does not wait for the device.
    Changes by way of `tensor.data` are not counted. To find them too, elements are compared with
    copies, which is done only in the first round.
    """

    def __init__(self, trees: Mapping[str, Tree], copies: bool = False):
        """Add trees, as `add` does."""
        self._dicts: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []  # each with a copy
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._counts: list[int] = []
        self._copies: list[tuple[str, Tensor, Tensor]] = []
        self.add(trees, copies)

    def add(self, trees: Mapping[str, Tree], copies: bool = False) -> None:
        """Add trees, by the names that messages give them.

        copies: whether to compare their elements too.
        """
        first = len(self._tensors)
        for name, tree in trees.items():
            self._walk(name, tree)
        self._counts += changes_in_place(self._tensors[first:])
        if copies:
            pairs = zip(self._names[first:], self._tensors[first:], strict=True)
            self._copies += [(name, tensor, tensor.detach().clone()) for name, tensor in pairs]

    def _walk(self, name: str, node: Tree) -> None:
        if isinstance(node, Tensor):
            self._names.append(name)
            self._tensors.append(node)
        elif isinstance(node, dict):
            self._dicts.append((name, node, dict(node)))
            for key, value in node.items():
                self._walk(f"{name}[{key!r}]", value)

    def check(self, what: str, advice: str) -> None:
        """Raise ConfigError if a tree has changed.

        what: the hook that was called, the first words of the message. advice: what the hook must
        do instead, the last words.
        """
        if changed := self._changed():
            raise ConfigError(f"{what} changes {changed}; {advice}")

    def _changed(self) -> str | None:
        """Return the name of a part that has changed, or None."""
        counts = changes_in_place(self._tensors)
        if counts != self._counts:
            pairs = zip(self._names, counts, self._counts, strict=True)
            return next(name for name, now, before in pairs if now != before)
        for name, node, before in self._dicts:
            if node.keys() != before.keys():
                return name
            for key, value in before.items():
                if node[key] is not value:
                    return f"{name}[{key!r}]"
        for name, tensor, copy in self._copies:
            same = torch.equal(tensor, copy)
            if not same and not torch.allclose(tensor, copy, rtol=0, atol=0, equal_nan=True):
                return name
        return None
