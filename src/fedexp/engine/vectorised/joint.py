"""Training of the clients of several runs as one cohort, where they are alike.

Runs with other seeds or partitions differ in their global models and in the examples of their
clients. Both are values of each client here, so that the clients of several runs are no more than a
larger cohort.
"""

from collections.abc import Sequence

import torch

from fedexp.core import tree
from fedexp.core.tree import Tree
from fedexp.data.types import Data
from fedexp.engine.base import ClientRuntime, Trained
from fedexp.engine.vectorised.engine import Request, Vectorised


class Joint:
    """Trains the cohorts of several runs, those that are alike as one."""

    def __init__(self, engine: Vectorised):
        self.engine = engine
        # data that has been compared
        self._equal: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def train(self, requests: Sequence[Request]) -> list[Trained]:
        """Return the results of each request, in their order."""
        results: dict[int, Trained] = {}
        for numbers in self.groups(requests):
            chosen = [requests[number] for number in numbers]
            if len(chosen) > 1:
                results |= dict(zip(numbers, self.engine.train_together(chosen), strict=True))
            else:
                results[numbers[0]] = self.engine.train(**vars(chosen[0]))
        return [results[number] for number in range(len(requests))]

    def groups(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the numbers of the requests that are alike, each group in order."""
        found: list[list[int]] = []
        for number, request in enumerate(requests):
            group = next(
                (group for group in found if self.alike(requests[group[0]], request)), None
            )
            if group is None:
                found.append([number])
            else:
                group.append(number)
        return found

    def alike(self, one: Request, other: Request) -> bool:
        """Return whether the clients of two runs can be one cohort: all that is no value of a
        client is equal.

        Nothing is trained together that is tested in the middle of its training (group `analysis`),
        or whose model holds parameters or buffers that are not sent (frozen ones), since these may
        differ between runs.
        """
        return (
            not one.cohort.probes
            and not other.cohort.probes
            and (one.algorithm, one.lr, one.evaluate_local)
            == (other.algorithm, other.lr, other.evaluate_local)
            and shapes(given(one)) == shapes(given(other))
            and sends_all(one)
            and sends_all(other)
            and self.same_runtime(one.bench, other.bench)
        )

    def same_runtime(self, one: ClientRuntime, other: ClientRuntime) -> bool:
        """Return whether two runs have the same network, training, device and data."""
        return (
            (one.local, one.dtype, one.device, one.views, one.augmentation)
            == (other.local, other.dtype, other.device, other.views, other.augmentation)
            and one.net.precision == other.net.precision
            and str(one.net.module) == str(other.net.module)
            and same_heads(one.heads, other.heads)
            and self.same_data(one.data, other.data)
        )

    def same_data(self, one: Data, other: Data) -> bool:
        """Return whether two runs have read the same training examples, in the same order."""
        return type(one) is type(other) and all(
            self._same(getattr(one, name), getattr(other, name)) for name in ("x_train", "y_train")
        )

    def _same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two tensors are equal; those that were equal are not compared again in
        each round."""
        if one is other or (id(one), id(other)) in self._equal:
            return True
        equal = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        if equal:
            # held, so that their numbers stay theirs
            self._equal[id(one), id(other)] = (one, other)
        return equal


def same_heads(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two runs have the same heads for their tasks, or both none."""
    return one is other if one is None or other is None else torch.equal(one, other)


def given(request: Request) -> Tree:
    """Return what the server sends, and what the first client of the cohort has beside it."""
    cohort = request.cohort
    return [request.server, cohort.states[0], cohort.personals[0], cohort.plans[0]]


def shapes(values: Tree) -> Tree:
    """Return the shapes and types of the leaves of a tree, in its structure."""
    return tree.map(
        lambda leaf: (tuple(leaf.shape), str(leaf.dtype)) if hasattr(leaf, "shape") else leaf,
        values,
    )


def sends_all(request: Request) -> bool:
    """Return whether a model has no parameter or buffer beside those that are sent."""
    return request.bench.net.names <= {*request.server["params"], *request.server["buffers"]}
