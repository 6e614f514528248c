"""What a run is made of (`Experiment`) and what changes from round to round (`State`, all that a checkpoint holds)."""

from dataclasses import dataclass, field
from typing import Any

import torch

from fedexp import tree
from fedexp.algorithms.base import FedAvg, Federation
from fedexp.data.partition import Partition
from fedexp.engine.base import Engine, Workbench
from fedexp.errors import ConfigError
from fedexp.metrics.forgetting_metric import Metrics
from fedexp.metrics.history import History
from fedexp.settings import Seeds, Settings
from fedexp.tree import Params, Tree

CHECKPOINT_FORMAT = 1


@dataclass(frozen=True)
class Experiment:
    """Everything that a run is made of, checked and loaded."""

    settings: Settings
    seeds: Seeds
    algorithm: FedAvg
    partition: Partition
    federation: Federation
    bench: Workbench
    engine: Engine
    metrics: Metrics
    initial: Params  # the initial global model
    mixes_examples: bool  # the model's batch norm needs batches of at least two examples

    def initial_state(self) -> "State":
        server = self.algorithm.server_init(self.initial, self.federation)
        return State(server | {"buffers": self.bench.net.buffers()}, History(counts=self.partition.counts))


@dataclass
class State:
    """The state after a whole round."""

    server: Tree
    history: History
    round: int = 0
    clients: dict[int, Tree] = field(default_factory=dict)  # what clients keep; absent: none, or never took part
    accuracy: list[tuple[int, float]] = field(default_factory=list)  # (round, test accuracy) of evaluated rounds
    examples: int = 0  # trained on by clients so far
    train_seconds: float = 0.0
    seconds: float = 0.0
    status: str = "running"  # running | completed | diverged
    wandb_id: str | None = None

    def to_tree(self) -> Tree:
        """Tensors, numbers and strings only, so that it loads with weights_only=True."""
        plain = {k: getattr(self, k) for k in ("round", "examples", "train_seconds", "seconds", "status", "wandb_id")}
        return plain | {
            "format": CHECKPOINT_FORMAT,
            "server": self.server,
            "clients": self.clients,
            "accuracy": self.accuracy,
            "history": self.history.to_tree(),
        }

    @classmethod
    def from_tree(cls, saved: Tree, device: torch.device) -> "State":
        if saved.get("format") != CHECKPOINT_FORMAT:
            raise ConfigError(f"checkpoint: format {saved.get('format')}, this fedexp reads {CHECKPOINT_FORMAT}")
        values: dict[str, Any] = {k: v for k, v in saved.items() if k not in ("format", "history", "lengths")}
        values |= tree.map(
            lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
            {k: values[k] for k in ("server", "clients")},
        )
        return cls(history=History.from_tree(saved["history"]), **values)
