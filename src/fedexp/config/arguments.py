"""Prepare a command line for Hydra, which parses it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fedexp.config.options import (
    MULTIPLE,
    conf_directories,
    known_keys,
    list_groups,
)
from fedexp.config.overrides import FORCED, assigned_values, key_of, with_quoted_names
from fedexp.core.errors import ConfigError, nearest, reject_password
from fedexp.core.private.hydra_internals import get_args_parser

OF_SWEEPER = ("sweep", "preview")  # short names of keys of hydra.sweeper
MULTIRUN = {"--multirun", "-m"}
UNSET = (None, "None")  # how `assigned_values` returns null
SEARCH = "hydra/sweeper=optuna"


def hydra_arguments(arguments: Sequence[str], folders: Sequence[Path] = ()) -> list[list[str]]:
    """Return the arguments of each call of Hydra: one for each sweep, otherwise a single one.

    folders: directories with the user's config groups, besides those that the arguments give.

    Raises ConfigError for what Hydra would accept without a message.
    """
    folders = [*folders, *given_folders(arguments)]
    check_same_names(folders)
    check_options(arguments)
    check_output(arguments)
    in_sweep = not MULTIRUN.isdisjoint(arguments)
    written = []
    names: list[str] = []
    for text in arguments:
        key, _, value = text.partition("=")
        reject_password(key, value)
        if key not in OF_SWEEPER:
            written.append(text if text.startswith("-") else with_quoted_names(text))
        elif not in_sweep:
            raise ConfigError(f"{text}: needs --multirun")
        elif SEARCH in arguments:
            raise ConfigError(
                f"{text}: cannot be used with {SEARCH}, which chooses the jobs one after the other"
            )
        elif key == "sweep":
            names = list(dict.fromkeys([*names, *value.split(",")]))
        else:
            written.append(f"hydra.sweeper.{text}")
    if any(key_of(text) == "resume" for text in written):
        written = forced_by_options(written, folders)
    # Hydra's parser does not accept flags between overrides
    written.sort(key=lambda text: "=" in text and not text.startswith("-"))
    check_flags(written)
    if not names:
        return [written]
    placed = [text for text in written if text.startswith("hydra.sweep.dir=")]
    if placed and len(names) > 1:
        raise ConfigError(
            f"{placed[-1]}: cannot be used with several sweeps; each sweep is written to"
            " multirun/<sweep>"
        )
    return [
        [*written, f"hydra.sweeper.sweep={name}", *(placed or [f"hydra.sweep.dir=multirun/{name}"])]
        for name in names
    ]


def forced_by_options(arguments: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return arguments in which keys that only some options have are accepted with any option.

    The configuration that Hydra composes for `resume=` has the default options. The run has others,
    and `resumed_job` refuses what the run does not have.
    """
    owners = known_keys(folders)
    return [f"{FORCED}{text}" if owners.get(text.partition("=")[0]) else text for text in arguments]


def as_typed(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a call of Hydra in the form that users type."""
    keys = tuple(f"hydra.sweeper.{key}=" for key in OF_SWEEPER)
    return [
        text.removeprefix("hydra.sweeper.") if text.startswith(keys) else text for text in arguments
    ]


def given_folders(arguments: Sequence[str]) -> list[Path]:
    """Return the directories given by `--config-dir`."""
    found = []
    for number, text in enumerate(arguments):
        flag, equals, value = text.partition("=")
        if flag in ("--config-dir", "-cd"):
            found += (
                [Path(value)] if equals else [Path(each) for each in arguments[number + 1 :][:1]]
            )
    return found


def check_same_names(folders: Sequence[Path]) -> None:
    """Raise ConfigError if a user's option has the same name as an option of fedexp.

    Hydra would use fedexp's option instead of the user's. Sweeps may share a name, since Hydra does
    not read them.
    """
    for folder in folders:
        for mine in sorted(folder.glob("*/**/*.yaml")):
            name = mine.relative_to(folder)
            if name.parts[0] == "sweep":
                continue
            for theirs in (each / name for each in conf_directories()):
                if theirs.is_file() and not mine.samefile(theirs):
                    raise ConfigError(
                        f"{mine}: has the same name as fedexp's {theirs}, which Hydra would use"
                        f" instead; rename your file, for example to my_{name.name}"
                    )


def check_flags(arguments: Sequence[str]) -> None:
    """Raise ConfigError for what Hydra's parser would reject with its usage text."""

    def reject(message: str) -> NoReturn:
        raise ConfigError(message)

    parser = get_args_parser()
    flags = list(dict.fromkeys(re.findall(r"--[a-z][a-z-]+", parser.format_usage())))
    parser.error = reject  # type: ignore[method-assign]
    for text in parser.parse_known_args(arguments)[1]:
        flag, _, value = text.partition("=")
        key = flag.lstrip("-").replace("-", "_")
        if key in known_keys():
            given = value or "<value>"
            raise ConfigError(f"{text}: must be written without dashes: {key}={given}")
        raise ConfigError(f"{flag}: no such flag{nearest(flag, flags)}; flags: {', '.join(flags)}")


def check_output(overrides: Sequence[str]) -> None:
    """Raise ConfigError if Hydra would write a folder before fedexp checks the configuration.

    With the name .hydra and `resume=`, it would replace the options of the run.
    """
    key = "hydra.output_subdir"
    for text in overrides:
        if key_of(text) in ("hydra", key) and dict(assigned_values(text)).get(key) not in UNSET:
            raise ConfigError(
                f"{text}: cannot be set, because Hydra would write to this folder before fedexp"
                " checks the configuration; fedexp writes .hydra/ itself"
            )


def check_options(overrides: Sequence[str]) -> None:
    """Raise ConfigError for empty directories, which are the working directory to Hydra, for lists
    of options that Hydra would merge into one node or ignore, and for two values of one setting.
    """
    groups = list_groups(conf_directories())
    given = {text.partition("=")[0]: text for text in overrides}
    for key, text in given.items():
        if other := given.get(f"partition.{key}"):  # by default, refers to the key
            raise ConfigError(f"{text} and {other}: both set {key}; give only one of them")
    for text in overrides:
        if text in ("hydra.run.dir=", "hydra.sweep.dir=", "resume="):
            raise ConfigError(f"{text}: must name a directory")
        group, equals, value = text.partition("=")
        if (
            not equals
            or group not in groups
            or not (value.startswith(("[", "{")) or value in ("null", ""))
        ):
            continue
        if value in ("null", "", "[]") and group in MULTIPLE:
            raise ConfigError(f"{text}: must name options; use {group}=none or leave it out")
        names = [name.strip() for name in value.strip("[]").split(",")]
        if group not in MULTIPLE:
            raise ConfigError(f"{text}: must be one option of the group, such as algorithm=fedntd")
        if "none" in names and len(names) > 1:
            raise ConfigError(f"{text}: none cannot be combined with other options; remove it")
