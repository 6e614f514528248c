"""Class-wise test of each client's personal model, for algorithms that have personal models.

A client is tested on the classes that it holds in any task. If its model differs from the global
model only in the classifier, the features of the test set are computed once for all clients.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch

from fedexp.algorithms import heads
from fedexp.algorithms.families import Personal
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.metrics.accuracy import class_accuracy
from fedexp.models import Output
from fedexp.rundir.client_states import to
from fedexp.training.simulation import Simulation, class_counts


def evaluate_personal(
    simulation: Simulation,
    server: Tree,
    kept: Mapping[int, Tree],
    number: int,
) -> dict[str, np.ndarray]:
    """Return view -> class accuracies of each client's model after round `number`, float64 [K, C].

    The value is nan for a class that the client does not hold or that the view has no examples of.

    kept: client -> state. A client that has never taken part has its first state.
    """
    runtime, federation = simulation.runtime, simulation.stage_of(number).federation
    holds = np.sum([stage.partition.counts for stage in simulation.all_stages], axis=0) > 0
    runtime.net.set_buffers(server["buffers"])
    tests = {
        view: ModelTest(runtime.tested_on(view), server, runtime.test_draws(view, number))
        for view in runtime.views
    }
    correct = {view: np.zeros(holds.shape, dtype=np.int64) for view in tests}
    algorithm = simulation.algorithm
    first = simulation.first_client_state(algorithm, federation)
    for client in range(len(holds)):
        state = to(kept.get(client, first), runtime.device)
        model = server["params"]
        if isinstance(algorithm, Personal):
            model = algorithm.personal_model(server, client, state, federation)
        for view, test in tests.items():
            correct[view][client] = test.right(model, holds[client]).cpu().numpy()
    found = {}
    for view, right in correct.items():
        accuracy = class_accuracy(right, class_counts(tests[view].runtime.data))
        found[view] = np.where(holds, accuracy, np.nan)
    return found


class ModelTest:
    """Test of many models on the examples of one view.

    runtime: has these examples as its test set (`tested_on`).
    """

    def __init__(self, runtime: ClientRuntime, server: Tree, draws: torch.Tensor | None):
        self.runtime, self.params, self.draws = runtime, server["params"], draws

    @torch.no_grad()
    def right(self, model: Params, classes: np.ndarray) -> torch.Tensor:
        """Return the correct predictions on test examples of the given classes, int64 [C].

        A model that normalises by batch statistics is tested in the same batches as the global
        model.

        classes: bool [C].
        """
        runtime, y = self.runtime, self.runtime.data.y_test
        wanted = torch.from_numpy(classes).to(runtime.device)
        numbers = self.examples
        if not uses_batch_statistics(runtime.net.module):
            numbers = numbers[wanted[y]]
        correct = torch.zeros(len(classes), dtype=torch.int64, device=runtime.device)
        shared = has_shared_body(model, self.params)
        for index in numbers.split(runtime.evaluation_batch):
            if shared:
                outputs = heads.logits(self.features[index], heads.head(model))
            else:
                outputs = self.output(model, index).logits
            answers = runtime.class_logits(outputs, index).argmax(-1)
            correct.index_add_(0, y[index], (answers == y[index]).to(torch.int64))
        return correct * wanted

    @property
    def examples(self) -> torch.Tensor:
        """Return the indices of all test examples, int64 [M]."""
        return torch.arange(len(self.runtime.data.y_test), device=self.runtime.device)

    def output(self, model: Params, index: torch.Tensor) -> Output:
        """Return a model's output for the test examples `index`."""
        return self.runtime.net(model, self.runtime.load_test(index, self.draws)[0])

    @cached_property
    def features(self) -> torch.Tensor:
        """Return the global model's features of all test examples, [M, D]."""
        batches = self.examples.split(self.runtime.evaluation_batch)
        return torch.cat([self.output(self.params, index).features for index in batches])


def has_shared_body(model: Params, params: Params) -> bool:
    """Return whether a model has the same tensors as the global model, except in the classifier."""
    if model.keys() != params.keys() or not set(heads.HEAD) <= model.keys():
        return False
    return all(value is params[name] for name, value in model.items() if name not in heads.HEAD)
