"""Runs that other sweeps have made and that stand in the tables of a named sweep, found by
composing its jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedexp.analysis.sweep import Sweep, launches
from fedexp.core import yaml_files
from fedexp.rundir.elsewhere import cell_key, finished_runs, made_with, views_of
from fedexp.rundir.reader import RunDirectory


@dataclass(frozen=True)
class Found:
    """A run of another sweep and the overrides of the job that it stands for."""

    directory: Path
    overrides: tuple[str, ...]


def found_for(sweep: Sweep, directory: Path, conf: Path, own: Sequence[Path]) -> list[Found]:
    """Return the runs that other sweeps have made and that stand in the tables of this one.

    directory: of the sweep; own: the runs that it has already. Of each cell and seed one run is
    counted; those come first that were tested in the view of the sweep's rule, and a run of its own
    without it is none."""
    configs = {path: made_with(path) for path in finished_runs(directory) if path not in own}
    configs = {
        path: config for path, config in configs.items() if config and directory not in path.parents
    }
    if not configs:
        return []
    view = sweep.rule.view
    mine = [config for config in map(made_with, own) if view in views_of(config)]
    have = {(cell_key(config), config.get("seed")) for config in mine}
    jobs = jobs_of(sweep, conf, frozenset(map(kind_of, configs.values())))
    found = []
    for path, config in sorted(configs.items(), key=lambda item: view not in views_of(item[1])):
        name = (cell_key(config), config.get("seed"))
        if name[0] in jobs and name not in have and RunDirectory(path).finished:
            have.add(name)
            given = [
                text
                for text in RunDirectory(path).overrides
                if text.startswith("hardware.precision=")
            ]
            found.append(Found(path, (*jobs[name[0]], f"seed={name[1]}", *given)))
    return found


def kind_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return (data set, algorithm), the options."""
    choices = config.get("choices") or {}
    return str(choices.get("dataset")), str(choices.get("algorithm"))


def jobs_of(
    sweep: Sweep, conf: Path, kinds: frozenset[tuple[str, str]]
) -> dict[str, tuple[str, ...]]:
    """Map `cell_key` of every job of a sweep with one of these data sets and algorithms to its
    overrides.

    Composing is what takes the time, a tenth of a second a job, so the others are left out by their
    overrides."""
    from hydra import compose, initialize_config_dir

    from fedexp.analysis.sweep import expand
    from fedexp.config.values import resolve

    found: dict[str, tuple[str, ...]] = {}
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        for overrides in launches(sweep, []):
            for job in expand([text for text in overrides if text not in sweep.common]):
                given = dict(text.partition("=")[::2] for text in job)
                data = given.get("dataset") or dataset_of(conf, given.get("experiment", ""))
                if (data, given.get("algorithm", "")) in kinds:
                    found[cell_key(resolve(compose("config", overrides=job)))] = tuple(job)
    return found


@cache
def dataset_of(conf: Path, experiment: str) -> str:
    """Return the data set that an option of the group `experiment` chooses; "" where there is
    none."""
    path = conf / "experiment" / f"{experiment}.yaml"
    if not path.is_file():
        return ""
    entries = yaml_files.load(path.read_text(encoding="utf-8")).get("defaults", ())
    return next(
        (entry["override /dataset"] for entry in entries if "override /dataset" in entry), ""
    )
