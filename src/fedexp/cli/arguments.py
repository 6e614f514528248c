"""The command line before Hydra reads it: flags, overrides, `sweep=`, `budget=`, `preview=`,
`resume=`, directories."""

import math
import re
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from fedexp.cli.messages import unknown_flag
from fedexp.config.options import SEVERAL, conf_directory
from fedexp.config.overrides import key_of, read_stored
from fedexp.core.errors import ConfigError

OURS = ("sweep", "preview", "budget")  # keys of a multirun that Hydra does not see
# Mappings whose keys are those of something else, and the choice with which each is there (None:
# always).
OPEN = {"surrogate.options": None, "partition.options": "partition=flower"}


def config_directories(arguments: list[str]) -> list[Path]:
    """Return the user's own groups (`--config-dir`)."""
    found = [value for flag, value in pairwise(arguments) if flag in ("--config-dir", "-cd")]
    found += [a.split("=", 1)[1] for a in arguments if a.startswith(("--config-dir=", "-cd="))]
    return [Path(directory) for directory in found]


def check_hidden(directories: list[Path]) -> None:
    """Raise ConfigError for an option of the user's own with the name of one of fedexp's, which
    Hydra takes instead. A sweep is no such option: Hydra does not read it."""
    for directory in directories:
        for mine in sorted(directory.glob("*/**/*.yaml")):
            name = mine.relative_to(directory)
            theirs = conf_directory() / name
            if (
                name.parts[0] != "sweep"
                and mine.is_file()
                and theirs.is_file()
                and not mine.samefile(theirs)
            ):
                raise ConfigError(
                    f"{mine}: has the name of fedexp's own {theirs}, which would be taken instead;"
                    f" rename yours, such as to my_{name.name}"
                )


class Asked(NamedTuple):
    flags: list[str]
    launches: list[list[str]]  # the overrides of each run of Hydra
    sweeps: list[str]  # of conf/sweep
    preview: bool  # nothing is to be run
    budget: float | None = None  # minutes that all jobs together may take

    def name_of(self, directory: Path) -> str | None:
        """The named sweep whose jobs lie in this directory; None where none was asked for."""
        return directory.name if len(self.sweeps) > 1 else next(iter(self.sweeps), None)


def sort_out(arguments: list[str]) -> Asked:
    """Take out what is ours; flags come first, since Hydra's parser does not take overrides on both
    sides of one."""
    from fedexp.analysis.sweep import launches, load_sweep
    from fedexp.config.options import ONE_OPTION, PRESETS, list_groups
    from fedexp.config.overrides import check_names
    from fedexp.config.spelling import check_values, normalise

    flags, overrides = split_flags(arguments)
    check_hidden(config_directories(arguments))
    folders = [*config_directories(arguments), conf_directory()]
    overrides = normalise(overrides, folders)
    asked = {
        key: [o.partition("=")[2] for o in overrides if o.startswith(f"{key}=")] for key in OURS
    }
    own = together([o for o in overrides if not o.startswith(tuple(f"{key}=" for key in OURS))])
    if called := [o for o in own if key_of(o).startswith("hydra") and "_target_" in o]:
        raise ConfigError(
            f"{called[0]}: what Hydra calls can only be set in a directory of your own"
            " (--config-dir)"
        )
    check_names(own, [*list_groups(folders), *PRESETS])
    check_values(own, folders)
    if lists := [
        o
        for o in own
        if o.partition("=")[2].startswith(("[", "{")) and key_of(o) in list_groups(folders)
    ]:
        every = (
            "; forgetting_metric=all measures all of them"
            if key_of(lists[0]) == "forgetting_metric"
            else ""
        )
        raise ConfigError(
            f"{lists[0]}: {ONE_OPTION}{every}; groups: {', '.join(list_groups(folders))}"
        )
    multirun = "--multirun" in flags or "-m" in flags
    for key, values in asked.items():
        if values and not multirun:
            raise ConfigError(f"{key}={values[-1]}: goes with --multirun")
    preview = asked["preview"][-1:]
    if preview not in ([], ["true"], ["false"]):
        raise ConfigError(f"preview={preview[0]}: must be true or false")
    if preview == ["true"] and "hydra/sweeper=optuna" in own:
        raise ConfigError(
            "preview=true: cannot list the jobs of hydra/sweeper=optuna, which follow from each"
            " other"
        )
    budget = (
        read_budget(asked["budget"][-1], own, bool(asked["sweep"])) if asked["budget"] else None
    )
    if not asked["sweep"]:
        return Asked(flags, [own], [], preview == ["true"], budget)
    names = list(dict.fromkeys(asked["sweep"][-1].split(",")))
    placed = [o for o in own if o.startswith("hydra.sweep.dir=")]
    if placed and len(names) > 1:
        raise ConfigError(f"{placed[-1]}: goes with one sweep; several lie in multirun/<sweep>")
    jobs = [
        each
        for name in names
        for each in launches(
            load_sweep(name, folders), own if placed else [*own, f"hydra.sweep.dir=multirun/{name}"]
        )
    ]
    return Asked(flags, jobs, names, preview == ["true"], budget)


def together(overrides: list[str]) -> list[str]:
    """Write `tracker=[a,b]`, with which Hydra would make one node of both, and
    `tracker.a.key=value` as overrides of `tracker=several`; likewise `analysis=[a,b]`."""
    for group in SEVERAL:
        overrides = several(overrides, group)
    return [f"++{o}" if adds_to_a_mapping(o, overrides) else o for o in overrides]


