"""W1 in plain PyTorch, as an expert would write it by hand, without fedexp's training code.

`python -m benchmarks.bare` trains clients one after another in one process. This is the bare loop,
with which the sequential engine is compared. With `--workers 2`, the program is the floor:
processes with one thread each train the clients, those with the most examples first, and return
results through a queue. Both use channels-last tensors, fused SGD, batched augmentation and
autocast for bf16, and keep freed memory. FedNTD's teacher is the frozen global model (beta = tau =
1), which is called on every batch. The program reads the workload that `benchmarks.w1` saved, and
writes rounds.csv with fedexp's columns.
"""

import argparse
import ctypes
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import write_rounds
from benchmarks.w1 import (
    BATCH,
    CROP_PADDING,
    CUTOUT,
    LR,
    LR_DECAY,
    MOMENTUM,
    WEIGHT_DECAY,
    Workload,
)

Weights = dict[str, Tensor]


def keep_freed_memory() -> None:
    """Keep freed memory in the process.

    By default, glibc returns large blocks to the system and faults them in again in every step,
    which is up to 1.6 times slower.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


class Net(nn.Module):
    """The CNN with 2,156,490 parameters.

    ReLU is applied after the pooling, which gives the same result with a quarter of the work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.hidden, self.classifier = nn.Linear(4096, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.classifier(F.relu(self.hidden(x.flatten(1))))


def build(model: str) -> nn.Module:
    """Return a newly initialised network: cnn, or torchvision's resnet18."""
    if model == "cnn":
        return Net()
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


def make_net(weights: Weights, device: torch.device, model: str = "cnn") -> nn.Module:
    net = build(model).to(device).to(memory_format=torch.channels_last)
    net.load_state_dict(weights)
    return net


class Batches:
    """The augmented local batches of one client.

    Examples are reshuffled in every epoch, and the last batch may be smaller.
    """

    def __init__(
        self, x: Tensor, y: Tensor, mean: np.ndarray, std: np.ndarray, epochs: int, seed: int
    ):
        """Store the training set on the device that trains.

        x: uint8 [N, 32, 32, 3]. y: int64 [N].
        """
        self.x, self.y, self.epochs = x, y, epochs
        self.generator = torch.Generator(x.device).manual_seed(seed)
        self.mean, self.std = (
            torch.tensor(v, device=x.device).view(1, 3, 1, 1) for v in (mean, std)
        )

    def of(self, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.epochs):
            order = index[torch.randperm(len(index), generator=self.generator, device=index.device)]
            for batch in order.split(BATCH):
                yield (
                    augment(self.x[batch], self.draw(len(batch)), self.mean, self.std),
                    self.y[batch],
                )

    def draw(self, n: int) -> Tensor:
        """Draw crop offsets dy and dx, flip, and centre cy and cx of the cutout, int64 [5, n]."""
        high = (2 * CROP_PADDING + 1, 2 * CROP_PADDING + 1, 2, 32, 32)
        device = self.x.device
        return torch.stack(
            [torch.randint(0, h, (n,), generator=self.generator, device=device) for h in high]
        )


def augment(x: Tensor, draws: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Crop, flip, normalise and cut out each example separately.

    x: uint8 [B, 32, 32, 3]. Returns float32 [B, 3, 32, 32] in channels-last layout.
    """
    dy, dx, flip, cy, cx = draws[:, :, None]
    pixels, p = torch.arange(32, device=x.device), CROP_PADDING
    rows = (dy + pixels)[:, :, None]
    cols = (torch.where(flip == 1, 31 - pixels, pixels) + dx)[:, None, :]
    padded = F.pad(x, (0, 0, p, p, p, p))
    x = padded[torch.arange(len(x), device=x.device)[:, None, None], rows, cols]
    x = (x.float().div_(255).permute(0, 3, 1, 2) - mean) / std
    near_y, near_x = ((pixels >= c - CUTOUT // 2) & (pixels < c + CUTOUT // 2) for c in (cy, cx))
    return x.masked_fill_((near_y[:, :, None] & near_x[:, None, :])[:, None], 0.0)


def not_true_distillation(student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    """Return FedNTD's KL(teacher || student) over all classes but the label, as a batch mean."""
    keep = torch.arange(student.shape[1], device=y.device) != y[:, None]
    low = torch.finfo(student.dtype).min
    log_q, log_p = (F.log_softmax(torch.where(keep, z, low), -1) for z in (student, teacher))
    return torch.where(keep, log_p.exp() * (log_p - log_q), 0.0).sum(-1).mean()


def descend(
    net: nn.Module,
    teacher: nn.Module | None,
    batches: Iterator[tuple[Tensor, Tensor]],
    lr: float,
    bf16: bool,
) -> None:
    """Train the network in place by SGD over the batches.

    The loss is FedNTD's if there is a teacher, and FedAvg's otherwise.
    """
    sgd = torch.optim.SGD(
        net.parameters(), lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True
    )
    for x, y in batches:
        sgd.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            logits = net(x)
        logits = logits.float() if bf16 else logits
        loss = F.cross_entropy(logits, y)
        if teacher is not None:
            with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                reference = teacher(x)
            loss = loss + not_true_distillation(logits, reference.to(logits.dtype), y)
        loss.backward()
        sgd.step()


class Trainer:
    """Trains one client at a time in a process.

    With `--local-evaluation`, the local model is also tested class by class.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device):
        keep_freed_memory()
        torch.set_num_threads(options.threads)
        self.options, self.device, self.bf16 = options, device, options.precision == "bf16"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
            options.precision != "fp32"
        )
        self.data = data = Workload.load(options.workload)
        arrays = (data.x_train, data.y_train, data.y_test)
        self.x, self.y, self.y_test = (torch.from_numpy(array).to(device) for array in arrays)
        self._x_test: Tensor | None = None

    def train(
        self, weights: Weights, index: Tensor, number: int, position: int
    ) -> tuple[Weights, Tensor | None]:
        """Train the client at a position of a round's cohort.

        Return its local weights, and the correct predictions by class, int64 [10], or None if the
        local model is not tested.
        """
        model = self.options.model
        net = make_net(weights, self.device, model)
        teacher = (
            make_net(weights, self.device, model).requires_grad_(False).eval()
            if self.options.algorithm == "fedntd"
            else None
        )
        data = self.data
        batches = Batches(
            self.x, self.y, data.mean, data.std, int(data.epochs), seed=1000 * number + position
        )
        descend(
            net,
            teacher,
            batches.of(index.to(self.device)),
            LR * LR_DECAY ** (number - 1),
            self.bf16,
        )
        local = {k: v.detach() for k, v in net.state_dict().items()}
        return local, self.evaluate(local) if self.options.local_evaluation else None

    @torch.no_grad()
    def evaluate(self, weights: Weights) -> Tensor:
        """Return the number of correct predictions on the test set by class, int64 [10]."""
        if self._x_test is None:  # normalised once and kept
            mean, std = (
                torch.tensor(v, device=self.device) for v in (self.data.mean, self.data.std)
            )
            x = torch.from_numpy(self.data.x_test).to(self.device)
            self._x_test = ((x.float() / 255 - mean) / std).permute(0, 3, 1, 2)
        net, correct = (
            make_net(weights, self.device, self.options.model).eval(),
            torch.zeros(10, dtype=torch.int64, device=self.device),
        )
        for x, y in zip(self._x_test.split(250), self.y_test.split(250), strict=True):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                right = net(x).argmax(1) == y
            correct.index_add_(0, y, right.long())
        return correct


def serve(options: argparse.Namespace, jobs: mp.Queue, results: mp.Queue) -> None:
    """Train clients in a worker process of the floor."""
    trainer = Trainer(options, torch.device("cpu"))
    while (job := jobs.get()) is not None:
        results.put((job[-1], *trainer.train(*job)))


class Pool:
    """The worker processes of the floor."""

    def __init__(self, options: argparse.Namespace):
        context = mp.get_context("spawn")
        self.jobs, self.results = context.Queue(), context.Queue()
        arguments = (options, self.jobs, self.results)
        self.processes = [
            context.Process(target=serve, args=arguments, daemon=True)
            for _ in range(options.workers)
        ]
        for process in self.processes:
            process.start()

    def train(self, weights: Weights, cohort: list[Tensor], number: int) -> list[Weights]:
        for position in sorted(range(len(cohort)), key=lambda i: -len(cohort[i])):  # longest first
            self.jobs.put((weights, cohort[position], number, position))
        results = {}
        for _ in cohort:
            position, local, _ = self.results.get()
            results[position] = local
        return [results[position] for position in range(len(cohort))]

    def close(self) -> None:
        for _ in self.processes:
            self.jobs.put(None)
        for process in self.processes:
            process.join()


def run(options: argparse.Namespace) -> list[dict[str, float]]:
    """Train all rounds and return the rows of rounds.csv.

    The time of the last round's test counts only with `--global-evaluation`.
    """
    device = torch.device(options.device)
    torch.manual_seed(0)
    weights = {k: v.detach().to(device) for k, v in build(options.model).state_dict().items()}
    trainer, pool = Trainer(options, device), Pool(options) if options.workers else None
    rows = []
    for number in range(1, options.rounds + 1):
        cohort = [torch.from_numpy(part) for part in trainer.data.cohort(number)]
        start = time.perf_counter()
        if pool is not None:
            trained = pool.train(weights, cohort, number)
        else:
            trained = [
                trainer.train(weights, index, number, i)[0] for i, index in enumerate(cohort)
            ]
        wait_for(device)
        train_seconds = time.perf_counter() - start
        shares = trainer.data.sizes[number - 1] / trainer.data.sizes[number - 1].sum()
        weights = {k: torch.zeros_like(v) for k, v in weights.items()}
        for local, share in zip(trained, shares, strict=True):
            for k in weights:
                if weights[k].is_floating_point():  # not the number of batches of batch norm
                    weights[k] += local[k] * share
        row = {
            "round": number,
            "train_samples_per_second": trainer.data.examples(number) / train_seconds,
        }
        row |= {"train_seconds": train_seconds, "seconds": time.perf_counter() - start}
        if options.global_evaluation or number == options.rounds:
            row["test_accuracy"] = int(trainer.evaluate(weights).sum()) / len(trainer.y_test)
        if options.global_evaluation:
            end = time.perf_counter() - start
            row |= {"seconds": end, "evaluation_seconds": end - row["seconds"]}
        rows.append(row)
    if pool is not None:
        pool.close()
    return rows


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare", description=__doc__)
    parser.add_argument("workload", type=Path, help="directory written by benchmarks.w1")
    parser.add_argument("out", type=Path, help="directory for rounds.csv")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, including one warm-up round")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="worker processes; 0: train clients one after another",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--device", default="cpu", help="device of the training")
    parser.add_argument(
        "--precision",
        choices=("fp32", "tf32", "bf16"),
        default="fp32",
        help="precision of the training",
    )
    parser.add_argument("--model", choices=("cnn", "resnet18"), default="cnn")
    parser.add_argument(
        "--algorithm",
        choices=("fedavg", "fedntd"),
        default="fedavg",
        help="algorithm to train with",
    )
    parser.add_argument(
        "--local-evaluation",
        action="store_true",
        help="test every local model; the time counts as training",
    )
    parser.add_argument(
        "--global-evaluation", action="store_true", help="test the global model in every round"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    write_rounds(options.out, run(options))


if __name__ == "__main__":
    main()
