"""The name of a job's directory below that of its sweep, which follows from its fingerprint."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedexp.rundir.fingerprint import former_hash, short_hash


def run_name(root: DictConfig) -> str:
    """Return <dataset>_<partition>_<algorithm>_seed<seed>_<hash>: the directory of a job below that
    of its sweep, the same whatever else the sweep holds. root: the composed configuration with its
    node `hydra`."""
    from fedexp.config.build import resolve
    from fedexp.core.errors import ConfigError
    from fedexp.core.former_names import names

    choices, overrides = root.hydra.runtime.choices, root.hydra.overrides.task
    own = OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"])
    seed = OmegaConf.select(root, "seed", default="", throw_on_resolution_failure=False)
    partitions = names("partition", str(choices.partition))
    starts = [
        f"{choices.dataset}_{partition}_{choices.algorithm}_seed{seed}" for partition in partitions
    ]
    try:
        container = resolve(own)
    except ConfigError:  # the job itself will say what is wrong
        return f"{starts[0]}_{hashlib.sha256(chr(10).join(map(str, overrides)).encode()).hexdigest()[:8]}"
    return found_name(Path(str(root.hydra.sweep.dir)), starts, container)


def found_name(sweep: Path, starts: Sequence[str], container: Mapping[str, Any]) -> str:
    """Return the name of a job's directory below that of its sweep. starts: what stands before the
    hash, today's first; a former one, or the hash of format 1, where such a directory is there and
    none of today."""
    hashes = [make(container) for make in (short_hash, former_hash)]
    found = [f"{start}_{digits}" for digits in hashes for start in starts]
    return next((name for name in found if (sweep / name).is_dir()), found[0])


def register() -> None:
    """Make `${fedexp.run_name:}` known; Hydra hands it on to the processes of its launchers."""
    OmegaConf.register_new_resolver(
        "fedexp.run_name", lambda _root_: run_name(_root_), replace=True
    )
