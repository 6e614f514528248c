"""`python -m fedexp.view`: what is in the page, that its data cannot break out of it, and that a real browser shows it."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from browser import chromium, find_chromium
from fedexp.view import render
from fedexp.view.__main__ import main
from fedexp.view.collect import MOST_POINTS, Files, collect, distinct, find_runs, thin

NASTY = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>'\"&<!--"


def write_csv(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_run(
    directory: Path, overrides: dict[str, str], rounds: int = 6, classes: int = 3, status="completed", names=None
) -> Path:
    """A run directory as a run leaves it, without the training: accuracy of class c after round r is known."""
    chosen = {"algorithm": "fedavg", "dataset": "digits", "partition": "lda", "seed": "0"} | overrides
    (directory / ".hydra").mkdir(parents=True)
    (directory / ".hydra/overrides.yaml").write_text(yaml.safe_dump([f"{k}={v}" for k, v in overrides.items()]))
    groups = {key: chosen[key] for key in ("algorithm", "dataset", "partition")}
    config = {k: yaml.safe_load(v) for k, v in chosen.items() if k not in groups} | {
        "rounds": rounds,
        "local": {"epochs": 5},
        "choices": groups,
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    shift = 0.01 * int(chosen["seed"]) + 0.05 * (chosen["algorithm"] != "fedavg")
    accuracy = {(r, c): min(1.0, r / (rounds + 1 + c) + shift) for r in range(rounds + 1) for c in range(classes)}
    write_csv(
        directory / "class_accuracy.csv",
        [{"round": r, "class": c, "accuracy": a} for (r, c), a in accuracy.items()],
    )
    test = [float(np.mean([accuracy[r, c] for c in range(classes)])) for r in range(rounds + 1)]
    write_csv(
        directory / "rounds.csv",
        [
            {
                "round": r,
                "test_accuracy": test[r],
                "test_loss": 2.3 / (r + 1),
                "train_loss": 2 / r if r else "",
                "lr": 0.1,
                "forgetting": 0.1 * r if r > 1 else "",
                "bytes_up": 5,
                "seconds": 1.5,
            }
            for r in range(rounds + 1)
        ],
    )
    np.savez(directory / "partition.npz", classes=np.array(names or [f"class {c}" for c in range(classes)]))
    summary = {
        "status": status,
        "seed": int(chosen["seed"]),
        **groups,
        "accuracy": test[-1],
        "best_accuracy": max(test),
    }
    summary |= {
        "forgetting": 0.1 * rounds,
        "rounds": rounds,
        "seconds": 1.5 * rounds,
        "rounds_to_target": {"0.5": None},
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def write_sweep(folder: Path, algorithms=("fedavg", "fedntd"), alphas=("0.1", "1"), seeds=2, **options) -> Path:
    for algorithm in algorithms:
        for alpha in alphas:
            for seed in range(seeds):
                overrides = {"algorithm": algorithm, "alpha": alpha, "seed": str(seed)}
                write_run(folder / f"{algorithm}_{alpha}_{seed}", overrides, **options)
    return folder
