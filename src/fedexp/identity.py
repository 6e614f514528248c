"""What a run is: the part of its configuration that decides its result, and the name that follows from it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

# What does not decide the result: where a run is computed and how it is watched. It may change when a run is resumed.
FREE = (
    *("resume", "tracker", "checkpoint_interval", "figures", "profile", "data_dir", "choices", "expected"),
    *("dataset.data_dir", "dataset.url"),
    *("hardware.device", "hardware.engine", "hardware.threads", "hardware.workers", "hardware.chunk"),  # not .precision
    "hardware.jobs_per_gpu",
)

PARTITION_NUMBERS = ("alpha", "shards_per_client")


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    if not isinstance(node, dict):
        return {prefix: node}
    items: dict[str, Any] = {}
    for key, value in node.items():
        items |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return items


def essential(container: Mapping[str, Any]) -> dict[str, Any]:
    """The values that decide the result, by their dotted keys."""
    free = tuple(f"{key}." for key in FREE)
    return {key: value for key, value in flatten(dict(container)).items() if not f"{key}.".startswith(free)}


def content_hash(container: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits: equal for configurations that have the same result."""
    text = json.dumps(essential(container), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def setting(container: Mapping[str, Any]) -> str:
    """<algorithm>_<dataset>_<partition>, with the partition's one number: short, and the same for all seeds.
    container: with `choices`, the option of each group."""
    choices = container["choices"]
    number = next((f"{container[key]}" for key in PARTITION_NUMBERS if container.get(key) is not None), "")
    return f"{choices['algorithm']}_{choices['dataset']}_{choices['partition']}{number}"


def group_name(container: Mapping[str, Any]) -> str:
    """Of a run and its repetitions with other seeds: setting, and hash of what decides the result but seeds."""
    unseeded = {key: value for key, value in container.items() if key not in ("seed", "seeds")}
    return f"{setting(container)}_{content_hash(unseeded)}"


def run_name(root: DictConfig) -> str:
    """<dataset>_<partition>_<algorithm>_seed<seed>_<hash>: the directory of a job below that of its sweep, the same
    whatever else the sweep holds. root: the composed configuration with its node `hydra`."""
    from fedexp.build import resolve
    from fedexp.errors import ConfigError

    choices, overrides = root.hydra.runtime.choices, root.hydra.overrides.task
    own = OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"])
    try:
        digest = content_hash(resolve(own))
    except ConfigError:  # the job itself will say what is wrong
        digest = hashlib.sha256("\n".join(map(str, overrides)).encode()).hexdigest()[:8]
    seed = OmegaConf.select(root, "seed", default="", throw_on_resolution_failure=False)
    return f"{choices.dataset}_{choices.partition}_{choices.algorithm}_seed{seed}_{digest}"


def register() -> None:
    """Makes `${fedexp.run_name:}` known; Hydra hands it on to the processes of its launchers."""
    OmegaConf.register_new_resolver("fedexp.run_name", lambda _root_: run_name(_root_), replace=True)
