"""Run the jobs of a sweep: plan and check them, launch them, and report the results."""

import logging
import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from fedexp.analysis.naming import rounded
from fedexp.analysis.sweep import expand, launches, load_named_sweep
from fedexp.config.arguments import as_typed
from fedexp.config.build import Built, build
from fedexp.config.composition import path_override, quoted, without_hydra
from fedexp.config.launchers import RUN_NAME, check_installed, name_ends
from fedexp.config.named import search_path
from fedexp.config.overrides import key_of
from fedexp.config.settings import Stop
from fedexp.config.values import make_target
from fedexp.core import interrupts
from fedexp.core.console import plural
from fedexp.core.errors import (
    FAILED,
    ConfigError,
    JobFailed,
    StorageError,
    describe,
    reason_of,
    require,
    say,
)
from fedexp.core.storage import display_path, read_csv
from fedexp.data.types import DataSource
from fedexp.engine.ranks.world import keeping_ranks
from fedexp.figures.pictures import as_node
from fedexp.rundir import files
from fedexp.rundir.jobs import job_options, record
from fedexp.rundir.reader import OVER, RunDirectory
from fedexp.trackers.base import Callbacks
from fedexp.training.callbacks import is_finished, own_callbacks
from fedexp.training.checks import check_config, check_used
from fedexp.training.prepare import centralized_config, metrics_of

if TYPE_CHECKING:
    from fedexp.trackers.wandb_tracker import Wandb

log = logging.getLogger("fedexp")
TABLES = ("table.csv", "rounds_to_target.csv", "differences.csv")  # of a report
NAMED = ("dataset", "partition", "algorithm", "seed")  # keys that the names of all jobs have
LONGEST = 80  # letters of further values in the name of a job


@dataclass
class Multirun:
    """A sweep that Hydra starts."""

    config: DictConfig  # composed from the overrides that all jobs share
    context: HydraContext
    task: TaskFunction
    command: int | None = None  # number in jobs.json, once a job has been launched

    @classmethod
    def of(cls, sweeper: Any) -> "Multirun":
        """Return the sweep of a sweeper. Jobs get its absolute path, also on other machines."""
        config, context = sweeper.config, sweeper.hydra_context
        assert config is not None
        assert context is not None
        directory = str(Path(str(config.hydra.sweep.dir)).absolute())
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.sweep.dir = directory
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(directory)}")
        return cls(config, context, sweeper.task_function)

    @property
    def directory(self) -> Path:
        return Path(self.config.hydra.sweep.dir)

    @property
    def options(self) -> Any:
        """The node `hydra.sweeper`."""
        return self.config.hydra.sweeper

    def launch(self, jobs: "Sequence[Planned]", first: int = 0) -> Sequence[JobReturn]:
        """Run jobs and return their results. A job that failed does not stop the others.

        first: the number of the first job.
        """
        context = self.context
        if self.config.hydra.runtime.choices["hydra/launcher"] == "basic":
            loader: Any = ComposedJobs(context.config_loader, jobs)
            context = HydraContext(loader, context.callbacks)
        interrupts.release()
        self.share_cores(len(jobs))
        self.directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, self.directory / files.MULTIRUN)
        launched = [(job.overrides, job.name) for job in jobs]
        self.command = record(self.directory, launched, self.command)
        with self.continuing():
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=self.task, config=self.config
            )
            return launcher.launch([job.arguments for job in jobs], initial_job_idx=first)

    def share_cores(self, jobs: int) -> None:
        """Run at most as many jobs at a time as there are, so that they use all cores."""
        at_once = self.config.hydra.launcher.get("n_jobs") or -1
        if at_once > jobs:
            # HydraConfig.set_config makes the node hydra read-only
            with read_write(self.config.hydra), open_dict(self.config.hydra):
                self.config.hydra.launcher.n_jobs = jobs
                self.config.hydra.overrides.hydra.append(f"hydra.launcher.n_jobs={jobs}")

    @contextmanager
    def continuing(self) -> Iterator[None]:
        """Print the command that continues the sweep if the block is interrupted or fails."""
        try:
            yield
        except KeyboardInterrupt:
            self.say_how_to_continue()
            raise
        except ConfigError:
            raise
        except Exception as error:
            launcher = self.config.hydra.runtime.choices["hydra/launcher"]
            code = say(
                f"hydra/launcher={launcher}: {describe(error)}\nThe launcher does not work, or a"
                " job's process was killed (for example, out of memory).",
                FAILED,
            )
            self.say_how_to_continue()
            raise JobFailed(reason_of(error), code) from error

    def say_how_to_continue(self) -> None:
        """Print the command that continues the sweep."""
        typed = [text for text in sys.argv[1:] if not text.startswith("hydra.sweep.dir=")]
        where = path_override("hydra.sweep.dir", self.directory)
        command = shlex.join(["fedexp", *as_typed(typed), where])
        print(f"Continue the sweep with:  {command}", file=sys.stderr)

    def finish(self, results: Sequence[JobReturn]) -> None:
        """Write the reports. Raises JobFailed if a job failed or a report cannot be written."""
        codes = []
        for result in results:
            if result.status == JobStatus.FAILED:
                try:
                    result.return_value  # noqa: B018 (prints the overrides, and raises the error)
                except JobFailed as failure:
                    print(f"  {failure.message}", file=sys.stderr)
                    codes.append(failure.code)
        figures = as_node(self.config.figures)["draw"]
        if not self.directory.is_dir():
            codes.append(say(f"{self.directory}: was removed while the sweep was running", FAILED))
        else:
            try:
                show_report(self.directory, self.options.get("sweep"), bool(figures))
            except StorageError as error:
                codes.append(say(str(error), FAILED))
            except KeyboardInterrupt:
                self.say_how_to_continue()
                raise
        if FAILED in codes:
            self.say_how_to_continue()
        if codes:
            raise JobFailed("the sweep failed", max(codes))


