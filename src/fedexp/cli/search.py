"""Search for option values with Optuna: `fedexp --multirun hydra/sweeper=optuna ...`.

Each trial is a run. The study is saved as study.db in the sweep's directory, so the same command
continues the search. An unfinished trial resumes from its checkpoint. hydra-optuna-sweeper is not
used, because it requires Optuna 2.10.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import optuna
import pandas as pd
from hydra.core.override_parser.types import IntervalSweep
from hydra.core.utils import JobReturn
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from optuna import distributions, samplers
from optuna.trial import TrialState

from fedexp.analysis.layout import csv
from fedexp.cli.sweeps import Multirun, check_values, compose, parse
from fedexp.config.composition import without_hydra
from fedexp.config.values import make, resolve
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.limits import Checked, Count, CountFrom0, CountOrNone
from fedexp.engine.ranks.world import keeping_ranks
from fedexp.rundir.identity import digest, flatten, result_values
from fedexp.rundir.lock import occupied
from fedexp.rundir.objective import direction_of, objective_name, objective_value
from fedexp.rundir.reader import RunDirectory

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Options(Checked, prefix="hydra.sweeper."):
    """Options of the sweeper, see conf/sweeper/optuna.yaml."""

    n_trials: Count
    n_jobs: CountOrNone
    seed: CountFrom0
    sampler: Literal["tpe", "random"]


def options_of(config: DictConfig) -> Options:
    """Return the sweeper's options after checking them."""
    values: Any = OmegaConf.to_container(config.hydra.sweeper)
    values.pop("_target_", None)
    return make(Options, values, Options.prefix)


@keeping_ranks()
def search(multirun: Multirun, arguments: Sequence[str]) -> None:
    """Run the trials of a study, and write the results.

    arguments: the command's overrides. Raises ConfigError if the objective or the values to search
    for are missing, if there are several objectives, if the directory contains a different study,
    or if another process searches there.
    """
    check_values(arguments)
    config = multirun.config
    options = options_of(config)
    objective, (space, fixed) = objective_name(config), space_of(arguments)
    if "objective" in space or OmegaConf.is_list(config.get("objective")):
        raise ConfigError(
            "objective: a search has one objective; search for each value in a directory of its own"
            " (hydra.sweep.dir)"
        )
    if objective is None:  # test data are used only if the user asks for it
        raise ConfigError(
            "hydra/sweeper=optuna: a search needs an objective: set validation.fraction=0.1 to"
            " maximise validation_accuracy, or objective=accuracy to maximise accuracy on test data"
        )
    # another process would take the trials that run here for interrupted ones
    with occupied(multirun.directory):
        run_trials(multirun, options, objective, space, fixed)


def run_trials(
    multirun: Multirun, options: Options, objective: str, space: dict[str, Any], fixed: list[str]
) -> None:
    """Run the trials of a study that are left, and write the results. See `search`."""
    config, directory = multirun.config, multirun.directory
    study = open_study(config, objective, space)
    begun = [trial.number for trial in study.get_trials(states=[TrialState.RUNNING])]
    done = len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))
    if done >= options.n_trials:
        print(
            f"{directory}: all {done} trials are done;"
            f" hydra.sweeper.n_trials={done + 10} adds 10 trials"
        )
    at_once = max(options.n_jobs or config.hydra.launcher.get("n_jobs") or 1, 1)
    returns: list[JobReturn] = []
    for first in range(done, options.n_trials, at_once):
        count = min(at_once, options.n_trials - first)
        begun += [study.ask(space).number for _ in range(count - len(begun))]
        numbers, begun = begun[:count], begun[count:]
        jobs = [[*fixed, *assigned(study, number)] for number in numbers]
        planned = list(compose(multirun, jobs, space, len(returns)))
        results = multirun.launch(planned, len(returns))
        for number, result in zip(numbers, results, strict=True):
            tell(study, number, result, objective)
        returns += results
    found = write_results(study, directory, objective)
    try:
        multirun.finish(returns)
    finally:
        print(found)  # below the tables


