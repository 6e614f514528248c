"""Evaluate the global model, the local models and the personal models on the test set.

A client's personal model is evaluated on the classes that the client holds in any task. If the
personal models differ from the global model only in the classifier, the features of the test set
are computed once for all clients.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from fedexp.algorithms import heads
from fedexp.algorithms.base import overrides, reading
from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.metrics.accuracy import class_accuracy, overall_accuracy
from fedexp.models import Output
from fedexp.training.exchange import trained_models
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
        if simulation.metrics.needs_own:
            test.own |= evaluate_own(simulation, server, kept, view, number, done)
            test.own_examples = own_examples(simulation, view)
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
    found = Scores(
        class_accuracy(correct, totals),
        overall_accuracy(correct, totals),
        tasks,
        float(evaluation.loss),
        evaluation.right.cpu().numpy() if simulation.metrics.needs_examples else None,
    )
    if simulation.metrics.needs_domains and data.test_domains is not None:
        found.domain_accuracy = class_accuracy(
            np.bincount(
                data.test_domains, evaluation.right.cpu().numpy(), minlength=len(data.domains)
            ),
            np.bincount(data.test_domains, minlength=len(data.domains)),
        )
    if simulation.metrics.needs_own and data.test_clients is not None:
        clients, examples = data.test_clients, own_examples(simulation, view)
        right = torch.bincount(clients[evaluation.right & (clients >= 0)], minlength=len(examples))
        found.own["global"] = class_accuracy(right.cpu().numpy(), examples)
    return found


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Return the means of the results of several models."""
    by_domain = [each.domain_accuracy for each in scores if each.domain_accuracy is not None]
    return Scores(
        np.mean([each.class_accuracy for each in scores], axis=0),
        float(np.mean([each.accuracy for each in scores])),
        np.mean([each.task_accuracy for each in scores], axis=0).tolist(),
        float(np.mean([each.loss for each in scores])),
        domain_accuracy=np.mean(by_domain, axis=0) if by_domain else None,
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


def own_examples(simulation: Simulation, view: str) -> np.ndarray:
    """Return the number of each client's own test examples in a view, int64 [K]."""
    clients = simulation.runtime.tested_on(view).data.test_clients
    assert clients is not None, "checked when the run was prepared"
    held = clients[clients >= 0]
    return torch.bincount(held, minlength=simulation.settings.num_clients).cpu().numpy()


def evaluate_own(
    simulation: Simulation,
    server: Tree,
    kept: Mapping[int, Tree],
    view: str,
    number: int,
    done: Sequence[CohortResult],
) -> dict[str, np.ndarray]:
    """Return the accuracies of the clients' models on their own test examples, float64 [K] each.

    The keys are `local`, for the models that the cohort trained, and, if the algorithm has them,
    `personal`. A value is nan if the client has no such model or no test examples. Personal models
    are tested after the last aggregation, local models before it.

    kept, number, done: as in `evaluate`.
    """
    runtime, examples = simulation.runtime, own_examples(simulation, view)
    runtime.net.set_buffers(server["buffers"])
    test = ModelTest(runtime.tested_on(view), server, runtime.test_draws(view, number))
    clients = test.runtime.data.test_clients
    assert clients is not None, "checked when the run was prepared"

    def accuracies(models: Iterable[tuple[int, Params]]) -> np.ndarray:
        found = np.full(len(examples), np.nan)
        for client, model in models:
            if examples[client]:
                found[client] = int(test.right(model, clients == client).sum()) / examples[client]
        return found

    cohort = done[0].cohort.clients if done else ()
    trained = (each["params"] | each["buffers"] for each in trained_models(done))
    tested = {"local": accuracies(zip(cohort, trained, strict=False))}
    if overrides(simulation.algorithm, "personal_model"):
        tested["personal"] = accuracies(
            enumerate(personal_models(simulation, server, kept, number))
        )
    return tested


class ModelTest:
    """Tests many models on the same examples.

    runtime: a runtime whose test set consists of the examples.
    server: the server's state. It contains the global model.
    draws: the random numbers for the augmentation of the test examples, or None.
    """

    def __init__(self, runtime: ClientRuntime, server: Tree, draws: torch.Tensor | None):
        self.runtime, self.params, self.draws = runtime, server["params"], draws

    def count_correct(self, model: Params, classes: np.ndarray) -> torch.Tensor:
        """Count the correct predictions on the test examples of the given classes, int64 [C].

        model: the parameters of the model.
        classes: bool [C], whether to count the predictions for each class.
        """
        y = self.runtime.data.y_test
        wanted = torch.from_numpy(classes).to(y.device)
        correct = torch.zeros(len(classes), dtype=torch.int64, device=y.device)
        return correct.index_add_(0, y, self.right(model, wanted[y]).to(torch.int64))

    @torch.no_grad()
    def right(self, model: Params, wanted: torch.Tensor) -> torch.Tensor:
        """Return whether the prediction for each wanted test example is correct, bool [M].

        A model that normalises by batch statistics is tested in the same batches as the global
        model.

        model: the parameters of the model.
        wanted: bool [M], the examples to test. The result is False for all others.
        """
        runtime, y = self.runtime, self.runtime.data.y_test
        numbers = self.examples
        if not uses_batch_statistics(runtime.net.module):
            numbers = numbers[wanted]
        found = torch.zeros_like(wanted)
        shared = has_shared_body(model, self.params)
        for index in numbers.split(runtime.evaluation_batch):
            if shared:
                outputs = heads.logits(self.features[index], heads.head(model))
            else:
                outputs = self.output(model, index).logits
            answers = runtime.class_logits(outputs, index).argmax(-1)
            found[index] = answers == y[index]
        return found & wanted

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
