"""Runs that other sweeps below the same `multirun` directory have made: measured once, a run counts in every table.

A job that is complete elsewhere is not run again: its directory gets `elsewhere.json`, which names the run. The report
of a named sweep also finds runs that nobody noted, by composing those of its jobs that could be one of them.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedexp import files
from fedexp.files import finished_summary
from fedexp.identity import fingerprint
from fedexp.sweep import Sweep, launches

NOTE, ROOT = "elsewhere.json", "multirun"
# What may differ between a job and a run that stands for it in a table: the seed, and what `protocol_of` has harmless.
OPEN = ("seed", "seeds", "hardware", "forgetting_metric", "targets", "target_fractions", "test_views")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def exact(config: Mapping[str, Any]) -> str:
    """Equal for configurations that have the same result. The only place that says when two runs are the same."""
    return fingerprint(config)


def alike(config: Mapping[str, Any]) -> str:
    """Equal for runs that stand in the same cell of a table, with other seeds or on other hardware."""
    kept = {key: value for key, value in config.items() if key not in OPEN}
    dataset = kept.get("dataset")
    if isinstance(dataset, Mapping) and isinstance(dataset.get("root"), str):
        kept["dataset"] = {**dataset, "root": Path(dataset["root"]).name}  # wherever data_dir is
    return exact(kept)


def finished_runs(directory: Path) -> Iterator[Path]:
    """The directories of all runs that are over below the `multirun` directory in which a sweep's directory (or one
    within it) lies, in the order of their names; none where it lies in no `multirun`."""
    root = next((path for path in directory.absolute().parents if path.name == ROOT), None)
    for folder, names, found in os.walk(root) if root is not None else ():
        names.sort()
        if files.CONFIG in found:
            names.clear()
            if finished_summary(Path(folder)) is not None:
                yield Path(folder)


def config_of(directory: Path) -> dict[str, Any]:
    """The configuration of a run; {} where it cannot be read."""
    try:
        config = yaml.load((directory / files.CONFIG).read_text(encoding="utf-8"), Loader=LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def complete(directory: Path, config: Mapping[str, Any]) -> Path | None:
    """The run elsewhere that makes the job of this directory needless; None where there is none."""
    wanted = exact(config)
    others = (other for other in finished_runs(directory) if other != directory.absolute())
    return next((other for other in others if exact(config_of(other)) == wanted), None)


def note(directory: Path, other: Path, overrides: Sequence[str]) -> None:
    """Writes into the directory of a job which run stands for it."""
    text = yaml.safe_dump(list(overrides), allow_unicode=True).encode()
    files.write_atomically(directory / ".hydra" / "overrides.yaml", text)
    files.write_json(directory / NOTE, {"run": os.path.relpath(other, directory)})


def noted(directory: Path) -> Path | None:
    """The finished run that stands for the job of this directory, as noted there."""
    try:
        other = directory / json.loads((directory / NOTE).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(os.path.normpath(other)) if finished_summary(other) is not None else None


@dataclass(frozen=True)
class Found:
    """A run of another sweep and the overrides of the job that it stands for."""

    directory: Path
    overrides: tuple[str, ...]


def found_for(sweep: Sweep, directory: Path, conf: Path, own: Sequence[Path]) -> list[Found]:
    """Runs that other sweeps have made and that stand in the tables of this one.

    directory: of the sweep; own: the runs that it has already. Of each cell and seed one run is counted."""
    configs = {path: config_of(path) for path in finished_runs(directory) if path not in own}
    configs = {path: config for path, config in configs.items() if config and directory not in path.parents}
    if not configs:
        return []
    have = {(alike(config), config.get("seed")) for config in map(config_of, own)}
    jobs = jobs_of(sweep, conf, frozenset(map(kind_of, configs.values())))
    found = []
    for path, config in configs.items():
        name = (alike(config), config.get("seed"))
        if name[0] in jobs and name not in have:
            have.add(name)
            precision = (config.get("hardware") or {}).get("precision")
            given = [f"seed={name[1]}", *([f"hardware.precision={precision}"] if precision else [])]
            found.append(Found(path, (*jobs[name[0]], *given)))
    return found


def kind_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """(data set, algorithm), the options."""
    choices = config.get("choices") or {}
    return str(choices.get("dataset")), str(choices.get("algorithm"))


def jobs_of(sweep: Sweep, conf: Path, kinds: frozenset[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """`alike` of every job of a sweep with one of these data sets and algorithms -> its overrides.

    Composing is what takes the time, a tenth of a second a job, so the others are left out by their overrides."""
    from hydra import compose, initialize_config_dir

    from fedexp.build import resolve
    from fedexp.preview import expand

    found: dict[str, tuple[str, ...]] = {}
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        for overrides in launches(sweep, []):
            for job in expand([text for text in overrides if text not in sweep.common]):
                given = dict(text.partition("=")[::2] for text in job)
                data = given.get("dataset") or dataset_of(conf, given.get("experiment", ""))
                if (data, given.get("algorithm", "")) in kinds:
                    found[alike(resolve(compose("config", overrides=job)))] = tuple(job)
    return found


@cache
def dataset_of(conf: Path, experiment: str) -> str:
    """The data set that an option of the group `experiment` chooses; "" where there is none."""
    path = conf / "experiment" / f"{experiment}.yaml"
    if not path.is_file():
        return ""
    entries = yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER).get("defaults", ())
    return next((entry["override /dataset"] for entry in entries if "override /dataset" in entry), "")
