"""Register the launchers and sweepers of conf/, and all resolvers, with Hydra."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError
from omegaconf import DictConfig, OmegaConf

from fedexp.config.named import describe_groups
from fedexp.config.options import ALIASES, add_resolver, conf_directory, list_options
from fedexp.core.errors import ConfigError
from fedexp.core.packages import import_extra
from fedexp.rundir.identity import digest, essential

# Hydra 1.4 has a single set of defaults, and warns if they are chosen.
IS_OLD = hydra.__version__.startswith("1.3.")
DEFAULTS: dict[str, Any] = {"version_base": "1.3"} if IS_OLD else {}
REPLACE: dict[str, Any] = {} if IS_OLD else {"replace": True}  # a config of a plugin
RUN_NAME = "${fedexp.run_name:}"  # the default of hydra.sweep.subdir
# option of hydra/launcher or hydra/sweeper -> (needed module, extra that installs it)
NEEDED = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "joblib"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    "ray": ("hydra_plugins.hydra_ray_launcher", "ray"),
    "optuna": ("optuna", "optuna"),
}


@cache
def register() -> None:
    """Register the launchers and sweepers of conf/, and all resolvers, with Hydra, once.

    Files in conf/hydra/launcher/ would be read with the plugin's config of the same name as their
    schema, which Hydra deprecates.
    """
    Plugins.instance()  # makes the plugins register their configs
    store = ConfigStore.instance()
    for group in ("launcher", "sweeper"):
        for name in list_options(group, [conf_directory()]):
            ours = OmegaConf.load(conf_directory() / group / f"{name}.yaml")
            # without the plugin, the defaults are enough to compose and preview a sweep
            with suppress(ConfigLoadError):
                ours = OmegaConf.merge(store.load(f"hydra/{group}/{name}.yaml").node, ours)
            store.store(name, ours, f"hydra/{group}", provider="fedexp", **REPLACE)
    # Hydra copies the resolvers to launched processes
    add_resolver("fedexp.run_name", lambda _root_: "".join(name_ends(_root_)))
    add_resolver("fedexp.run_dir", lambda resume, new: new if resume is None else resume)
    add_resolver("fedexp.groups", describe_groups)
    add_resolver("fedexp.gpus", lambda: count_gpus())
    add_resolver("fedexp.jobs_at_once", jobs_at_once)


def check_installed(choices: Mapping[str, Any]) -> None:
    """Raise ConfigError if the chosen launcher or sweeper is not installed."""
    for group in ("hydra/launcher", "hydra/sweeper"):
        if needed := NEEDED.get(choices[group]):
            import_extra(*needed, f"{group}={choices[group]}")


def jobs_at_once(device: str, engine: str) -> int:
    """Return how many jobs this machine runs at a time: one per GPU, or one per core."""
    from fedexp.engine.hardware import cores

    gpus = 0 if device == "cpu" else count_gpus()
    if gpus and (device.startswith("cuda:") or engine == "workers"):
        return 1
    return gpus or cores()


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def name_ends(root: DictConfig) -> tuple[str, str]:
    """Return both ends of the name of a job's directory: <dataset>_<partition>_<algorithm> and
    _seed<seed>_<hash>.

    They do not depend on the other jobs of the sweep.

    root: the composed configuration, including the node `hydra`.
    """
    from fedexp.config.build import build  # imports torch

    choices, overrides = root.hydra.runtime.choices, root.hydra.overrides.task
    partition = ALIASES.get(choices.partition, choices.partition)
    own = OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"])
    seed = OmegaConf.select(root, "seed", default="", throw_on_resolution_failure=False)
    try:
        identity = digest(essential(build(own)))
    except ConfigError:  # the job reports the error
        identity = hashlib.sha256("\n".join(map(str, overrides)).encode()).hexdigest()
    return f"{choices.dataset}_{partition}_{choices.algorithm}", f"_seed{seed}_{identity[:8]}"
