"""The names of the files of a run directory."""

import json
from pathlib import Path
from typing import Any

ROUNDS, CLASSES, CLIENTS, TASKS = "rounds.csv", "class_accuracy.csv", "clients.csv", "tasks.csv"
CONFIG, SUMMARY, PARTITION, LOCAL = "config.yaml", "summary.json", "partition.npz", "local_class_accuracy.npz"
CHECKPOINT, PREVIOUS, CLIENT_STATES = "checkpoint/latest.pt", "checkpoint/previous.pt", "checkpoint/clients"
ERROR = "error.txt"


def remove_temporaries(directory: Path) -> None:
    """Remove what a run that was killed while it wrote has left behind."""
    for folder in (".", ".hydra", "checkpoint", CLIENT_STATES, "figures"):
        for path in (directory / folder).glob(".*.tmp"):
            if not path.is_dir():
                path.unlink(missing_ok=True)


def finished_summary(directory: Path) -> dict[str, Any] | None:
    """Return the summary of a run that has come to its end; None where there is more to do."""
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ended = isinstance(summary, dict) and summary.get("status") in ("completed", "diverged")
    return summary if ended else None


CHECKPOINT_FORMAT = 2
