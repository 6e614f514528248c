"""FedAvg on W1 in other simulators, written as their documentation recommends."""

import argparse
from pathlib import Path


def make_parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all simulators have. text: what the module does."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.peers.{module}", description=text)
    parser.add_argument("workload", type=Path, help="directory written by benchmarks.w1")
    parser.add_argument("out", type=Path, help="directory for rounds.csv")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, including one warm-up round")
    return parser
