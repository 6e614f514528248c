"""Set up Hydra's launchers (`hydra/launcher=<name>`) with the defaults in conf/launcher/."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from fedexp.config.options import list_options
from fedexp.config.spelling import quoted
from fedexp.core.errors import ConfigError
from fedexp.core.packages import how_to_install
from fedexp.training.job import Place

# Launcher -> (the fedexp extra that installs it, the library after which its plugin is named).
EXTRAS = {
    "joblib": ("joblib", "joblib"),
    "submitit_local": ("slurm", "submitit"),
    "submitit_slurm": ("slurm", "submitit"),
    "ray": ("ray", "ray"),
}
COMMAND = "FEDEXP_COMMAND"  # environment variable of each job: the id of the launching command


def register(conf: Path) -> None:
    """Register launchers and sweepers with Hydra, using the defaults in conf/.

    The defaults are in conf/launcher/ and conf/sweeper/. If the files were in conf/hydra/launcher/,
    Hydra would use the plugin's config of the same name as a schema. This is deprecated. Hydra
    copies the registered configs to the processes of the jobs.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigLoadError

    Plugins.instance()  # makes the plugins register their configs
    store = ConfigStore.instance()
    for name in list_options("launcher", [conf]):
        ours = OmegaConf.load(conf / "launcher" / f"{name}.yaml")
        # If the plugin is not installed, the defaults are enough to compose and preview a sweep.
        with suppress(ConfigLoadError):
            ours = OmegaConf.merge(store.load(f"hydra/launcher/{name}.yaml").node, ours)
        store.store(group="hydra/launcher", name=name, node=ours, provider="fedexp")
    for name in list_options("sweeper", [conf]):
        ours = OmegaConf.load(conf / "sweeper" / f"{name}.yaml")
        store.store(group="hydra/sweeper", name=name, node=ours, provider="fedexp")
    OmegaConf.register_new_resolver("fedexp.gpus", count_gpus, replace=True)


def check_installed(overrides: Sequence[str]) -> None:
    """Raise ConfigError if the chosen launcher or sweeper is not installed."""
    if "hydra/sweeper=optuna" in overrides and not importable("optuna"):
        raise ConfigError(
            f"hydra/sweeper=optuna: is not installed; install it with {how_to_install('optuna')}"
        )
    start = "hydra/launcher="
    names = [text.removeprefix(start) for text in overrides if text.startswith(start)]
    if not names or names[-1] not in EXTRAS:
        return
    extra, library = EXTRAS[names[-1]]
    if not importable(library) or not importable(f"hydra_plugins.hydra_{library}_launcher"):
        raise ConfigError(
            f"hydra/launcher={names[-1]}: is not installed; install it with {how_to_install(extra)}"
        )


def importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def complete_overrides(config: DictConfig, command: str) -> int:
    """Add the overrides that only the launching process knows, and return the number of jobs.

    Each job composes its configuration again from Hydra's overrides. This function adds the number
    of jobs that joblib runs at a time, the id of this command, and the absolute path of the sweep's
    directory, since Ray may start a job in another working directory.
    """
    from fedexp.analysis.sweep import expand

    # n_trials is only set in a search, whose overrides do not list the jobs
    trials = config.hydra.sweeper.get("n_trials")
    jobs = sum(1 for _ in expand(config.hydra.overrides.task)) if trials is None else int(trials)
    directory = str(Path(config.hydra.sweep.dir).absolute())
    added: dict[str, Any] = {"hydra.sweep.dir": directory, "hydra.output_subdir": None}
    added[f"hydra.job.env_set.{COMMAND}"] = command
    if config.hydra.launcher.get("n_jobs") == -1:
        added["hydra.launcher.n_jobs"] = min(jobs_at_once(config.hardware), jobs)
    with read_write(config), open_dict(config):
        for key, value in added.items():
            OmegaConf.update(config, key, value)
            text = quoted(value) if isinstance(value, str) else json.dumps(value)
            config.hydra.overrides.hydra.append(f"++{key}={text}")
    return jobs


def describe_launch(launcher: str, options: Mapping[str, Any], jobs: int, directory: Path) -> str:
    """Return the line to print when a sweep starts."""
    from fedexp.core.storage import display_path

    if launcher == "joblib":
        return f"hydra/launcher={launcher}: {jobs} jobs, {options['n_jobs']} at a time"
    if launcher.startswith("submitit"):
        return (
            f"hydra/launcher={launcher}: {jobs} jobs; their output is in"
            f" {display_path(directory / '.submitit')}"
        )
    return f"hydra/launcher={launcher}: {jobs} jobs"


def jobs_at_once(hardware: Mapping[str, Any]) -> int:
    """Return how many jobs this machine runs at a time: one per GPU, or one per core."""
    from fedexp.engine.hardware import cores

    device = str(hardware["device"])
    gpus = 0 if device == "cpu" else count_gpus()
    if gpus and (device.startswith("cuda:") or hardware["engine"] == "workers"):
        return 1
    return gpus or cores()


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def read_place(launcher: Mapping[str, Any], number: int) -> Place:
    """Return the resources for one job of a sweep.

    launcher: the job's node `hydra.launcher`. number: the job's number.
    """
    match str(launcher["_target_"]).rpartition(".")[2]:
        case "BasicLauncher":
            return Place(number=number)
        case "JoblibLauncher":
            from fedexp.engine.hardware import cores

            at_once = launcher["n_jobs"] if launcher["n_jobs"] > 0 else cores()
            return Place(max(cores() // at_once, 1), number, alone=at_once == 1)
        case "LocalLauncher":
            return Place(launcher["cpus_per_task"], number)
        case "SlurmLauncher":
            return Place(launcher["cpus_per_task"])
        case "RayLauncher":
            return Place(max(int(launcher["ray"]["remote"].get("num_cpus") or 1), 1), alone=False)
        case _:  # an unknown plugin
            return Place(alone=False)
