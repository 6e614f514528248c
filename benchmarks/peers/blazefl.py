"""FedAvg on W1 in BlazeFL, whose clients train in threads that share the memory of one process.

The trainer is a `ThreadPoolClientTrainer`, the mode that BlazeFL recommends. The batches and their
augmentation are those of the bare loop, as for pfl-research, with a generator for each client. The
memory layout is the default, and SGD is not fused. Models travel as BlazeFL's flat tensors in the
memory of the CPU. BlazeFL needs Python 3.14, whose variant without the GIL lets threads run at the
same time.
"""

import threading
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from blazefl.core import ThreadPoolClientTrainer, deserialize_model, serialize_model

from benchmarks.bare import Batches, build
from benchmarks.measure import write_rounds
from benchmarks.peers import accuracy, make_parser, use
from benchmarks.w1 import LR, LR_DECAY, MOMENTUM, WEIGHT_DECAY, Workload


@dataclass
class Download:
    """What the server sends to the clients of a round."""

    round: int
    model: torch.Tensor


@dataclass
class Upload:
    """A client's model and its number of examples."""

    model: torch.Tensor
    examples: int


class Trainer(ThreadPoolClientTrainer[Upload, Download]):
    """Trains the clients of a cohort, which are named by their positions."""

    def __init__(self, workload: Workload, workers: int, device: str, model: str):
        self.num_parallels, self.device, self.device_count = workers, device, 1
        self.cache: list[Upload] = []
        self.stop_event = threading.Event()
        self.workload, self.model = workload, model
        self.x, self.y = (
            torch.from_numpy(array).to(device) for array in (workload.x_train, workload.y_train)
        )

    def worker(
        self, cid: int, device: str, payload: Download, stop_event: threading.Event
    ) -> Upload:
        work, number = self.workload, payload.round
        index = torch.from_numpy(work.cohort(number)[cid]).to(device)
        seed, epochs = 1000 * number + cid, int(work.epochs)
        batches = Batches(self.x, self.y, work.mean, work.std, epochs, seed)
        net = build(self.model)
        deserialize_model(net, payload.model)
        net.to(device)
        sgd = torch.optim.SGD(
            net.parameters(),
            lr=LR * LR_DECAY ** (number - 1),
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
        )
        for x, y in batches.of(index):
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            sgd.step()
        return Upload(serialize_model(net), len(index))

    def uplink_package(self) -> list[Upload]:
        received, self.cache = self.cache, []
        return received


def main() -> None:
    options = make_parser("blazefl", __doc__).parse_args()
    use(options.precision)
    torch.manual_seed(0)
    torch.set_num_threads(options.workers)  # of the test; OMP_NUM_THREADS=1 limits the threads
    workload, net, rows = Workload.load(options.workload), build(options.model), []
    trainer = Trainer(workload, options.workers, options.device, options.model)
    for number in range(1, options.rounds + 1):
        start = time.perf_counter()
        cohort = range(workload.sizes.shape[1])
        trainer.local_process(Download(number, serialize_model(net)), [*cohort])
        uploads = trainer.uplink_package()
        trained = time.perf_counter()
        total = sum(upload.examples for upload in uploads)
        mean = torch.zeros_like(uploads[0].model)
        for upload in uploads:
            mean.add_(upload.model, alpha=upload.examples / total)
        deserialize_model(net, mean)
        tested = time.perf_counter()
        found = accuracy(net.to(options.device), workload, options.device)
        net.to("cpu")
        end = time.perf_counter()
        row = {"round": number, "test_accuracy": found, "seconds": end - start}
        row |= {"train_seconds": trained - start, "evaluation_seconds": end - tested}
        row["train_samples_per_second"] = workload.examples(number) / (trained - start)
        rows.append(row)
    write_rounds(options.out, rows)


if __name__ == "__main__":
    main()
