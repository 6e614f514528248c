"""Evaluate the global model, the local models and the personal models on the test set.

A client's personal model is evaluated on the classes that the client holds in any task. If the
personal models differ from the global model only in the classifier, the features of the test set
are computed once for all clients.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from fedexp.algorithms import heads
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.metrics.accuracy import class_accuracy, overall_accuracy
from fedexp.models import Output
from fedexp.rundir.client_states import to
from fedexp.training.exchange import CohortResult
from fedexp.training.simulation import Simulation, class_counts
from fedexp.training.state import Scores

log = logging.getLogger("fedexp")


def select_model(server: Tree) -> Tree:
    """Return only the parameters and buffers from the server's state."""
    return {name: server[name] for name in ("params", "buffers")}


def evaluate(
    simulation: Simulation, server: Tree, kept: Mapping[int, Tree], number: int
) -> dict[str, Scores]:
    """Return a dict that maps each view to the scores of the global model after a round.

    If the algorithm has no global model (`FedAvg.tests_clients`), the scores are means over the
    clients' models.

    kept: the state of each client that has taken part. number: the number of the round.
    """
    # Create the models only once, because an engine with several processes sends each new object.
    models = tested_models(simulation, server, kept, number)
    scores = {}
    for view in simulation.runtime.views:
        found = [score(simulation, model, view, number) for model in models]
        scores[view] = found[0] if len(found) == 1 else mean_scores(found)
    return scores


def tested_models(
    simulation: Simulation, server: Tree, kept: Mapping[int, Tree], number: int
) -> list[Tree]:
    """Return the models to test: the global model, or the models of all clients."""
    algorithm, model = simulation.algorithm, select_model(server)
    if not algorithm.tests_clients:
        return [model]
    federation = simulation.stage_of(number).federation
    first = simulation.first_client_state(algorithm, federation)
    models = []
    for client in range(federation.num_clients):
        state = to(kept.get(client, first), simulation.runtime.device)
        own = algorithm.personal_model(server, client, state, federation)
        models.append({part: {k: own.get(k, v) for k, v in model[part].items()} for part in model})
    return models


def score(simulation: Simulation, model: Tree, view: str, number: int) -> Scores:
    """Return the scores of a model in a view."""
    evaluation = simulation.engine.evaluate(simulation.runtime, model, view, number)
    data = simulation.runtime.tested_on(view).data
    correct, totals = evaluation.class_correct.cpu().numpy(), class_counts(data)
    tasks: list[float] = []
    if data.test_tasks is not None:
        of_tasks = torch.bincount(data.test_tasks, minlength=data.num_tasks)
        of_each = evaluation.task_correct
        tasks = class_accuracy(of_each.cpu().numpy(), of_tasks.cpu().numpy()).tolist()
    accuracy = overall_accuracy(correct, totals)
    right = evaluation.right.cpu().numpy() if simulation.metrics.needs_examples else None
    return Scores(class_accuracy(correct, totals), accuracy, tasks, float(evaluation.loss), right)


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Return the means of the scores of several models."""
    return Scores(
        np.mean([each.class_accuracy for each in scores], axis=0),
        float(np.mean([each.accuracy for each in scores])),
        np.mean([each.task_accuracy for each in scores], axis=0).tolist(),
        float(np.mean([each.loss for each in scores])),
    )


def local_accuracy(simulation: Simulation, done: Sequence[CohortResult]) -> dict[str, np.ndarray]:
    """Return a dict that maps each view to the class accuracies of the local models, [|S|, C].

    The accuracies come from the last exchange in which local models were evaluated. The dict is
    empty if local models were not evaluated in this round.

    done: the results of the round's exchanges.
    """
    tested = [each.trained.class_correct for each in done if each.trained.class_correct is not None]
    if not tested:
        return {}
    found = {}
    for view, right in tested[-1].items():
        data = simulation.runtime.tested_on(view).data
        found[view] = class_accuracy(right.cpu().numpy(), class_counts(data))
    return found


def distributed_accuracy(
    simulation: Simulation, server: Tree, number: int
) -> dict[str, np.ndarray]:
    """Return a dict that maps each view to the class accuracies of the distributed model, [C].

    The distributed model is the model that the clients receive when the round starts. The dict
    is empty if the accuracies are not needed or are already known from the test after the previous
    round.

    server: the server's state before the round.
    number: the number of the round.
    """
    if not simulation.tests_distributed(number):
        return {}
    runtime, found = simulation.runtime, {}
    runtime.net.set_buffers(server["buffers"])
    for view in runtime.views:
        tested, draws = runtime.tested_on(view), runtime.test_draws(view, number)
        right = tested.evaluate(server["params"], draws).class_correct
        found[view] = class_accuracy(right.cpu().numpy(), class_counts(tested.data))
    return found


def evaluate_personal(
    simulation: Simulation,
    server: Tree,
    kept: Mapping[int, Tree],
    number: int,
) -> dict[str, np.ndarray]:
    """Return a dict that maps each view to the class accuracies of the personal models.

    The accuracies are float64 [K, C]. A value is nan if the client does not hold the class, or if
    the view has no examples of the class.

    kept: the state of each client that has taken part. Other clients have their initial state.
    number: the number of the round after which the models are tested.
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
        model = algorithm.personal_model(server, client, state, federation)
        for view, test in tests.items():
            correct[view][client] = test.count_correct(model, holds[client]).cpu().numpy()
    found = {}
    for view, right in correct.items():
        accuracy = class_accuracy(right, class_counts(tests[view].runtime.data))
        found[view] = np.where(holds, accuracy, np.nan)
    return found


class ModelTest:
    """Tests many models on the same examples.

    runtime: a runtime whose test set consists of the examples.
    server: the server's state. It contains the global model.
    draws: the random numbers for the augmentation of the test examples, or None.
    """

    def __init__(self, runtime: ClientRuntime, server: Tree, draws: torch.Tensor | None):
        self.runtime, self.params, self.draws = runtime, server["params"], draws

    @torch.no_grad()
    def count_correct(self, model: Params, classes: np.ndarray) -> torch.Tensor:
        """Count the correct predictions on the test examples of the given classes, int64 [C].

        A model that normalises by batch statistics is tested in the same batches as the global
        model.

        model: the parameters of the model.
        classes: bool [C], whether to count the predictions for each class.
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
