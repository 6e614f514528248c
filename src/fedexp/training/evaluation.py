"""Evaluate the global model, the local models and the personal models on the test set.

A client's personal model is evaluated on the classes that the client holds in any task. If the
personal models differ from the global model only in the classifier, the features of the test set
are computed once for all clients.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from fedexp.algorithms import heads
from fedexp.algorithms.base import reading
from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.metrics.accuracy import class_accuracy, overall_accuracy
from fedexp.models import Output
from fedexp.training.simulation import Simulation, class_counts
from fedexp.training.state import CohortResult, Scores

log = logging.getLogger("fedexp")


def select_model(server: Tree) -> Tree:
    """Return only the parameters and buffers from the server's state."""
    return {name: server[name] for name in ("params", "buffers")}


def evaluate(
    simulation: Simulation,
    server: Tree,
    kept: Mapping[int, Tree],
    number: int,
    before: Tree | None = None,
    done: Sequence[CohortResult] = (),
) -> dict[str, Scores]:
    """Test the models of a round, and return the results by the name of the test set.

    The names are those of `ClientRuntime.views`. The dict is empty if the round is not evaluated.
    If the algorithm has no global model (`FedAvg.tests_clients`), the results are means over the
    clients' models.

    kept: the state of each client that has taken part. number: the number of the round. before: the
    server's state before the round. done: the results of the round's exchanges.
    """
    if not simulation.is_evaluated(number):
        return {}
    # Create the models only once, because an engine with several processes sends each new object.
    models = tested_models(simulation, server, kept, number)
    found = {}
    for view in simulation.runtime.views:
        scores = [score(simulation, model, view, number) for model in models]
        test = scores[0] if len(scores) == 1 else mean_scores(scores)
        test.local = local_accuracy(simulation, done, view)
        if before is not None and simulation.tests_distributed(number):
            # the model that the clients received when the round started
            received = score(simulation, select_model(before), view, number)
            test.distributed = received.class_accuracy
        if simulation.metrics.needs_personal and number:
            test.personal = evaluate_personal(simulation, server, kept, view, number)
        elif simulation.metrics.needs_personal:  # all personal models are the initial model
            test.personal = np.tile(test.class_accuracy, (simulation.settings.num_clients, 1))
        found[view] = test
    return found


def tested_models(
    simulation: Simulation, server: Tree, kept: Mapping[int, Tree], number: int
) -> list[Tree]:
    """Return the models to test: the global model, or the models of all clients."""
    model = select_model(server)
    if not simulation.algorithm.tests_clients:
        return [model]
    return [
        {part: {k: own.get(k, v) for k, v in model[part].items()} for part in model}
        for own in personal_models(simulation, server, kept, number)
    ]


def personal_models(
    simulation: Simulation, server: Tree, kept: Mapping[int, Tree], number: int
) -> Iterator[Params]:
    """Yield the personal model of each client after round `number`.

    kept: the state of each client that has taken part. Other clients have their initial state.
    """
    algorithm, federation = simulation.algorithm, simulation.stage_of(number).federation
    first = simulation.first_client_state(algorithm, federation)
    for client in range(federation.num_clients):
        state = tree.to(kept.get(client, first), simulation.runtime.device)
        with reading(algorithm, "personal_model", {"server": server, "state": state}):
            model = algorithm.personal_model(server, client, state, federation)
        yield model


def score(simulation: Simulation, model: Tree, view: str, number: int) -> Scores:
    """Return the results of a model on a test set."""
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
    """Return the means of the results of several models."""
    return Scores(
        np.mean([each.class_accuracy for each in scores], axis=0),
        float(np.mean([each.accuracy for each in scores])),
        np.mean([each.task_accuracy for each in scores], axis=0).tolist(),
        float(np.mean([each.loss for each in scores])),
    )


def local_accuracy(
    simulation: Simulation, done: Sequence[CohortResult], view: str
) -> np.ndarray | None:
    """Return the class accuracies of the local models on a test set, float64 [|S|, C].

    The accuracies come from the last exchange in which local models were evaluated. The result is
    None if local models were not evaluated in this round.

    done: the results of the round's exchanges.
    """
    tested = [each.trained.class_correct for each in done if each.trained.class_correct is not None]
    if not tested:
        return None
    data = simulation.runtime.tested_on(view).data
    return class_accuracy(tested[-1][view].cpu().numpy(), class_counts(data))


def evaluate_personal(
    simulation: Simulation, server: Tree, kept: Mapping[int, Tree], view: str, number: int
) -> np.ndarray:
    """Return the class accuracies of the personal models on a test set, float64 [K, C].

    A value is nan if the client does not hold the class, or if the test set has no examples of it.

    kept: as in `personal_models`. number: the number of the round after which the models are
    tested.
    """
    runtime = simulation.runtime
    holds = np.sum([stage.partition.counts for stage in simulation.stages], axis=0) > 0
    runtime.net.set_buffers(server["buffers"])
    test = ModelTest(runtime.tested_on(view), server, runtime.test_draws(view, number))
    correct = np.zeros(holds.shape, dtype=np.int64)
    for client, model in enumerate(personal_models(simulation, server, kept, number)):
        correct[client] = test.count_correct(model, holds[client]).cpu().numpy()
    accuracy = class_accuracy(correct, class_counts(test.runtime.data))
    return np.where(holds, accuracy, np.nan)


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
