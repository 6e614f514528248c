"""FedAvg on W1 in other simulators, written as their documentation recommends."""

import argparse
from pathlib import Path

import torch

from benchmarks.w1 import Workload


def make_parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all simulators have. text: what the module does."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.peers.{module}", description=text)
    parser.add_argument("workload", type=Path, help="directory written by benchmarks.w1")
    parser.add_argument("out", type=Path, help="directory for rounds.csv")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, including one warm-up round")
    parser.add_argument("--workers", type=int, default=2, help="processes, actors or threads")
    parser.add_argument("--device", default="cpu", help="device of the training")
    parser.add_argument("--precision", choices=("fp32", "tf32"), default="fp32")
    parser.add_argument("--model", choices=("cnn", "resnet18"), default="cnn")
    return parser


def use(precision: str) -> None:
    """Let torch multiply in tf32 or not, where the device can."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


@torch.no_grad()
def accuracy(net: torch.nn.Module, workload: Workload, device: str) -> float:
    """Return the test accuracy of the global model, which is changed to eval mode."""
    net.eval()
    x = (
        torch.from_numpy(workload.x_test).to(device).float() / 255
        - torch.tensor(workload.mean, device=device)
    ) / torch.tensor(workload.std, device=device)
    predicted = torch.cat([net(part).argmax(1) for part in x.permute(0, 3, 1, 2).split(500)])
    return (predicted.cpu() == torch.from_numpy(workload.y_test)).float().mean().item()
