"""FedAvg on W1 in Flower's simulation on Ray, with one actor per process and one thread each.

The code follows Flower's PyTorch quickstart: a new model for each call, a DataLoader over the
client's examples, and torchvision's transforms for each example (with our Cutout, which torchvision
lacks). The memory layout is the default, and SGD is not fused. Three choices favour Flower: the
faster model (pooling before ReLU), pixels in a file that stays mapped in the actor, and a server
that tests the global model with as many threads as there are actors. The server tells each node
which client's data to train on, so that all contestants have the same cohorts.
"""

import argparse
import os
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # before their import

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.bare import build
from benchmarks.measure import write_rounds
from benchmarks.peers import accuracy, make_parser, use
from benchmarks.w1 import (
    BATCH,
    CLIENTS,
    CROP_PADDING,
    CUTOUT,
    LR,
    LR_DECAY,
    MOMENTUM,
    WEIGHT_DECAY,
    Workload,
)


@lru_cache(maxsize=1)
def load(folder: str) -> Workload:
    """Load the workload. Each actor loads it only once."""
    torch.set_num_threads(1)
    return Workload.load(Path(folder))


def cutout(x: torch.Tensor) -> torch.Tensor:
    """Set a square around a random pixel to zero. The square is clipped at the border."""
    cy, cx = torch.randint(0, 32, (2,)).tolist()
    half = CUTOUT // 2
    x[:, max(cy - half, 0) : cy + half, max(cx - half, 0) : cx + half] = 0
    return x


class ClientData(Dataset):
    """One client's augmented examples."""

    def __init__(self, workload: Workload, index: Any):
        self.x = torch.from_numpy(workload.x_train[index]).permute(0, 3, 1, 2)
        self.y = torch.from_numpy(workload.y_train[index])
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=CROP_PADDING),
                transforms.RandomHorizontalFlip(),
                transforms.ConvertImageDtype(torch.float32),
                transforms.Normalize(workload.mean.tolist(), workload.std.tolist(), inplace=True),
                transforms.Lambda(cutout),
            ]
        )

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.x[i]), self.y[i]


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    workload, number = load(str(config["workload"])), int(config["server-round"])
    data = ClientData(workload, workload.cohort(number)[int(config["position"])])
    device = str(config["device"])
    use(str(config["precision"]))
    net = build(str(config["model"])).to(device)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    sgd = torch.optim.SGD(
        net.parameters(),
        lr=LR * LR_DECAY ** (number - 1),
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
    )
    batches = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(int(workload.epochs)):
        for x, y in batches:
            sgd.zero_grad()
            F.cross_entropy(net(x.to(device)), y.to(device)).backward()
            sgd.step()
    arrays, metrics = ArrayRecord(net.state_dict()), MetricRecord({"num-examples": len(data)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class TimedFedAvg(FedAvg):
    """Flower's FedAvg with the cohorts of W1, which measures the time of each round."""

    def __init__(self, options: argparse.Namespace):
        super().__init__(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        self.options, self.workload = options, Workload.load(options.workload)
        self.rows: list[dict[str, float]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Any]:
        while len(list(grid.get_node_ids())) < CLIENTS:  # the nodes register one after the other
            time.sleep(0.1)
        self.began = time.perf_counter()
        messages = []
        for position, node in enumerate(list(grid.get_node_ids())[: self.workload.sizes.shape[1]]):
            own = ConfigRecord(
                {
                    "server-round": server_round,
                    "position": position,
                    "workload": str(self.options.workload),
                    "device": self.options.device,
                    "precision": self.options.precision,
                    "model": self.options.model,
                }
            )
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})
            messages += self._construct_messages(content, [node], "train")
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
        replies = list(replies)
        trained = time.perf_counter() - self.began
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != self.workload.sizes.shape[1]:
            raise RuntimeError(
                f"round {server_round}: {len(replies)} replies, failures: {failed[:1]}"
            )
        result = super().aggregate_train(server_round, replies)
        rate = self.workload.examples(server_round) / trained
        seconds = time.perf_counter() - self.began
        row = {
            "round": server_round,
            "train_samples_per_second": rate,
            "train_seconds": trained,
            "seconds": seconds,
        }
        self.rows.append(row)
        return result

    def test(self, server_round: int, arrays: ArrayRecord) -> None:
        """Test the global model. Flower calls this before the first and after every round."""
        if not server_round:
            return
        start, row = time.perf_counter(), self.rows[-1]
        net, device = build(self.options.model), self.options.device
        net.load_state_dict(arrays.to_torch_state_dict())
        row["test_accuracy"] = accuracy(net.to(device), self.workload, device)
        row["evaluation_seconds"] = time.perf_counter() - start
        row["seconds"] += row["evaluation_seconds"]


def main() -> None:
    parser = make_parser("flower", __doc__)
    options = parser.parse_args()
    use(options.precision)
    strategy, server_app = TimedFedAvg(options), ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(options.workers)
        initial = ArrayRecord(build(options.model).state_dict())
        strategy.start(
            grid=grid, initial_arrays=initial, num_rounds=options.rounds, evaluate_fn=strategy.test
        )

    share = 0.0 if options.device == "cpu" else 1 / options.workers  # the actors share one GPU
    resources = {"num_cpus": 1, "num_gpus": share}
    backend = {"client_resources": resources, "init_args": {"num_cpus": options.workers}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=backend)
    write_rounds(options.out, strategy.rows)


if __name__ == "__main__":
    # import by name, so that Ray's actors find the objects that they receive
    from benchmarks.peers import flower

    flower.main()