class ComposedJobs:
    """Hydra's config loader, which takes seconds to compose a job, with the jobs of a plan."""

    def __init__(self, loader: ConfigLoader, jobs: "Sequence[Planned]"):
        self.loader = loader
        self.composed = {tuple(job.arguments): job.composed for job in jobs}

    def load_sweep_config(self, master: DictConfig, overrides: list[str]) -> DictConfig:
        found = self.composed.pop(tuple(overrides), None)
        if found is None:
            return self.loader.load_sweep_config(master, overrides)
        OmegaConf.set_readonly(found.hydra, None)  # as HydraConfig.set_config made it
        return found


@keeping_ranks()
def run_grid(multirun: Multirun, arguments: Sequence[str]) -> None:
    """Run all combinations of values, or the blocks of a sweep of conf/sweep.

    arguments: the overrides of the command line. Raises ConfigError if a job is invalid; then none
    has been started.
    """
    HydraConfig.instance().set_config(multirun.config)  # it says where the user's options are
    preview = multirun.options.preview
    require(isinstance(preview, bool), "preview", preview, "true or false")
    check_values(arguments)
    if intervals := [each for each in parse(arguments) if each.is_interval_sweep()]:
        raise ConfigError(f"{intervals[0].input_line}: an interval needs hydra/sweeper=optuna")
    grids = [list(arguments)]
    if (name := multirun.options.sweep) is not None:
        grids = launches(load_named_sweep(name, search_path()), arguments)
    jobs = [list(expand(grid)) for grid in grids]
    if not preview:
        print(f"checking {plural(sum(map(len, jobs)), 'job')}", flush=True)
    planned = check_jobs(multirun, jobs, shows=preview)
    if preview:
        return
    choices = multirun.config.hydra.runtime.choices
    check_installed(choices)
    away = "; output in .submitit/" if choices["hydra/launcher"].startswith("submitit") else ""
    count = plural(len(planned), "job")
    print(f"{display_path(multirun.directory)}: {count}{away}", flush=True)
    multirun.finish(multirun.launch(planned))


def parse(arguments: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(arguments))


def check_values(arguments: Sequence[str]) -> None:
    """Raise ConfigError if a key with several values is given twice, since Hydra uses the last, if
    a key has the same value twice, or for a pattern of options."""
    given: dict[str, Any] = {}
    for override in parse(arguments):
        key = override.key_or_group
        other = given.setdefault(key, override)
        if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
            raise ConfigError(
                f"{override.input_line}: patterns are not supported; list the options, as in"
                f" {key}=<option>,<option>"
            )
        values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            raise ConfigError(f"{override.input_line}: has the value {twice[0]} twice")
        several = other.is_sweep_override() or override.is_sweep_override()
        if other is not override and several:
            raise ConfigError(
                f"{other.input_line} and {override.input_line}: both set {key}; give all of its"
                f" values at once, as in {key}=<value>,<value>"
            )


# --- the jobs


@dataclass(frozen=True)
class Planned:
    """A job whose configuration has been composed, but which has not been started."""

    directory: Path
    overrides: Sequence[str]
    composed: DictConfig  # not resolved, including the node hydra

    @property
    def name(self) -> str:
        """The path of the directory in that of the sweep."""
        return str(self.composed.hydra.sweep.subdir)

    @property
    def arguments(self) -> list[str]:
        """The overrides that start the job in its directory when a launcher runs it."""
        return [*self.overrides, f"hydra.sweep.subdir={quoted(self.name)}"]


