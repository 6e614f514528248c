"""FedAvg on W1 in pfl-research: `SimulatedBackend` in one-thread processes from torchrun.

The code follows pfl's image benchmarks. Client data are tensors in memory, the faster of pfl's two
ways. As in pfl's FLAIR model, pixels are uint8, and the model's loss applies the transforms.
Clients with more examples are trained first, and are spread over the processes
(`user_id_to_weight`). pfl does not shuffle tensors, so the data set shuffles them once per epoch.
The augmentation is that of the bare loop, which augments each example of a batch separately.
torchvision's transforms would transform all examples of a batch in the same way. The memory layout
is the default, and SGD is not fused. pfl's processes share the test of the global model.
"""

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from benchmarks.bare import Batches, Net, augment
from benchmarks.measure import write_rounds
from benchmarks.peers import make_parser, use
from benchmarks.w1 import BATCH, LR, MOMENTUM, WEIGHT_DECAY, Workload


class Model(Net):
    """The CNN with the methods that pfl requires: a loss and metrics of uint8 images."""

    def __init__(self, workload: Workload, x: torch.Tensor, y: torch.Tensor):
        super().__init__()
        self.draws = Batches(x, y, workload.mean, workload.std, epochs=1, seed=0)
        self.mean, self.std = self.draws.mean, self.draws.std

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(augment(x, self.draws.draw(len(x)), self.mean, self.std)), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        logits = self((x.float() / 255).permute(0, 3, 1, 2).sub(self.mean).div(self.std))
        return {"accuracy": Weighted((logits.argmax(1) == y).sum().item(), len(y))}


class Shuffled(Dataset):
    """A client's data set, which is shuffled in every epoch."""

    def iter(self, batch_size: int | None) -> Iterator[list[torch.Tensor]]:
        order = torch.randperm(len(self))
        for batch in order.split(batch_size or len(order)):
            yield [tensor[batch] for tensor in self.raw_data]


class Users:
    """Returns the clients of W1's cohorts one after another.

    After the last client, the first one is returned again, since pfl samples clients in advance.
    """

    def __init__(self, count: int):
        self.count, self.next = count, 0

    def __call__(self) -> int:
        self.next += 1
        return (self.next - 1) % self.count


class Clock(TrainingProcessCallback):
    """Notes the time at the start, and when it is called in each round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.times.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.times.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    parser = make_parser("pfl_research", __doc__)
    options = parser.parse_args()
    use(options.precision)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # pfl's processes agree on the cohort through numpy's global state
    np.random.seed(0)  # noqa: NPY002
    workload = Workload.load(options.workload)
    parts = [part for number in range(1, options.rounds + 1) for part in workload.cohort(number)]
    x = torch.from_numpy(workload.x_train).to(options.device)
    y = torch.from_numpy(workload.y_train).to(options.device)

    def user_data(user: int) -> Shuffled:
        index = torch.from_numpy(parts[user]).to(options.device)
        return Shuffled((x[index], y[index]), user_id=str(user))

    net = Model(workload, x, y)
    model = PyTorchModel(
        model=net,
        local_optimizer_create=partial(
            torch.optim.SGD, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        ),
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    sizes = {user: len(part) for user, part in enumerate(parts)}
    data = FederatedDataset(user_data, Users(len(parts)), user_id_to_weight=sizes)
    cohort = workload.sizes.shape[1]
    held = workload.x_test, workload.y_test
    images = [torch.from_numpy(array).to(options.device) for array in held]
    test, settings = Dataset(images), NNEvalHyperParams(local_batch_size=500)
    trained, tested = Clock(), Clock()  # called before and after the test
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds,
            # pfl still tests in the first iteration, which is the warm-up
            evaluation_frequency=options.rounds + 1,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]
        ),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=int(workload.epochs), local_learning_rate=LR, local_batch_size=BATCH
        ),
        model_eval_params=settings,
        callbacks=[trained, CentralEvaluationCallback(test, settings), tested],
    )
    if get_framework_module().distributed.global_rank:
        return
    rows = []
    for n in range(1, options.rounds + 1):
        start, middle, end = tested.times[n - 1], trained.times[n], tested.times[n]
        row = {"round": n, "train_samples_per_second": workload.examples(n) / (middle - start)}
        row |= {"train_seconds": middle - start, "evaluation_seconds": end - middle}
        rows.append(row | {"seconds": end - start})
    metrics = dict((str(name), value) for name, value in model.evaluate(test, eval_params=settings))
    rows[-1]["test_accuracy"] = next(iter(metrics.values())).overall_value
    write_rounds(options.out, rows)


if __name__ == "__main__":
    main()
