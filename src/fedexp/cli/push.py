"""Upload finished runs and sweeps to W&B from their files (`fedexp push DIRECTORY ...`)."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedexp.config.options import conf_directory
from fedexp.core.errors import ConfigError
from fedexp.core.storage import regular
from fedexp.data.partitioned import find_task_partitions
from fedexp.figures import make_figures
from fedexp.figures.load import load_history
from fedexp.figures.pictures import Pictures, picture_files
from fedexp.rundir import files
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.base import RunInfo, Tracker, final_tables, records
from fedexp.trackers.several import TrackerGroup
from fedexp.trackers.wandb_tracker import Wandb, WandbTracker

TABLES = ("table.csv", "rounds_to_target.csv")  # a sweep's tables
UPLOAD_SECONDS = 600.0  # more than during a run, since a push does nothing but wait for the upload


def list_directories(directories: Sequence[Path]) -> list[Path]:
    """Return all directories, with the run directories of each sweep before the sweep itself."""
    found: list[Path] = []
    for directory in directories:
        if is_sweep(directory):
            found += sorted(path.parent for path in directory.glob(f"*/{files.CONFIG}"))
        found.append(directory)
    return list(dict.fromkeys(found))


def is_sweep(directory: Path) -> bool:
    return (directory / TABLES[0]).exists() and not (directory / files.CONFIG).exists()


def push(directory: Path, changes: Mapping[str, Any], new: bool = False) -> bool:
    """Push a directory, and return whether W&B received everything."""
    if is_sweep(directory):
        return push_tables(directory, changes, new)
    run = load_finished(directory)
    tracker = WandbTracker(make_config(run.config, changes))
    replay(run, TrackerGroup([tracker]), None if new else last_wandb_id(directory))
    return tracker.complete


def push_tables(directory: Path, changes: Mapping[str, Any], new: bool = False) -> bool:
    """Push a sweep's tables as a separate W&B run, and return whether W&B received them."""
    name = directory.absolute().name
    paths = [directory / file for file in TABLES if (directory / file).exists()]
    try:
        tables = {path.stem: pd.read_csv(regular(path)) for path in paths}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}: a table cannot be read ({error})") from error
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
        wandb_id=None if new else last_wandb_id(directory),
    )
    changes = {"name": None, **changes}  # the configured name is that of a single run
    tracker = WandbTracker(make_config(config_of_sweep(directory), changes))
    guarded = TrackerGroup([tracker])
    guarded.start(info)
    guarded.finish({}, [], tables)
    return tracker.complete


def config_of_sweep(directory: Path) -> dict[str, Any]:
    """Return the first readable configuration of a sweep's runs, or an empty dict."""
    paths = sorted(directory.glob(f"*/{files.CONFIG}"))
    return next(filter(None, (RunDirectory(path.parent).config for path in paths)), {})


def load_finished(directory: Path) -> RunDirectory:
    """Return a finished run.

    Raises ConfigError if the run is unfinished, failed or damaged.
    """
    run = RunDirectory(directory)
    if not run.has(files.SUMMARY):
        raise ConfigError(f"{directory}: contains no finished run ({files.SUMMARY} is missing)")
    if run.damaged:
        raise ConfigError(f"{directory}: {run.describe_damage()}")
    if not run.has_ended:
        raise ConfigError(f"{directory}: the run failed (see {files.ERROR})")
    return run


def replay(run: RunDirectory, tracker: Tracker, wandb_id: str | None = None) -> None:
    """Log a finished run to a tracker.

    Raises ConfigError if a file is damaged. Nothing is logged in that case.
    """
    config = run.config
    rows = list(records(run, {view: load_history(run, view) for view in run.views}))
    try:
        rounds = (config.get("scenario") or {}).get("rounds_per_task") or config["rounds"]
        info = RunInfo.of(
            run.directory,
            config,
            run.summary.get("sweep"),
            total_rounds=int(rounds) * (1 + len(find_task_partitions(run.directory))),
            first_round=0,
            classes=tuple(run.class_names or ()),
            wandb_id=wandb_id,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{run.directory / files.CONFIG}: is incomplete ({error!r})") from error
    tracker.start(info)
    for record in rows:
        tracker.log_round(record)
    pictures = picture_files(run.directory / "figures")
    if not pictures and Pictures.of(config.get("figures")).draw:
        pictures = make_figures(run.directory)
    tracker.finish(run.summary, pictures, final_tables(run.directory))


def wandb_node(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the node of the W&B tracker in a configuration, or an empty dict if W&B is not used.

    W&B may be the only tracker or one of several.
    """
    node = config.get("tracker") or {}
    target = f"{Wandb.__module__}.{Wandb.__qualname__}"
    for each in (node, *(node.get("members") or ())):
        if each.get("_target_") == target and each.get("mode") != "disabled":
            return each
    return {}


def make_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Wandb:
    """Return a run's W&B tracker (or a default tracker) after changing some of its options."""
    default = conf_directory() / "tracker" / "wandb.yaml"
    values = yaml.safe_load(default.read_text(encoding="utf-8")) | wandb_node(config) | changes
    known = {field.name: values[field.name] for field in fields(Wandb)}
    return Wandb(**known | {"tags": tuple(known["tags"])})


def last_wandb_id(directory: Path) -> str | None:
    """Return the id of the newest W&B run in a directory, or None if W&B was not used.

    The id is read from the folder's name, `run-<time>-<id>` or `offline-run-<time>-<id>`.
    """
    folders = (directory / "wandb").glob("*run-*-*")
    parts = [path.name.removeprefix("offline-").split("-") for path in folders]
    newest = max(parts, default=None, key=lambda each: each[1])
    return "-".join(newest[2:]) if newest else None