def compose(
    multirun: Multirun, jobs: Sequence[Sequence[str]], swept: Collection[str], first: int = 0
) -> Iterator[Planned]:
    """Yield each job with its configuration and its directory.

    jobs: the overrides of each job. swept: the keys that the jobs may set to different values.
    first: the number of the first job. Raises ConfigError if a job has no directory of its own.
    """
    there = [path.name for path in multirun.directory.glob("*")]
    for number, overrides in enumerate(jobs, first):
        config = multirun.context.config_loader.load_sweep_config(multirun.config, list(overrides))
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.job.num = number
        HydraConfig.instance().set_config(config)
        given: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
        if given["subdir"] == RUN_NAME:
            start, end = name_ends(config)
            # another command may have named the same job by other values
            names = [name for name in there if name.startswith(start) and name.endswith(end)]
            name = [*names, f"{start}{describe_values(overrides, swept)}{end}"][0]
        else:
            name = str(config.hydra.sweep.subdir)
            if Path(name).name != name or name in ("", ".."):
                raise ConfigError(
                    f"hydra.sweep.subdir={name}: must be the name of a directory, without /, since"
                    " reports find the jobs directly in hydra.sweep.dir"
                )
        with read_write(config.hydra):
            config.hydra.sweep.subdir = name
        yield Planned(multirun.directory / name, overrides, config)


def describe_values(overrides: Iterable[str], swept: Collection[str]) -> str:
    """Return the values of swept keys as words in the name of a job's directory.

    overrides: of the job.
    """
    last = Counter(key.rpartition(".")[2] for key in swept)
    words = ""
    for text in job_options(overrides):
        key, _, value = text.partition("=")
        if key not in swept or key in NAMED:
            continue
        name = key.rpartition(".")[2]
        value = re.sub(r"[^A-Za-z0-9.+-]+", "-", rounded(value, 4)).strip("-")
        joint = "" if value[:1].isdecimal() else "-"
        word = f"_{name if last[name] == 1 else key}{joint}{value}"
        if len(words) + len(word) <= LONGEST:  # the hash tells the jobs apart
            words += word
    return words


def check_jobs(
    multirun: Multirun, grids: Sequence[Sequence[Sequence[str]]], shows: bool
) -> list[Planned]:
    """Compose and check every job without reading data, which takes a second or so for each.

    grids: the overrides of each job of each grid. shows: whether to print the jobs, their
    states and which data are missing.

    A job that several grids have is returned once. Raises ConfigError with all messages, and the
    jobs that each of them is about. Raises KeyboardInterrupt after the job at which a signal came.
    """
    jobs = [job for grid in grids for job in grid]
    names = name_jobs(jobs)
    swept = {key_of(text) for name in names.values() for text in name}
    width = max((len(" ".join(name)) for name in names.values()), default=0)
    planned: dict[Path, tuple[int, Planned]] = {}  # with the number of the grid
    wrong: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    sources: dict[str, DataSource] = {}
    grid_of = [number for number, grid in enumerate(grids) for _ in grid]
    for grid, job in zip(grid_of, compose(multirun, jobs, swept), strict=True):
        name = " ".join(names[tuple(job.overrides)]) or job.directory.name
        first, other = planned.setdefault(job.directory, (grid, job))
        if first == grid and other is not job:
            wrong.setdefault(describe_same(job, other), []).append(name)
        if other is not job:
            continue
        if shows:
            state = job_status(job)
            counts["done" if state in OVER else state.split()[0]] += 1
            print(f"{name:<{width}}  {state}", flush=True)
        for message in find_errors(job, name, sources):
            wrong.setdefault(message, []).append(name)
        interrupts.raise_received()
    if shows:
        for line in missing_data(sources.values()):
            print(line)
        others = [f", {number} {kind}" for kind, number in sorted(counts.items()) if kind != "done"]
        print(f"{plural(len(planned), 'job')}: {counts['done']} done{''.join(others)}")
    if wrong:
        texts = [
            f"{message}\n  (in {len(jobs_of)} of {plural(len(jobs), 'job')}: {jobs_of[0]}"
            f"{', ...' if len(jobs_of) > 1 else ''})"
            for message, jobs_of in wrong.items()
        ]
        raise ConfigError("\n".join([*texts, "no job has been started"]))
    return [job for _, job in planned.values()]


def describe_same(job: Planned, other: Planned) -> str:
    """Return a message that names the keys in which two jobs with the same directory differ."""
    keys = sorted({key_of(text) for text in {*job.overrides} ^ {*other.overrides}})
    hint = ""
    if "callback" in keys:
        hint = "; a callback that may end runs must declare ends_runs"
    return (
        f"{', '.join(keys)}: the jobs that differ only here would have the same directory, because"
        " it is named by the values that change a result (identity in docs/guide/run_directory.md);"
        f" run a separate sweep for each value, each with its own hydra.sweep.dir{hint}"
    )


