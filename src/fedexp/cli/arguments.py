"""Parse the command line before Hydra does: separate flags from overrides and plan the runs."""

import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from fedexp.cli.messages import explain_flag
from fedexp.config.options import ONE_OPTION, PRESETS, SEVERAL, conf_directory, list_groups
from fedexp.config.overrides import (
    assigned_values,
    check_names,
    is_sweep,
    key_of,
    read_stored,
)
from fedexp.config.spelling import check_values, normalise, quoted
from fedexp.core.errors import ConfigError, reject_password

# flag -> (short form, allowed values). () means that the flag takes no value, None that any value
# is allowed.
FLAGS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "--help": ("-h", ()),
    "--hydra-help": ("", ()),
    "--version": ("", ()),
    "--cfg": ("-c", ("job", "hydra", "all")),
    "--package": ("-p", None),
    "--resolve": ("", ()),
    "--run": ("-r", ()),
    "--multirun": ("-m", ()),
    "--info": ("-i", ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
    "--config-path": ("-cp", None),
    "--config-name": ("-cn", None),
    "--config-dir": ("-cd", None),
    "--shell-completion": ("-sc", ()),
}
OURS = ("sweep", "preview")  # keys of a multirun that are not passed to Hydra
OPEN = "surrogate.options"  # a mapping that accepts any key
NO_FIGURES = {"figures=false", "figures.draw=false"}


class Parser(ArgumentParser):
    """A parser that raises ConfigError for invalid arguments."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class Plan(NamedTuple):
    """The runs that a command line requests."""

    flags: Mapping[str, str]  # full name -> value, or an empty string if the flag takes no value
    folders: list[Path]  # directories with the user's config groups (`--config-dir`)
    launches: list[list[str]]  # the overrides of each call to Hydra
    sweeps: list[str]  # names of the requested sweeps (files in conf/sweep)
    preview: bool  # whether to list the jobs without running them

    @property
    def words(self) -> list[str]:
        """The flags in the form that Hydra's parser accepts."""
        return [f"{name}={value}" if value else name for name, value in self.flags.items()]

    @property
    def lists_jobs(self) -> bool:
        """Whether the command runs a multirun whose jobs are known in advance."""
        shows = {"--cfg", "--info", "--hydra-help"} & self.flags.keys()
        sweepers = {t for each in self.launches for t in each if key_of(t) == "hydra/sweeper"}
        return "--multirun" in self.flags and not shows and sweepers <= {"hydra/sweeper=basic"}

    @property
    def draws(self) -> bool:
        """Whether reports include figures."""
        return not any(NO_FIGURES.intersection(map(str.lower, each)) for each in self.launches)

    def sweep_in(self, directory: Path) -> str | None:
        """Return the name of the sweep that runs in a directory, or None if no sweep was named."""
        return directory.name if len(self.sweeps) > 1 else next(iter(self.sweeps), None)


