"""The multiply-adds of W1 as products of large matrices: the limit of fp32 on the same cores.

In every round, processes with one thread each compute as many multiply-adds as FedAvg's training of
the cohort, and then as many as the test on all test images, by `torch.mm`.
"""

import time
from multiprocessing import get_context

import torch

from benchmarks.measure import write_rounds
from benchmarks.peers import make_parser
from benchmarks.w1 import Workload

SIDE = 1024  # rows and columns of each matrix
# Multiply-adds of the CNN for one image: a forward pass, and a training step, whose backward pass
# is twice as long, except that the first layer needs no gradient of its input.
FIRST, FORWARD = 32 * 32 * 32 * 3 * 25, 17_668_096
TRAINING = 3 * FORWARD - FIRST


def multiply(total: float) -> None:
    """Compute `total` multiply-adds on one thread."""
    torch.set_num_threads(1)
    one, other, result = torch.rand(3, SIDE, SIDE)
    for _ in range(round(total / SIDE**3)):
        torch.mm(one, other, out=result)


def main() -> None:
    parser = make_parser("product", __doc__)
    options = parser.parse_args()
    workload, rows = Workload.load(options.workload), []
    with get_context("spawn").Pool(options.workers) as pool:
        for number in range(1, options.rounds + 1):
            examples, start = workload.examples(number), time.perf_counter()
            pool.map(multiply, [examples * TRAINING / options.workers] * options.workers, 1)
            trained = time.perf_counter()
            total = len(workload.y_test) * FORWARD
            pool.map(multiply, [total / options.workers] * options.workers, 1)
            end = time.perf_counter()
            row = {"round": number, "train_samples_per_second": examples / (trained - start)}
            row |= {"train_seconds": trained - start, "evaluation_seconds": end - trained}
            rows.append(row | {"seconds": end - start})
    write_rounds(options.out, rows)


if __name__ == "__main__":
    main()
