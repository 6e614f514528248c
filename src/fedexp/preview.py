"""`fedexp --multirun ... preview=true`: the jobs of a sweep, which are done, and what the others will take."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from fedexp import files
from fedexp.identity import run_name
from fedexp.lock import is_occupied
from fedexp.trackers.progress import duration

# What two runs must share for a round of one to take as long as a round of the other; then what may differ.
WORK = ("dataset", "model", "local", "num_clients", "participation", "hardware.device", "hardware.precision")


@dataclass(frozen=True)
class Planned:
    """A job that has been composed but not started."""

    directory: Path
    config: Mapping[str, Any]

    @property
    def rounds(self) -> int:
        """Of one task, where there are several."""
        return int(self.config.get("rounds", 0))


@dataclass(frozen=True)
class Measured:
    """A run that has been made."""

    config: Mapping[str, Any]
    seconds: float  # of a round, median
    bytes: int  # of its directory


def expand(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Every job of a multirun, as Hydra's basic sweeper makes them."""
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides=list(overrides)):
        key = override.get_key_element()
        if override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line or f"{key}={override.get_value_element_as_str()}"])
    for job in itertools.product(*choices):
        yield list(job)


def plan(lists: Sequence[Sequence[str]], conf: Path, extra: Sequence[Path]) -> list[Planned]:
    """All jobs of these multiruns, each directory once."""
    search = [f"hydra.searchpath=[{','.join(f'file://{folder.resolve()}' for folder in extra)}]"] if extra else []
    jobs: dict[Path, Planned] = {}
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        for overrides in lists:
            for job in expand(overrides):
                config = compose("config", overrides=[*job, *search], return_hydra_config=True)
                directory = Path(str(config.hydra.sweep.dir), run_name(config))
                own = {str(key): value for key, value in config.items() if key != "hydra"}
                plain = OmegaConf.to_container(OmegaConf.create(own), resolve=False)
                jobs.setdefault(directory, Planned(directory, plain))  # type: ignore[arg-type]
    return list(jobs.values())


def status(job: Planned) -> str:
    """completed, diverged, failed, running, `interrupted at r`, or new."""
    if is_occupied(job.directory):
        return "running"
    summary, rounds = job.directory / files.SUMMARY, job.directory / files.ROUNDS
    if summary.exists():
        return str(json.loads(summary.read_text(encoding="utf-8")).get("status"))
    if not rounds.exists():
        return "new"
    return f"interrupted at {max(len(rounds.read_text(encoding='utf-8').splitlines()) - 2, 0)}"


def measurements(folders: Sequence[Path]) -> list[Measured]:
    """Of all runs below these folders that have finished a round."""
    found = []
    for path in sorted(file for folder in folders if folder.is_dir() for file in folder.rglob(files.ROUNDS)):
        try:
            config = yaml.safe_load((path.parent / files.CONFIG).read_text(encoding="utf-8"))
            table = pd.read_csv(path)
            seconds = table["seconds"][table["round"] >= 1].median()
        except (OSError, ValueError, KeyError, yaml.YAMLError):
            continue
        if seconds == seconds:
            size = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
            found.append(Measured(config, float(seconds), size))
    return found


def closest(job: Planned, measured: Sequence[Measured]) -> tuple[Measured | None, bool]:
    """(a run with the same work, whether its algorithm is the same too)."""
    wanted = work_of(job.config)
    like = [run for run in measured if work_of(run.config) == wanted]
    same = [run for run in like if target(run.config, "algorithm") == target(job.config, "algorithm")]
    return next(iter(same or like), None), bool(same)


def work_of(config: Mapping[str, Any]) -> list[Any]:
    """What decides the cost of a round, but the algorithm."""
    values = OmegaConf.create(dict(config))
    chosen = [OmegaConf.select(values, key, throw_on_resolution_failure=False) for key in WORK]
    chosen[0] = OmegaConf.select(values, "dataset.name")
    return [OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for value in chosen]


def target(config: Mapping[str, Any], group: str) -> str:
    return str((config.get(group) or {}).get("_target_"))


def show(jobs: Sequence[Planned], measured: Sequence[Measured]) -> None:
    """Prints a line a job, what is left in all, and as the last line `N jobs: D done, ...`."""
    counts: Counter[str] = Counter()
    seconds, size, unknown = 0.0, 0, 0
    for job in jobs:
        state = status(job)
        counts["done" if state in ("completed", "diverged") else state.split()[0]] += 1
        estimate, about = "", ""
        if state not in ("completed", "diverged"):
            run, same = closest(job, measured)
            done = int(state.rpartition(" ")[2]) if state.startswith("interrupted") else 0
            left = max(job.rounds - done, 0)
            if run is None:
                estimate, unknown = "?", unknown + 1
            else:
                seconds, size = seconds + left * run.seconds, size + run.bytes
                estimate, about = duration(left * run.seconds), "" if same else " (another algorithm's rounds)"
        print(f"{job.directory.name:<70} {state:<18} {estimate}{about}")
    if unknown:
        print(f"no measured round for {unknown} of them (?): a run with rounds=1 below here gives an estimate")
    more = " and what is marked ?" if unknown else ""
    print(f"left: {duration(seconds)} one after the other, {size / 1e9:.2f} GB of disk{more}")
    others = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()) if name != "done")
    print(f"{len(jobs)} jobs: {counts['done']} done" + (f", {others}" if others else ""))
