"""`fedexp --multirun hydra/sweeper=optuna ...`: a search for the values of options, each trial a
run of its own.

The study is a file in the directory of the sweep (study.db), so that the same command goes on where
it was stopped: a trial that had begun resumes from its checkpoint. hydra-optuna-sweeper is not
used: it is made for Optuna 2.10, whose files today's SQLAlchemy cannot write, and it hands no trial
to its job, so that nothing could be pruned.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from fedexp.config.overrides import key_of
from fedexp.core import storage
from fedexp.core.errors import ConfigError, require, require_choice
from fedexp.core.objective import direction_of, objective_name, value_of
from fedexp.core.private.of_hydra import parse_overrides
from fedexp.core.private.of_optuna import reopened
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import standing_in

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

STUDY, TRIALS, BEST = "study.db", "trials.csv", "optimization_results.yaml"
NAME = "fedexp"  # of the one study in the file
VARIABLE = "FEDEXP_TRIAL"  # key of hydra.job.env_set: the number of the trial
# Beginnings of overrides that may differ between commands that go on with one study: they change no
# result. Where it is run may differ too; the objective is compared by itself.
FREE = (
    "hydra",
    "tracker",
    "figures",
    "data_dir",
    "checkpoint_interval",
    "profile",
    "keep_",
    "objective",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The node `hydra.sweeper`; the defaults stand in conf/sweeper/optuna.yaml."""

    n_trials: int
    n_jobs: int | None
    sampler: str
    seed: int
    pruner: str
    startup_trials: int
    warmup_rounds: int

    def __post_init__(self) -> None:
        for name, least in (
            ("n_trials", 1),
            ("startup_trials", 0),
            ("warmup_rounds", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            require(
                type(value) is int and value >= least,
                f"hydra.sweeper.{name}",
                value,
                f"at least {least}",
            )
        good = self.n_jobs is None or (type(self.n_jobs) is int and self.n_jobs >= 1)
        require(good, "hydra.sweeper.n_jobs", self.n_jobs, "at least 1, or null")
        require_choice("hydra.sweeper.sampler", self.sampler, ("tpe", "random"))
        require_choice(
            "hydra.sweeper.pruner", self.pruner, ("median", "halving", "hyperband", "none")
        )

    def make_sampler(self, trials: int) -> Any:
        """Return the sampler. trials: that there are already, after which a fresh seed is taken."""
        from optuna.samplers import RandomSampler, TPESampler

        if self.sampler == "random":
            return RandomSampler(seed=self.seed + trials)
        return TPESampler(seed=self.seed + trials, n_startup_trials=2 * self.startup_trials)

    def make_pruner(self, rounds: int) -> Any:
        """Return the pruner, which compares values after the same round. rounds: of a run."""
        from optuna import pruners

        first = self.warmup_rounds + 1
        match self.pruner:
            case "median":
                return pruners.MedianPruner(self.startup_trials, first)
            case "halving":
                return pruners.SuccessiveHalvingPruner(min_resource=first)
            case "hyperband":
                return pruners.HyperbandPruner(
                    min_resource=first, max_resource=max(rounds, first + 1)
                )
            case _:
                return pruners.NopPruner()


def search(
    options: Mapping[str, Any], config: DictConfig, launcher: Any, arguments: Sequence[str]
) -> list[Any]:
    """Run the trials of a study; return what the launcher has returned.

    config: the composed configuration with its node `hydra`; arguments: the overrides of the
    command. Raises ConfigError for a study that cannot be."""
    asked, directory = Options(**options), Path(config.hydra.sweep.dir)
    space, fixed = space_of(arguments)
    if not space:
        raise ConfigError(
            "hydra/sweeper=optuna: there is nothing to search for; 'local.lr=tag(log,"
            " interval(0.001, 0.1))' and local.batch_size=20,50 are examples of what there can be"
        )
    name = objective_of(config)
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {"objective": name, "direction": direction_of(name, config.get("objective_direction"))}
    study = open_study(directory, asked, wanted | subject_of(space, fixed), rounds_of(config))
    OmegaConf.save(config, directory / "multirun.yaml")
    begun = [
        reopened(study, trial.number) for trial in study.trials if trial.state.name == "RUNNING"
    ]
    done = sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.trials)
    left = asked.n_trials - done
    returns: list[Any] = []
    if left <= 0:
        print(
            f"{directory}: the study has its {done} trials; hydra.sweeper.n_trials={done + 10}"
            " adds ten"
        )
    at_once = asked.n_jobs or max(int(config.hydra.launcher.get("n_jobs") or 1), 1)
    while left > 0:
        count = min(at_once, left)
        again, begun = begun[:count], begun[count:]
        trials = [*again, *ask(study, space, count - len(again))]
        jobs = [
            [*fixed, *assigned(each.params), f"+hydra.job.env_set.{VARIABLE}='{each.number}'"]
            for each in trials
        ]
        results = launcher.launch(jobs, initial_job_idx=len(returns))
        for trial, result in zip(trials, results, strict=True):
            tell(study, trial, result, name)
        returns += results
        left -= count
    write_results(study, directory, name)
    return returns


def objective_of(config: Mapping[str, Any]) -> str:
    """Return the objective. Raises ConfigError where there is none but on test data, which must be
    asked for."""
    name = objective_name(config)
    if name is None:
        raise ConfigError(
            "hydra/sweeper=optuna: a search needs an objective: validation.fraction=0.1 has it"
            " search for the best validation_accuracy; objective=accuracy searches on the test data"
        )
    return name


def rounds_of(config: Mapping[str, Any]) -> int:
    rounds = config.get("rounds")
    return rounds if isinstance(rounds, int) else 1


def space_of(arguments: Sequence[str]) -> "tuple[dict[str, BaseDistribution], list[str]]":
    """Return (key -> what values it may take, the other overrides). Raises ConfigError for a list
    of no use."""
    space, fixed = {}, []
    for override in parse_overrides(list(arguments)):
        key = override.get_key_element()
        if override.is_sweep_override():
            space[key] = distribution(override)
        else:
            fixed.append(override.input_line or f"{key}={override.get_value_element_as_str()}")
    return space, fixed


def distribution(override: Any) -> "BaseDistribution":
    """Return the values that a sweep of Hydra stands for: interval(a, b), also as tag(log,
    interval(a, b)) and int(interval(a, b)), and range(a, b) of whole numbers are numbers, whose
    order the sampler uses; all others are a choice."""
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    try:
        if isinstance(value, IntervalSweep):
            log, ends = "log" in value.tags, (value.start, value.end)
            if all(isinstance(end, int) for end in ends):
                return IntDistribution(*ends, log=log)  # type: ignore[arg-type]
            return FloatDistribution(float(ends[0]), float(ends[1]), log=log)  # type: ignore[arg-type]
        texts = list(override.sweep_string_iterator())
        if (
            isinstance(value, RangeSweep)
            and not value.shuffle
            and all(isinstance(n, int) for n in value.range())
        ):
            return IntDistribution(value.start, int(texts[-1]), step=value.step)  # type: ignore[arg-type]
        return CategoricalDistribution(texts)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{override.input_line}: {error}") from error


def subject_of(space: Mapping[str, Any], fixed: Sequence[str]) -> dict[str, str]:
    """Return what trials of one study have in common: the options that are searched for, and the
    others."""
    from fedexp.analysis.compare import WHERE

    # of a key that is given twice, the last value counts
    last = {key_of(text): text for text in fixed}
    options = sorted(
        text for text in last.values() if not text.lstrip("+~").startswith((*FREE, *WHERE))
    )
    return {"search for": " ".join(sorted(space)), "other options": " ".join(options)}


def open_study(directory: Path, asked: Options, wanted: Mapping[str, str], rounds: int) -> "Study":
    """Return the study of a directory, a new one where there is none. wanted: what it is about.
    Raises ConfigError where the study there is about something else; one of an early version has
    not noted all of it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    store = store_of(directory)
    known = {study.study_name: study for study in optuna.get_all_study_summaries(store)}
    study = optuna.create_study(
        study_name=NAME,
        storage=store,
        direction="maximize" if wanted["direction"] == "max" else "minimize",
        sampler=asked.make_sampler(known[NAME].n_trials if NAME in known else 0),
        pruner=asked.make_pruner(rounds),
        load_if_exists=True,
    )
    found = study.user_attrs if NAME in known else {}
    if other := [key for key, value in wanted.items() if found.get(key, value) != value]:
        said = (
            "; ".join(f"{key}: {each[key] or 'none'}" for key in other) for each in (found, wanted)
        )
        raise ConfigError(
            "hydra.sweep.dir={}: holds a study of {}, not of {}; choose another directory".format(
                directory, *said
            )
        )
    for key, value in wanted.items():
        study.set_user_attr(key, value)
    return study


def store_of(directory: Path) -> str:
    """Return the address of the file of a study."""
    return f"sqlite:///{(directory / STUDY).absolute()}"


def ask(study: "Study", space: "Mapping[str, BaseDistribution]", count: int) -> "list[Trial]":
    """Return new trials. Raises ConfigError where the study has other values to choose from."""
    try:
        return [study.ask(dict(space)) for _ in range(count)]
    except ValueError as error:
        raise ConfigError(
            f"hydra.sweep.dir: the study there has other values to choose from ({error})"
        ) from error


def assigned(params: Mapping[str, Any]) -> list[str]:
    """Return the overrides that give the options the values of a trial."""
    return [f"{key}={value}" for key, value in params.items()]


def tell(study: "Study", trial: "Trial", result: Any, objective: str) -> None:
    """Note how a trial has ended: by its directory, since a launcher may have run it elsewhere."""
    import optuna

    _ = result.return_value  # raises what the launcher has caught
    runtime = OmegaConf.to_container(result.hydra_cfg.hydra.runtime, resolve=False)
    directory = Path(runtime["output_dir"])  # type: ignore[call-overload,index,arg-type]
    run = standing_in(RunDirectory(directory))
    trial.set_user_attr("run", directory.name)
    state, value = optuna.trial.TrialState.FAIL, value_of(run.summary, objective)
    if run.diverged or (run.summary.get("stopped") or {}).get("by") == "search":
        state, value = optuna.trial.TrialState.PRUNED, None
    elif run.finished and value is not None:
        state = optuna.trial.TrialState.COMPLETE
    study.tell(
        trial,
        value if state is optuna.trial.TrialState.COMPLETE else None,
        state,
        skip_if_finished=True,
    )


def watch_of(
    hydra_config: Any, config: Mapping[str, Any]
) -> "Callable[[int, Mapping[str, Any]], bool] | None":
    """Return what is told of the rounds of a job that is a trial: (round, summary so far) ->
    whether it is of no more use; None for any other job."""
    given: Mapping[str, Any] = hydra_config.job.get("env_set") or {}
    if VARIABLE not in given:
        return None
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    asked = Options(
        **{str(key): value for key, value in hydra_config.sweeper.items() if key != "_target_"}
    )
    pruner, name = asked.make_pruner(rounds_of(config)), objective_of(config)
    study = optuna.load_study(
        study_name=NAME, storage=store_of(Path(hydra_config.sweep.dir)), pruner=pruner
    )
    trial = reopened(study, int(given[VARIABLE]))
    reported = {*study.trials[trial.number].intermediate_values}  # where the trial is resumed

    def watch(round: int, summary: Mapping[str, Any]) -> bool:
        value = value_of(summary, name)
        if value is None or round in reported:
            return False
        trial.report(value, round)
        return bool(trial.should_prune())

    return watch


def write_results(study: "Study", directory: Path, objective: str) -> None:
    """Write trials.csv and optimization_results.yaml, and say which trial is the best."""
    trials = study.trials
    names = sorted({name for trial in trials for name in trial.params})
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", objective, "rounds", *names, "run"])
    writer.writerows(row_of(trial, names) for trial in trials)
    storage.write_atomically(directory / TRIALS, text.getvalue().encode())
    count = {
        name: sum(trial.state.name == name for trial in trials)
        for name in ("COMPLETE", "PRUNED", "FAIL")
    }
    said = f"{count['COMPLETE']} trials, {count['PRUNED']} pruned, {count['FAIL']} failed"
    if not count["COMPLETE"]:
        print(f"{said}: none has a value of {objective}")
        return
    best = study.best_trial
    found = {
        "name": "optuna",
        "best_params": dict(best.params),
        "best_value": best.value,
        "objective": objective,
    }
    OmegaConf.save(OmegaConf.create(found | {"run": best.user_attrs.get("run")}), directory / BEST)
    print(
        f"{said}; the best, trial {best.number}, has {objective}={best.value:.6g}:"
        f" {' '.join(assigned(best.params))}"
    )


def row_of(trial: "FrozenTrial", names: Sequence[str]) -> list[Any]:
    """Return the row of a trial in trials.csv; rounds: after which its objective was last
    reported."""
    value = trial.value if trial.value is not None and math.isfinite(trial.value) else ""
    own = [trial.number, trial.state.name.lower(), value, trial.last_step or ""]
    return [*own, *(trial.params.get(name, "") for name in names), trial.user_attrs.get("run", "")]
