"""Name the directory of a sweep's job after the job's fingerprint."""

import hashlib
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fedexp.rundir import origin
from fedexp.rundir.fingerprint import fingerprint


def run_name(root: DictConfig) -> str:
    """Return the name of a job's directory, <dataset>_<partition>_<algorithm>_seed<seed>_<hash>.

    The name does not depend on the other jobs of the sweep. If a job of the sweep has this
    fingerprint but a different name, that name is returned. This happens after the job was extended
    to more rounds.

    root: the composed configuration, including the node `hydra`.
    """
    from fedexp.config.values import resolve
    from fedexp.core.errors import ConfigError

    choices, overrides = root.hydra.runtime.choices, root.hydra.overrides.task
    own = OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"])
    seed = OmegaConf.select(root, "seed", default="", throw_on_resolution_failure=False)
    start = f"{choices.dataset}_{choices.partition}_{choices.algorithm}_seed{seed}_"
    try:
        identity = fingerprint(resolve(own))
    except ConfigError:  # the job reports the error
        return start + hashlib.sha256("\n".join(map(str, overrides)).encode()).hexdigest()[:8]
    sweep, name = Path(str(root.hydra.sweep.dir)), start + identity.partition(":")[2][:8]
    others = [] if (sweep / name).is_dir() else sorted(sweep.glob(f"{start}*"))
    same = (each.name for each in others if origin.read(each).get("fingerprint") == identity)
    return next(same, name)


def register() -> None:
    """Register the resolver `${fedexp.run_name:}`. Hydra copies it to launched processes."""
    OmegaConf.register_new_resolver(
        "fedexp.run_name", lambda _root_: run_name(_root_), replace=True
    )
