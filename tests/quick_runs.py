"""Options of runs that take a second."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from fedexp.rundir.identity import is_free

FEDERATION = (
    *("num_clients=8", "participation=0.5", "local.epochs=1", "min_size=2", "figures=false"),
    *("hardware=cpu", "hardware.engine=sequential", "hardware.threads=1", "tracker=none"),
)
# three steps a client
SMALL = (*FEDERATION, "model.channels=[4]", "model.hidden=[8]", "local.batch_size=60")


def write_run(
    directory: Path,
    overrides: dict[str, str],
    rounds: int = 6,
    classes: int = 3,
    status: str = "completed",
    names: list[str] | None = None,
) -> Path:
    """Write a run directory in which the accuracy of class c after round r is known."""
    groups = {"algorithm": "fedavg", "dataset": "digits", "partition": "lda"}
    chosen = groups | {"seed": "0"} | overrides
    groups = {key: chosen[key] for key in groups}
    (directory / ".hydra").mkdir(parents=True)
    given = [f"{key}={value}" for key, value in overrides.items()]
    (directory / ".hydra/overrides.yaml").write_text(yaml.safe_dump(given))
    config = {key: yaml.safe_load(chosen[key]) for key in chosen.keys() - groups.keys()}
    config |= {"rounds": rounds, "local": {"epochs": 5}, "choices": groups}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    seed, number = int(chosen["seed"]), np.arange(rounds + 1)
    shift = 0.01 * seed + 0.05 * (chosen["algorithm"] != "fedavg")
    accuracy = np.minimum(1, number[:, None] / (rounds + 1 + np.arange(classes)) + shift)
    table = pd.DataFrame(accuracy).rename_axis("round").rename_axis("class", axis="columns")
    table.stack().rename("accuracy").to_csv(directory / "class_accuracy.csv")
    columns = {"round": number, "test_accuracy": accuracy.mean(1), "test_loss": 2.3, "lr": 0.1}
    columns |= {"forgetting": np.where(number > 1, 0.1 * number, np.nan)}
    columns |= {"bytes_up": 5, "seconds": 1.5}
    pd.DataFrame(columns).to_csv(directory / "rounds.csv", index=False)
    names = names or [f"class {c}" for c in range(classes)]
    np.savez(directory / "partition.npz", classes=np.array(names))
    summary = groups | {"status": status, "seed": seed, "rounds": rounds, "seconds": 1.5 * rounds}
    summary |= {"accuracy": accuracy[-1].mean(), "best_accuracy": accuracy.mean(1).max()}
    summary |= {"forgetting": 0.1 * rounds, "rounds_to_target": {"0.5": None}}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def change_summary(directory: Path, **values) -> None:
    path = directory / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def make_run(
    folder, overrides, curve, status="completed", forgetting=0.5, views=True, config=None, **summary
):
    """Make a run directory with the files that tables read.

    views: also test augmented images, with the same results. config: further values of the
    configuration; by default those that FedKA's sweeps require.
    """
    config = {"test_per_client": 0.25} if config is None else config
    directory = folder / f"run{len(list(folder.glob('run*')))}"
    (directory / ".hydra").mkdir(parents=True)
    (directory / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    rounds = {"round": range(len(curve) + 1), "test_accuracy": [0.1, *curve]}
    rounds["forgetting"] = (
        [None] * (len(curve) > 1) + [None] + [forgetting] * max(len(curve) - 1, 1)
    )
    if views:
        rounds |= {f"{name}_augmented": rounds[name] for name in ("test_accuracy", "forgetting")}
    pd.DataFrame(rounds).to_csv(directory / "rounds.csv", index=False)
    for name in ["class_accuracy.csv", *["class_accuracy_augmented.csv"] * views]:
        classes = {"round": rounds["round"], "class": 0, "accuracy": rounds["test_accuracy"]}
        pd.DataFrame(classes).to_csv(directory / name, index=False)
    data = {"train": 50_000, "test": 10_000, "classes": 10, "clients": 100}
    config = {"choices": {}, "rounds": len(curve), "expected": data} | config
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    if "tasks" in summary:
        (directory / "tasks.csv").write_text("round,task,evaluated_task,accuracy\n1,1,1,0.5\n")
    algorithm = next(
        (o.partition("=")[2] for o in overrides if o.startswith("algorithm=")), "fedavg"
    )
    content = {
        "status": status,
        "algorithm": algorithm,
        "dataset": "cifar10",
        "partition": "p",
        "rounds": len(curve),
    }
    content |= {
        "accuracy": curve[-1],
        "best_accuracy": max(curve),
        "forgetting": forgetting,
    } | summary
    (directory / "summary.json").write_text(json.dumps(content))
    origin = {"format": 2, "identity": "1f", "started": "2026-11-28T12:00:00+00:00"}
    origin |= {"directory": "/home/me", "shape": [32, 32, 3], "parts": []}
    values = dict(text.lstrip("+").split("=", 1) for text in overrides)
    origin["values"] = {key: value for key, value in values.items() if not is_free(key)}
    (directory / "origin.json").write_text(json.dumps(origin))
