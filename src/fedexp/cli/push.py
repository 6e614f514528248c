"""W&B runs from the files of finished runs and sweeps alone (`fedexp push DIRECTORY ...`)."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedexp.config.options import conf_directory
from fedexp.core.errors import ConfigError
from fedexp.core.storage import regular
from fedexp.rundir import files
from fedexp.rundir.links import require_no_way_out
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.base import RunInfo
from fedexp.trackers.replay import load_finished, replay
from fedexp.trackers.wandb_tracker import Wandb, WandbTracker

TABLES = ("table.csv", "rounds_to_target.csv")  # of a sweep
UPLOAD_SECONDS = 600.0  # a push has nothing else to do than to wait for it


def expand(directories: Sequence[Path]) -> list[Path]:
    """Expand a sweep to its runs and itself."""
    found: list[Path] = []
    for directory in directories:
        if is_sweep(directory):
            found += sorted(path.parent for path in directory.glob(f"*/{files.CONFIG}"))
        found.append(directory)
    return list(dict.fromkeys(found))


def is_sweep(directory: Path) -> bool:
    return (directory / TABLES[0]).exists() and not (directory / files.CONFIG).exists()


def push(directory: Path, changes: Mapping[str, Any], new: bool = False) -> bool:
    """Push a directory; return whether W&B has taken all of it. Raises ConfigError for a link out
    of the directory: what it leads to would be uploaded."""
    require_no_way_out(directory)
    if is_sweep(directory):
        return push_tables(directory, config_of_sweep(directory), changes, new)
    run = load_finished(directory)
    tracker = WandbTracker(make_config(run.config, changes))
    replay(run, tracker, None if new else former_id(directory))
    return tracker.complete


def push_tables(
    directory: Path, config: Mapping[str, Any], changes: Mapping[str, Any], new: bool = False
) -> bool:
    """Push the tables of a sweep as a W&B run of their own. config: of one of its runs."""
    name = directory.absolute().name
    tables = {
        Path(file).stem: read_table(directory / file)
        for file in TABLES
        if (directory / file).exists()
    }
    info = RunInfo(
        directory=directory,
        config={"sweep": name},
        name=f"{name} table",
        group=name,
        job_type="table",
        tags=(name,),
        total_rounds=0,
        first_round=0,
        classes=(),
        wandb_id=None if new else former_id(directory),
    )
    # What a user calls single runs would be wrong for the table.
    tracker = WandbTracker(
        make_config(config, {"name": None, "group": None, "job_type": None, **changes})
    )
    tracker.start(info)
    tracker.finish({}, [], tables)
    return tracker.complete


def config_of_sweep(directory: Path) -> dict[str, Any]:
    """The configuration of the newest run of a sweep whose configuration can be read."""
    paths = sorted(
        directory.glob(f"*/{files.CONFIG}"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    return next(filter(None, (RunDirectory(path.parent).config for path in paths)), {})


def read_table(path: Path) -> pd.DataFrame:
    """A table of a sweep. Raises ConfigError."""
    try:
        return pd.read_csv(regular(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def is_tracked(config: Mapping[str, Any]) -> bool:
    """Return whether a run with this configuration is logged to W&B."""
    return bool(wandb_node(config))


def wandb_node(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the node by which a run with this configuration is logged to W&B, alone or among
    others; empty where it is not."""
    node = config.get("tracker") or {}
    for each in (node, *(node.get("members") or ())):
        if (
            each.get("_target_") == f"{Wandb.__module__}.{Wandb.__qualname__}"
            and each.get("mode") != "disabled"
        ):
            return each
    return {}


def make_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Wandb:
    """Return the tracker of a run's configuration, else the default one, with changes."""
    values = yaml.safe_load(
        (conf_directory() / "tracker" / "wandb.yaml").read_text(encoding="utf-8")
    )
    values |= wandb_node(config)
    values |= changes
    known = {field.name: values[field.name] for field in fields(Wandb)}
    return Wandb(**known | {"tags": tuple(known["tags"])})


def former_id(directory: Path) -> str | None:
    """Return the id of the newest W&B run below a directory: of `run-<time>-<id>` or
    `offline-run-<time>-<id>`."""
    times = {
        path: path.name.removeprefix("offline-").split("-")
        for path in (directory / "wandb").glob("*run-*-*")
    }
    newest = max(times.values(), default=None, key=lambda parts: parts[1])
    return "-".join(newest[2:]) if newest else None
