"""Complete command lines in bash, zsh and fish: `fedexp --shell-completion install=bash|zsh|fish`.

The flag is Hydra's, but Hydra's completion is not used. It composes the configuration and takes
three to five times as long (0.6 to 1.1 s instead of 0.2 s on two cores), while this module reads
only the few yaml files that determine the next words. Hydra also cannot complete subcommands,
flags, the paths of `resume=`, lists of values or `true` and `false`. The two cannot be combined,
since a shell asks one program to complete a whole line.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedexp.cli.arguments import FLAGS, config_directories
from fedexp.cli.commands import SUBCOMMANDS
from fedexp.cli.help import defaults
from fedexp.config.options import GLOBAL_OPTION, list_groups, list_options
from fedexp.core.errors import ConfigError, require_choice

SCRIPTS = {
    "bash": (
        r"""
_fedexp() {
  local line=${COMP_LINE:0:COMP_POINT} IFS=$'\n' word begun
  COMPREPLY=($(COMP_LINE=$line "${COMP_WORDS[0]}" --shell-completion query=bash 2>/dev/null))
  word=${line##*[[:space:]]}
  # bash replaces only what follows the last of = and :
  begun=${word%"${word##*["${COMP_WORDBREAKS//[^=:]/}"]}"}
  [[ $COMP_WORDBREAKS == *[=:]* ]] && COMPREPLY=("${COMPREPLY[@]#"$begun"}")
}
complete -o nospace -F _fedexp fedexp"""
    ),
    "zsh": (
        r"""
_fedexp() {
  local -a found
  local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
  found=("${(@f)$(COMP_LINE=$line $words[1] --shell-completion query=zsh 2>/dev/null)}")
  compadd -S '' -- ${(M)found:#*[=./]}
  compadd -- ${found:#*[=./]}
}
compdef _fedexp fedexp"""
    ),
    "fish": (
        r"""
function __fedexp_complete
  set -lx COMP_LINE (commandline -cp)
  command fedexp --shell-completion query=fish 2>/dev/null
end
complete -c fedexp -f -a '(__fedexp_complete)'"""
    ),
}
OF_HYDRA = {
    "hydra/launcher": ("basic", "joblib", "submitit_slurm", "ray"),
    "hydra/sweeper": ("basic", "optuna"),
}
OWN = ("hydra.run.dir", "hydra.sweep.dir", *OF_HYDRA)  # Hydra's keys that users need
PATHS = (
    *("resume", "data_dir", "partition.path", "cohorts.path", "dataset.root"),
    *("algorithm.embeddings", "hydra.run.dir", "hydra.sweep.dir"),
)
ONLY_SWEEP = ("sweep", "preview", "budget")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def answer_shell(words: list[str], folders: list[Path]) -> str:
    """Return what `--shell-completion ACTION=SHELL` prints.

    words: the command line without its flags. folders: directories with config groups, the user's
    first and conf/ last.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    action = next((name for name in ("install", "query") if name in given), None)
    if action is None:
        raise ConfigError(
            f"--shell-completion: goes with install= or query= one of {', '.join(SCRIPTS)}"
        )
    require_choice(action, shell := given[action], SCRIPTS)
    if action == "install":
        return SCRIPTS[shell].strip()
    line = os.environ.get("COMP_LINE", "")
    typed = line.split()[1:] + [""] * line.endswith(" ")
    # the script tells bash (nospace) to add no space after a word, so add it here
    whole = " " if shell == "bash" and not is_multirun(typed) else ""
    found = candidates(typed or [""], folders)
    return "\n".join(text if text.endswith(("=", ".", "/")) else text + whole for text in found)


def candidates(words: list[str], folders: list[Path]) -> list[str]:
    """Return the completions of the last word, up to the next `.`, `=` or `/`.

    words: the command line after `fedexp`.
    """
    *before, word = words
    return sorted({text for text in offers(before, word, folders) if text.startswith(word)})


def offers(before: list[str], word: str, folders: list[Path]) -> Iterator[str]:
    """Yield words that may follow `before`. They need not begin with `word`."""
    after = next((FLAGS[name] for name in before[-1:] if name in FLAGS), ("", ()))[1]
    if before and before[0] in SUBCOMMANDS:
        yield from ("--help",) if word.startswith("-") else paths(word)
    elif before[-1:] == ["--shell-completion"]:
        yield from (f"install={shell}" for shell in SCRIPTS)
    elif after is None:
        yield from paths(word)
    elif after:
        yield from after
    elif word.startswith("-"):
        yield from FLAGS
    else:
        yield from () if before else SUBCOMMANDS
        name = word.lstrip("+~")
        sign = word.removesuffix(name)
        for text in overrides(before, name, [*config_directories(before), *folders]):
            yield sign + text


def is_multirun(words: Iterable[str]) -> bool:
    return not {"-m", "--multirun"}.isdisjoint(words)


def overrides(before: list[str], word: str, folders: list[Path]) -> Iterator[str]:
    """Yield `group=option` and `key=value`; a key without `=` ends at its next `.`."""
    multirun = is_multirun(before)
    groups = [*list_groups(folders), "experiment", *(ONLY_SWEEP if multirun else ())]
    key, equals, value = word.partition("=")
    if not equals:
        for name in (*settable(before, folders), *groups, *OWN):
            dot = name.find(".", len(word))
            yield f"{name}=" if dot < 0 else name[: dot + 1]
        return
    done = value[: value.rfind(",") + 1] if multirun else ""  # the complete values of a list
    last = value.removeprefix(done)
    found: Iterable[str]
    if key in groups and key != "preview":
        found = list_options(key, folders)
    elif key in PATHS or last.startswith(("/", "./", "../", "~")):
        found = paths(last)
    elif key in OF_HYDRA:
        found = OF_HYDRA[key]
    else:
        found = values_of(settable(before, folders).get(key, False if key == "preview" else None))
    for text in found:
        yield f"{key}={done}{text}"


def values_of(present: object) -> list[str]:
    """Return the values to offer for a key whose present value is this one.

    Values that the shell would interpret are left out.
    """
    if isinstance(present, bool):
        return ["true", "false"]
    if isinstance(present, list):
        return [f"[{','.join(map(str, present))}]"]
    return [] if present is None or "$" in str(present) else [str(present)]


def settable(before: list[str], folders: list[Path]) -> dict[str, Any]:
    """Return key -> value (as in the yaml files) for the options chosen in `before`."""
    given = dict(text.lstrip("+~").split("=", 1) for text in before if "=" in text)
    groups = {group: option for group, option in given.items() if "." not in group}
    preset, _ = load(folders, "experiment", given.get("experiment", ""))
    chosen = defaults(folders[-1])
    for entry in preset.get("defaults", ()):
        if isinstance(entry, dict):
            chosen |= {name.removeprefix("override /"): str(entry[name]) for name in entry}
    chosen |= groups
    main = read(folders[-1] / "config.yaml")
    keys = dict(leaves({key: main[key] for key in main if key != "hydra"}))
    for group in list_groups(folders):
        option, whole = load(folders, group, chosen.get(group, "").split(",")[0])
        keys |= leaves(option, "" if whole else f"{group}.")
    return keys | dict(leaves(preset))


def load(folders: list[Path], group: str, name: str) -> tuple[dict[str, Any], bool]:
    """Return (an option merged with its bases, whether its keys are on the top level).

    The option is empty if its file does not exist.
    """
    files = [folder / group / f"{name}.yaml" for folder in folders]
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        return {}, False
    option = read(path)
    for base in option.get("defaults", ()):
        if isinstance(base, str) and base not in ("_self_", name):
            option = load(folders, group, base)[0] | option
    return option, GLOBAL_OPTION.search(path.read_text(encoding="utf-8")) is not None


def read(path: Path) -> dict[str, Any]:
    """Read a mapping from a yaml file. Errors are ignored: the mapping is empty then."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value that a user may set."""
    for key, value in node.items():
        if key in ("_target_", "defaults"):
            continue
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def paths(begin: str) -> Iterator[str]:
    """Yield the files and directories that complete a path; directories end with a slash.

    Hidden names are included only if the name begins with a dot.
    """
    folder, _, name = begin.rpartition("/")
    place = Path(f"{folder}/" if "/" in begin else ".").expanduser()
    try:
        entries = list(os.scandir(place))
    except OSError:
        return
    for entry in entries:
        if name.startswith(".") or not entry.name.startswith("."):
            yield f"{begin.removesuffix(name)}{entry.name}{'/' if entry.is_dir() else ''}"
