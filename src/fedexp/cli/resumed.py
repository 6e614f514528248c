"""Continue a run with its stored configuration: `fedexp resume=<directory> rounds=300`.

The configuration is read from the run directory, which may come from another person. So it contains
only values: it cannot call resolvers, and `fedexp.config.values` decides which classes it may name.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedexp.config.overrides import (
    FORCED,
    OF_COMMAND,
    assigned_values,
    key_of,
    leaves,
    with_new_folder,
    with_new_paths,
)
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.figures.pictures import PNG, as_node
from fedexp.rundir import files, origin
from fedexp.rundir.identity import flatten
from fedexp.training.job import Job


def resumed_job(job: Job) -> Job:
    """Return the job that continues the run in the directory that `resume` names.

    job: the job of the command. Only its values of keys that the command gives are used. Raises
    ConfigError if the directory contains no run, or if a given key is not a value of the stored
    configuration.
    """
    given = str(job.config.resume)
    directory = find_run(given)
    if job.directory.resolve() != directory:
        raise ConfigError(
            f"hydra.run.dir={job.directory}: cannot be used with resume={given}, which names the"
            " run directory"
        )
    stored = read_config(directory / files.CONFIG)
    choices = stored.pop("choices", {})
    stored["accept_changed_data"] = False  # earlier versions stored it if a run was extended
    # the run may have been started with figures=false
    stored["figures"] = asdict(PNG) | as_node(stored.get("figures", True))
    place = Path(origin.read(directory)["directory"])  # which relative paths refer to
    moved = with_new_paths(
        stored, lambda path: str(place / path) if (place / path).exists() else path
    )
    for key, value in typed_values(job).items():
        if key == "data_dir":
            moved = with_new_folder(moved, moved[key], value)
        elif key not in flatten(moved):
            raise ConfigError(
                f"{key}: cannot be given with resume=, which uses the configuration of the run;"
                " only values of its keys, such as rounds=300, can be changed"
            )
        node = OmegaConf.create(moved)
        if key == "rounds" and node.scenario.rounds_per_task == node.rounds:
            node.scenario.rounds_per_task = value  # ${rounds} in the options of the group
        if key in node.get("partition", {}) and key != "data_dir":
            node.partition[key] = value  # ${alpha} in the options of the group
        OmegaConf.update(node, key, value, merge=False)
        moved = OmegaConf.to_container(node)
    typed = [text.removeprefix(FORCED) for text in job.overrides if key_of(text) != "resume"]
    keys = {*map(key_of, typed), *OF_COMMAND}
    before = storage.read_overrides(directory / files.OVERRIDES)
    kept = [text for text in before if key_of(text) not in keys]
    return replace(
        job,
        config=OmegaConf.create(moved | {"resume": str(directory)}),
        directory=directory,
        overrides=[*kept, f"resume={directory}", *typed],  # see `typed_overrides`
        choices={str(group): str(name) for group, name in choices.items()},
    )


def find_run(given: str) -> Path:
    """Return the absolute path of a run directory. Raises ConfigError if it contains no run."""
    try:
        directory = Path(given).expanduser().resolve()
    # a cycle of links, or an unknown user after ~
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"resume={given}: not a run directory ({error})") from error
    for name in (files.OVERRIDES, files.CONFIG):
        if not (directory / name).is_file():
            raise ConfigError(f"resume={given}: not a run directory ({name} is missing)")
    return directory


def read_config(path: Path) -> dict[str, Any]:
    """Read the stored configuration. Raises ConfigError unless it contains only values."""
    found = storage.read_mapping(path)
    for key, value in leaves(found):
        if "${" in f"{key}{value}":
            raise ConfigError(f"{path}: {key or 'a value'} contains ${{...}}, which is not allowed")
    return found


def typed_values(job: Job) -> dict[str, Any]:
    """Return the values of the keys that the command gives, by dotted key."""
    found = {}
    for text in job.overrides:
        for key, _ in assigned_values(text):
            if key != "resume":
                found[key] = OmegaConf.select(job.config, key)
    if isinstance(draw := found.get("figures"), bool):
        del found["figures"]
        found["figures.draw"] = draw
    return {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in found.items()
    }