def adds_to_a_mapping(override: str, overrides: list[str]) -> bool:
    """Return whether an override sets keys of a mapping that has none in conf/: Hydra adds them
    where it begins with `++` only."""
    return any(
        override.startswith((f"{name}=", f"{name}.")) and (choice is None or choice in overrides)
        for name, choice in OPEN.items()
    )


def several(overrides: list[str], group: str) -> list[str]:
    """Write the list of options of one group as overrides of its option `several`."""
    form = re.compile(rf"{group}=\[([\w\s,.-]+)\]")
    lists = [found for o in overrides if key_of(o) == group and (found := form.fullmatch(o))]
    if not lists or lists[-1].string != [o for o in overrides if key_of(o) == group][-1]:
        return overrides
    names = [name.strip() for name in lists[-1][1].split(",")]
    written = [f"{group}=several", f"{group}.members=[{','.join(names)}]"]
    for override in overrides:
        key, member = key_of(override), key_of(override).removeprefix(f"{group}.").partition(".")[0]
        if key.startswith(f"{group}.") and member in names:
            written.append(f"++{group}.options.{override.lstrip('+').removeprefix(f'{group}.')}")
        elif key != group:
            written.append(override)
    return written


def read_budget(text: str, own: list[str], named: bool) -> float:
    """Minutes. own: the other overrides; named: whether there is a sweep of conf/sweep among what
    is asked for."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < math.inf:
        raise ConfigError(f"budget={text}: must be a number of minutes above 0")
    if not named and not any(o.startswith("hydra.sweep.dir=") for o in own):
        raise ConfigError(
            f"budget={text}: needs sweep=<name> or hydra.sweep.dir=<directory>, in which the same"
            " command goes on"
        )
    if other := [o for o in own if o.startswith("hydra/sweeper=")]:
        raise ConfigError(f"budget={text}: cannot order the jobs of {other[-1]}")
    return minutes


def expand_resume(arguments: list[str]) -> list[str]:
    """Expand `resume=DIR` to the overrides that DIR was started with, in DIR."""
    from fedexp.config.options import PRESETS, list_groups
    from fedexp.rundir.links import require_run_directory

    given = [a.split("=", 1)[1] for a in arguments if a.startswith("resume=")]
    if not given or given[-1] == "null":
        return arguments
    if not given[-1].strip("'\""):
        raise ConfigError("resume=: must be a run directory")
    if "--multirun" in arguments or "-m" in arguments:
        raise ConfigError("resume: goes with a single run, not with --multirun")
    try:
        directory = Path(given[-1].strip("'\"")).expanduser().resolve()
    # links in a circle, an unknown user after ~
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"resume={given[-1]}: not a run directory ({error})") from error
    require_run_directory(directory, given[-1])
    folders = [*config_directories(arguments), conf_directory()]
    flags, now = split_flags(arguments)
    later = [a for a in now if not a.startswith("resume=")]
    if elsewhere := [a for a in later if key_of(a) == "hydra.run.dir"]:
        raise ConfigError(
            f"{elsewhere[-1]}: does not go with resume=, which names the directory of the run"
        )
    # A later override of the same key replaces the stored one, so that check_resume can compare the
    # two.
    stored = directory / ".hydra" / "overrides.yaml"
    kept = read_stored(stored, [*list_groups(folders), *PRESETS], {key_of(a) for a in later})
    path = literal(str(directory))
    # what this command says stands after resume=, see `typed_now`
    return [*flags, *kept, f"resume={path}", *later, f"hydra.run.dir={path}"]


def literal(text: str) -> str:
    """Write a value so that Hydra and OmegaConf read it as this text, whatever quotes, backslashes
    or `${` are in it."""
    from hydra.core.override_parser.types import Quote, QuotedString

    # in such a text OmegaConf reads backslashes before `${` and at the end as escapes
    if "${" in text:
        text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
        text = re.sub(r"\\+$", lambda found: found[0] * 2, text)
    return QuotedString(text, Quote.single).with_quotes()


# Hydra's flags that are followed by a value.
WITH_VALUE = {
    *(
        "--cfg",
        "-c",
        "--package",
        "-p",
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
        "--config-dir",
        "-cd",
    ),
}

# what --info can show
INFORMATION = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FLAGS = WITH_VALUE | {
    *(
        "--help",
        "-h",
        "--hydra-help",
        "--version",
        "--resolve",
        "--run",
        "-r",
        "--multirun",
        "-m",
        "--info",
        "-i",
    ),
    *("--shell-completion", "-sc"),
}


def split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split into (flags with their values, overrides), which users write in any order. Raises
    ConfigError for an unknown flag."""
    flags, overrides, rest = [], [], deque(arguments)
    while rest:
        argument = rest.popleft()
        if not argument.startswith("-"):
            overrides.append(argument)
        # Hydra's parser would take any next override for its value
        elif argument in ("--info", "-i"):
            flags.append(f"--info={rest.popleft() if rest and rest[0] in INFORMATION else 'all'}")
        else:
            flags.append(argument)
            if argument in WITH_VALUE and rest:
                flags.append(rest.popleft())
    for written in (flag for flag in flags if flag.startswith("-")):
        flag = written.split("=")[0]
        if flag == "--experimental-rerun":
            raise ConfigError(
                f"{flag}: is refused, since it runs what a pickle holds; resume=DIR continues a run"
            )
        if not any(
            flag == known or (flag.startswith("--") and known.startswith(flag)) for known in FLAGS
        ):
            raise ConfigError(unknown_flag(written, FLAGS, conf_directory()))
    return flags, overrides
