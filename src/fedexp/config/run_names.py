"""Name the directory of a sweep's job after the job's identity."""

import hashlib

from omegaconf import DictConfig, OmegaConf

from fedexp.config.options import ALIASES, add_resolver
from fedexp.rundir.identity import digest, essential


def run_name(root: DictConfig) -> str:
    """Return the name of a job's directory, <dataset>_<partition>_<algorithm>_seed<seed>_<hash>.

    The name does not depend on the other jobs of the sweep.

    root: the composed configuration, including the node `hydra`.
    """
    from fedexp.config.build import build  # imports torch
    from fedexp.core.errors import ConfigError

    choices, overrides = root.hydra.runtime.choices, root.hydra.overrides.task
    partition = ALIASES.get(choices.partition, choices.partition)
    own = OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"])
    seed = OmegaConf.select(root, "seed", default="", throw_on_resolution_failure=False)
    try:
        identity = digest(essential(build(own)))
    except ConfigError:  # the job reports the error
        identity = hashlib.sha256("\n".join(map(str, overrides)).encode()).hexdigest()
    start = f"{choices.dataset}_{partition}_{choices.algorithm}_seed{seed}"
    return f"{start}_{identity[:8]}"


def register() -> None:
    """Register the resolvers of runs' directories. Hydra copies them to launched processes."""
    add_resolver("fedexp.run_name", lambda _root_: run_name(_root_))
    add_resolver("fedexp.run_dir", lambda resume, new: new if resume is None else resume)