def space_of(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return (a dict that maps each searched key to its distribution, all remaining overrides).

    A Hydra interval becomes a range of numbers. Any other sweep becomes a choice.
    """
    space: dict[str, Any] = {}
    fixed = []
    for override in parse(arguments):
        key, value = override.get_key_element(), override.value()
        if not override.is_sweep_override():
            fixed.append(override.input_line or f"{key}={override.get_value_element_as_str()}")
        elif isinstance(value, IntervalSweep):
            whole = isinstance(value.start, int)
            kind: Any = distributions.IntDistribution if whole else distributions.FloatDistribution
            try:
                space[key] = kind(value.start, value.end, log="log" in value.tags)
            except ValueError as error:
                raise ConfigError(f"{override.input_line}: {error}") from error
        else:
            choices = list(override.sweep_string_iterator())
            space[key] = distributions.CategoricalDistribution(choices)
    if not space:
        raise ConfigError(
            "hydra/sweeper=optuna: there are no values to search for; add for example"
            " 'local.lr=tag(log,interval(0.001,0.1))' or local.batch_size=20,50"
        )
    return space, fixed


def class_versions(values: dict[str, Any]) -> dict[str, int]:
    """Return the `version` of each class in a configuration that has another one than 1."""
    targets = {k: v for k, v in flatten(values).items() if k.rpartition(".")[2] == "_target_"}
    versions = {key: getattr(get_class(path), "version", 1) for key, path in targets.items()}
    return {key: version for key, version in versions.items() if version != 1}


def open_study(config: DictConfig, objective: str, space: Mapping[str, Any]) -> optuna.Study:
    """Load or create the study in the sweep's directory and set its sampler.

    Raises ConfigError if the directory contains a different study.
    """
    directory, options = Path(config.hydra.sweep.dir), options_of(config)
    direction = direction_of(objective, config.get("objective_direction"))
    values = resolve(without_hydra(config))
    others = digest(result_values(values) | class_versions(values))[:8]
    name = f"{direction} {objective} over {' '.join(sorted(space))}, other options {others}"
    directory.mkdir(parents=True, exist_ok=True)
    for known in optuna.get_all_study_names(store_of(directory)):
        if known != name:
            raise ConfigError(
                f"hydra.sweep.dir={directory}: contains a study of {known}, not of {name}; choose"
                " another directory"
            )
    study = optuna.create_study(
        study_name=name,
        storage=store_of(directory),
        direction="maximize" if direction == "max" else "minimize",
        load_if_exists=True,
    )
    for trial in study.trials:
        for key, before in trial.distributions.items():
            try:
                distributions.check_distribution_compatibility(before, space[key])
            except ValueError as error:
                raise ConfigError(
                    f"hydra.sweep.dir={directory}: contains trials with {key} from {before}, not"
                    f" {space[key]}; search the same values, or choose another directory"
                ) from error
    seed = options.seed + len(study.trials)  # a continued study needs a new seed
    if options.sampler == "tpe":
        study.sampler = samplers.TPESampler(seed=seed)
    else:
        study.sampler = samplers.RandomSampler(seed=seed)
    return study


def store_of(directory: Path) -> str:
    return f"sqlite:///{(directory / 'study.db').absolute()}"


def assigned(study: optuna.Study, number: int) -> list[str]:
    """Return the searched values of a trial as overrides."""
    return [f"{key}={value}" for key, value in study.trials[number].params.items()]


def tell(study: optuna.Study, number: int, result: Any, objective: str) -> None:
    """Record a trial's result in the study.

    The result is read from the run directory, since another process may have run the trial.
    """
    # not resolved, since a path may contain `${`
    runtime: Any = OmegaConf.to_container(result.hydra_cfg.hydra.runtime, resolve=False)
    directory = Path(runtime["output_dir"])
    run = RunDirectory(directory)
    value = objective_value(run.summary, objective)
    study.set_user_attr(str(number), {"rounds": run.summary.get("rounds"), "run": directory.name})
    if run.diverged:
        study.tell(number, state=TrialState.PRUNED)  # unlike FAIL, this is a result to avoid
    elif run.finished and value is not None:
        study.tell(number, value)
    else:
        study.tell(number, state=TrialState.FAIL)


def write_results(study: optuna.Study, directory: Path, objective: str) -> str:
    """Write trials.csv, and return a text with the number of trials and the best trial."""
    rows: list[dict[str, Any]] = []
    for trial in study.trials:
        state = "diverged" if trial.state == TrialState.PRUNED else trial.state.name.lower()
        made = study.user_attrs.get(str(trial.number), {"rounds": None, "run": None})
        row = {"trial": trial.number, "state": state, objective: trial.value}
        rows.append({**row, **made, **trial.params})
    table = pd.DataFrame(rows).astype({"rounds": "Int64"})
    storage.write_atomically(directory / "trials.csv", csv(table).encode())
    states = Counter(table["state"])
    counts = f"{states['complete']} trials, {states['diverged']} diverged, {states['fail']} failed"
    if not states["complete"]:
        return f"{counts}; no completed trial has a value for {objective}"
    best = study.best_trial
    values = " ".join(assigned(study, best.number))
    return f"{counts}; the best, trial {best.number}, has {objective}={best.value:.6g}: {values}"