def find_errors(job: Planned, name: str, sources: dict[str, DataSource]) -> list[str]:
    """Return the message of `check_job` if the configuration of a job is invalid, or [].

    sources: the data sets of the jobs, to which those of this job are added.
    """
    try:
        sources |= data_sources(check_job(job))
    except ConfigError as error:
        return [str(error)]
    except Exception:
        log.debug("%s: cannot be checked", name, exc_info=True)  # the job reports the error
    return []


def check_job(job: Planned) -> Built:
    """Return the objects of a job. Raises ConfigError if its configuration is invalid."""
    HydraConfig.instance().set_config(job.composed)
    if job.composed.get("resume") is not None:
        raise ConfigError("resume=: resumes a single run and cannot be used with --multirun")
    built = build(without_hydra(job.composed))
    for tracker in built.tracker:
        tracker.check()
    Callbacks(own_callbacks(built))  # which checks their classes
    check_config(centralized_config(built), metrics_of(built))
    if not job.directory.exists():  # a continued job may have options without effect
        check_used(built.values, job.overrides)
    return built


def data_sources(built: Built) -> dict[str, DataSource]:
    """Return the data sets of a job, by what tells them apart."""
    others = [built.surrogate.dataset, *getattr(built.scenario, "domains", ())]
    return {repr(each): each for each in (built.dataset, *others) if each is not None}


def missing_data(sources: Iterable[DataSource]) -> Iterator[str]:
    """Yield a line for each data set whose files are not on this machine."""
    for source in sources:
        try:
            downloads = source.find()
        except ConfigError as error:
            yield f"{source.name} is not on this machine: {error}"
        else:
            if downloads:
                yield f"{source.name} is not on this machine: a run {downloads}"


def name_jobs(jobs: Sequence[Sequence[str]]) -> dict[tuple[str, ...], list[str]]:
    """Return the overrides of each job that not all jobs have. jobs: the overrides of each job."""
    shared = set.intersection(*map(set, jobs)) if jobs else set()
    return {tuple(job): [text for text in job if text not in shared] for job in jobs}


def job_status(job: Planned) -> str:
    """Return the state of a job, read from its directory.

    The state is completed, diverged, stopped, failed, running, `interrupted at <round>` or new.
    """
    run = RunDirectory(job.directory)
    if run.occupied:
        return "running"
    config = job.composed
    # a run that was stopped continues if the job has different limits
    if run.has(files.SUMMARY) and (
        run.status != "stopped" or is_finished(run, Stop(**config.stop), config.callback)
    ):
        return run.status
    return f"interrupted at {run.last_round or 0}" if run.has(files.ROUNDS) else "new"


# --- the report


def show_report(directory: Path, name: str | None, figures: bool) -> None:
    """Write a sweep's tables and figures, and print the table.

    name: the name of the sweep in conf/sweep, or None for a sweep without a name. figures: whether
    to draw figures.
    """
    from fedexp.analysis.page import write_page
    from fedexp.analysis.report import finish_sweep, print_paths, print_table, write_report
    from fedexp.rundir.sweeps import write_sweep_name

    if name is not None:
        write_sweep_name(directory, name)
    paths = write_report(directory, figures)
    if paths:
        print_table(directory, paths)
        finish_sweep(directory, figures)
        print_paths([write_page(directory, paths)])  # with what the sweep's function has written
        log_tables(directory, paths)


def log_tables(directory: Path, paths: Sequence[Path]) -> None:
    """Log a sweep's tables as a separate W&B run if the jobs of the sweep are logged there.

    paths: the files of the report.
    """
    from fedexp.trackers.base import Callbacks, RunInfo

    jobs = (RunDirectory(path.parent) for path in sorted(directory.glob(f"*/{files.CONFIG}")))
    tracker = tracker_of(next((job.config for job in jobs if job.config), {}))
    if tracker is None:
        return
    name = directory.absolute().name
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
    )
    guarded = Callbacks([tracker.create()])
    guarded.call("start", info)
    tables = {path.stem: read_csv(path) for path in paths if path.name in TABLES}
    guarded.call("finish", {}, [], tables)


def tracker_of(config: Mapping[str, Any]) -> "Wandb | None":
    """Return the W&B tracker of a configuration, or None without W&B.

    The tracker has no name, since the configured name is that of a single run.
    """
    from fedexp.trackers.wandb_tracker import Wandb

    node = (config.get("tracker") or {}).get("wandb")
    if node is None or node.get("mode") == "disabled":
        return None
    return replace(make_target(node, "tracker.wandb", Wandb), name=None)