def parse(arguments: Sequence[str]) -> Plan:
    """Parse a command line and return its plan, see `make_plan`."""
    return make_plan(*split_flags(arguments))


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split arguments into flags and overrides. The arguments may be in any order.

    Return (flags, overrides). The flags are a dict that maps full names to values.

    Raises ConfigError for an unknown flag or a value that the flag does not allow.
    """
    parser = Parser(add_help=False)
    for name, (short, values) in FLAGS.items():
        names = (name, short) if short else (name,)
        if values == ():
            parser.add_argument(*names, dest=name, action="store_const", const="")
        elif name == "--info":
            parser.add_argument(*names, dest=name, choices=values, nargs="?", const="all")
        else:
            parser.add_argument(*names, dest=name, choices=values)
    found, overrides = parser.parse_known_args(arguments)
    for text in overrides:
        if text.startswith("-"):
            known = {*FLAGS, *(short for short, _ in FLAGS.values())}
            raise ConfigError(explain_flag(text, known, conf_directory()))
    return {name: value for name, value in vars(found).items() if value is not None}, overrides


def config_folders(flags: Mapping[str, str]) -> list[Path]:
    """Return a list with the directory given by `--config-dir`, or an empty list."""
    return [Path(flags["--config-dir"])] if "--config-dir" in flags else []


def make_plan(flags: Mapping[str, str], overrides: list[str]) -> Plan:
    """Plan the runs that the flags and overrides of a command line request.

    Raises ConfigError for errors that can be found before Hydra composes the configuration.
    """
    folders = config_folders(flags)
    check_same_names(folders)
    searched, multirun = [*folders, conf_directory()], "--multirun" in flags
    ours: dict[str, str] = {}
    own = []
    for text in normalise(add_stored_overrides(overrides, multirun, searched), searched):
        key, _, value = text.partition("=")
        reject_password(key, value)
        if key not in OURS:
            own.append(text)
        elif multirun:
            ours[key] = value
        else:
            raise ConfigError(f"{text}: needs --multirun")
    check_swept_once(own)
    own = rewrite_lists(own)
    check_overrides(own, searched)
    preview = read_preview(ours, own)
    if "sweep" not in ours:
        return Plan(flags, folders, [own], [], preview)
    names = list(dict.fromkeys(ours["sweep"].split(",")))
    return Plan(flags, folders, sweep_launches(names, own, searched), names, preview)


def read_preview(ours: Mapping[str, str], own: Sequence[str]) -> bool:
    """Return whether to list the jobs without running them."""
    text = ours.get("preview", "false")
    if text not in ("true", "false"):
        raise ConfigError(f"preview={text}: must be true or false")
    if text == "true" and "hydra/sweeper=optuna" in own:
        raise ConfigError("preview=true: cannot list the trials of hydra/sweeper=optuna in advance")
    return text == "true"


def check_same_names(directories: Sequence[Path]) -> None:
    """Raise ConfigError if a user's option has the same name as an option of fedexp.

    Hydra would use fedexp's option instead of the user's. Sweeps may share a name, since Hydra does
    not read them.
    """
    for directory in directories:
        for mine in sorted(directory.glob("*/**/*.yaml")):
            name = mine.relative_to(directory)
            theirs = conf_directory() / name
            if name.parts[0] == "sweep" or not mine.is_file() or not theirs.is_file():
                continue
            if not mine.samefile(theirs):
                raise ConfigError(
                    f"{mine}: has the same name as fedexp's {theirs}, which Hydra would use"
                    f" instead; rename your file, for example to my_{name.name}"
                )


def check_swept_once(overrides: Sequence[str]) -> None:
    """Raise ConfigError if a key with several values is given twice, since Hydra uses the last."""
    given: dict[str, str] = {}
    for text in overrides:
        for key, _ in assigned_values(text) or [(key_of(text), "")]:
            name = key.removeprefix("partition.")  # partition.alpha refers to alpha
            other = given.setdefault(name, text)
            if other is not text and (is_sweep(other) or is_sweep(text)):
                raise ConfigError(
                    f"{other} and {text}: both set {name}; give all of its values at once, as in"
                    f" {name}=<value>,<value>"
                )


def check_overrides(overrides: Sequence[str], folders: list[Path]) -> None:
    """Raise ConfigError for an override that is unsafe or that Hydra would not understand."""
    groups = list_groups(folders)
    for text in overrides:
        if key_of(text).startswith("hydra") and "_target_" in text:
            raise ConfigError(
                f"{text}: refers to Python code; only files in your --config-dir may do this"
            )
    check_names(overrides, [*groups, *PRESETS])
    check_values(overrides, folders)
    for text in overrides:
        if key_of(text) in groups and text.partition("=")[2].startswith(("[", "{")):
            raise ConfigError(f"{text}: {ONE_OPTION}; groups: {', '.join(groups)}")


def sweep_launches(names: Sequence[str], own: list[str], folders: list[Path]) -> list[list[str]]:
    """Return the overrides of each multirun that belongs to the named sweeps."""
    from fedexp.analysis.sweep import launches, load_sweep

    placed = [text for text in own if text.startswith("hydra.sweep.dir=")]
    if placed and len(names) > 1:
        raise ConfigError(
            f"{placed[-1]}: cannot be used with several sweeps; each sweep is written to"
            " multirun/<sweep>"
        )
    found = []
    for name in names:
        where = [] if placed else [f"hydra.sweep.dir=multirun/{name}"]
        found += launches(load_sweep(name, folders), [*own, *where])
    return found


def rewrite_lists(overrides: list[str]) -> list[str]:
    """Rewrite `tracker=[a,b]` and `tracker.a.key=value` as overrides of `tracker=several`.

    Otherwise, Hydra would merge the options into one node. The other groups in `SEVERAL`, such as
    `analysis`, are rewritten in the same way.
    """
    for group in SEVERAL:
        overrides = rewrite_list(overrides, group)
    # Hydra adds a key to a mapping only if the override begins with `++`.
    return [f"++{o}" if o.startswith((f"{OPEN}=", f"{OPEN}.")) else o for o in overrides]


def rewrite_list(overrides: list[str], group: str) -> list[str]:
    """Rewrite a list of a group's options as overrides of the group's option `several`."""
    given = [text for text in overrides if key_of(text) == group]
    found = re.fullmatch(rf"{group}=\[([\w\s,.-]+)\]", given[-1]) if given else None
    if found is None:
        return overrides
    names = [name.strip() for name in found[1].split(",")]
    written = [f"{group}=several", f"{group}.members=[{','.join(names)}]"]
    for override in overrides:
        first, _, rest = key_of(override).partition(".")
        if first == group and rest.partition(".")[0] in names:
            written.append(f"++{group}.options.{override.lstrip('+').removeprefix(f'{group}.')}")
        elif key_of(override) != group:
            written.append(override)
    return written


def add_stored_overrides(overrides: list[str], multirun: bool, folders: list[Path]) -> list[str]:
    """Add the overrides of the run that `resume=DIR` continues, and set its run directory to DIR.

    Without `resume=`, the overrides are returned unchanged.
    """
    from fedexp.rundir.files import require_run_directory

    given = [text.split("=", 1)[1] for text in overrides if text.startswith("resume=")]
    if not given or given[-1] == "null":
        return overrides
    named = given[-1].strip("'\"")
    if not named:
        raise ConfigError("resume=: needs the path of a run directory")
    if multirun:
        raise ConfigError("resume=: resumes a single run and cannot be used with --multirun")
    try:
        directory = Path(named).expanduser().resolve()
    # a cycle of links, or an unknown user after ~
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"resume={given[-1]}: not a run directory ({error})") from error
    require_run_directory(directory, given[-1])
    later = [text for text in overrides if not text.startswith("resume=")]
    typed = {key_of(text): text for text in later}
    if "hydra.run.dir" in typed:
        raise ConfigError(
            f"{typed['hydra.run.dir']}: cannot be used with resume=, which names the run directory"
        )
    # An override given now replaces the stored override of the same key. check_resume compares the
    # two.
    stored = directory / ".hydra" / "overrides.yaml"
    kept = read_stored(stored, [*list_groups(folders), *PRESETS], typed.keys())
    path = quote_literal(str(directory))
    # overrides given now follow resume=, see `typed_overrides`
    return [*kept, f"resume={path}", *later, f"hydra.run.dir={path}"]


def quote_literal(text: str) -> str:
    """Quote a value so that Hydra and OmegaConf read it literally.

    The text may contain quotes, backslashes and `${`.
    """
    # In a text with `${`, OmegaConf reads backslashes before `${` and at the end as escapes.
    if "${" in text:
        text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
        text = re.sub(r"\\+$", lambda found: found[0] * 2, text)
    return quoted(text)
