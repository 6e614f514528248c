"""Complete command lines in bash, zsh and fish: `fedexp --shell-completion install=bash|zsh|fish`.

Hydra's completion is not used. It composes the configuration and therefore takes three to five
times as long (0.6 to 1.1 s instead of 0.2 s on two cores). It also cannot complete subcommands,
flags, paths or lists of values.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedexp.cli.arguments import FLAGS, OURS, config_folders, split_flags
from fedexp.cli.commands import SUBCOMMANDS
from fedexp.cli.help import default_options
from fedexp.config.options import known_keys, list_groups, list_options
from fedexp.core import yaml_files
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
PATHS = (
    *("resume", "data_dir", "partition.path", "cohorts.path", "dataset.root"),
    *("hydra.run.dir", "hydra.sweep.dir"),
)


def answer_shell(words: list[str], folders: list[Path]) -> str:
    """Return the text that `--shell-completion ACTION=SHELL` prints.

    words: the command line without its flags. folders: the directories that contain config groups,
    the user's first and conf/ last.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    action = next((name for name in ("install", "query") if name in given), None)
    if action is None:
        raise ConfigError(
            "--shell-completion: needs install=<shell> or query=<shell>; shells:"
            f" {', '.join(SCRIPTS)}"
        )
    require_choice(action, shell := given[action], SCRIPTS)
    if action == "install":
        return SCRIPTS[shell].strip()
    line = os.environ.get("COMP_LINE", "")
    typed = line.split()[1:] + [""] * line.endswith(" ")
    # with the script's `nospace`, bash adds no space after a word, so add it to the completion
    whole = " " if shell == "bash" and not is_multirun(typed) else ""
    found = complete(typed or [""], folders)
    return "\n".join(text if text.endswith(("=", ".", "/")) else text + whole for text in found)


def complete(words: list[str], folders: list[Path]) -> list[str]:
    """Return the completions of the last word. Each completion ends at the next `.`, `=` or `/`.

    words: the words of the command line after `fedexp`.
    """
    *before, word = words
    return sorted({text for text in suggest(before, word, folders) if text.startswith(word)})


def suggest(before: list[str], word: str, folders: list[Path]) -> Iterator[str]:
    """Yield words that may follow the words `before`. Some may not begin with `word`."""
    values = next((FLAGS[name][1] for name in before[-1:] if name in FLAGS), ())
    if before and before[0] in SUBCOMMANDS:
        yield from ("--help",) if word.startswith("-") else complete_path(word)
    elif values is None:
        yield from complete_path(word)
    elif values:
        yield from values
    elif word.startswith("-"):
        yield from FLAGS
    else:
        yield from () if before else SUBCOMMANDS
        flags, given = split_flags(before)
        name = word.lstrip("+~")
        sign = word.removesuffix(name)
        searched = [*config_folders(flags), *folders]
        for text in complete_override(given, name, searched, is_multirun(before)):
            yield sign + text


def is_multirun(words: list[str]) -> bool:
    return not {"-m", "--multirun"}.isdisjoint(words)


def complete_override(
    before: list[str], word: str, folders: list[Path], multirun: bool
) -> Iterator[str]:
    """Yield completions of the form `group=option` and `key=value`.

    Without `=`, a key is completed up to its next `.`.
    """
    groups = [*list_groups(folders), "experiment", *(OURS if multirun else ())]
    key, equals, value = word.partition("=")
    if not equals:
        hydras = (*OF_HYDRA, "hydra.run.dir", "hydra.sweep.dir")
        for name in (*settable_keys(before, folders), *groups, *hydras):
            dot = name.find(".", len(word))
            yield f"{name}=" if dot < 0 else name[: dot + 1]
        return
    done = value[: value.rfind(",") + 1] if multirun else ""  # the complete values of a list
    last = value.removeprefix(done)
    found: Iterable[str] = OF_HYDRA.get(key, ())
    if key in groups:
        found = list_options(key, folders)
    elif key in PATHS:
        found = complete_path(last)
    for text in found:
        yield f"{key}={done}{text}"


def settable_keys(before: list[str], folders: list[Path]) -> list[str]:
    """Return the keys that can be set if the options in `before` are chosen."""
    given = dict(text.lstrip("+~").split("=", 1) for text in before if "=" in text)
    chosen = default_options(folders[-1])
    for entry in defaults_list(folders, "experiment", given.get("experiment", "")):
        if isinstance(entry, dict):
            chosen |= {name.removeprefix("override /"): str(entry[name]) for name in entry}
    chosen |= given
    options = {f"{group}={option}" for group, option in chosen.items()}
    for group, option in chosen.items():
        options |= {f"{group}={base}" for base in defaults_list(folders, group, option)}
    known = known_keys(folders[-1], folders[:-1])
    nodes = {key.rpartition(".")[0] for key in known}
    return [
        key
        for key, owners in known.items()
        if key not in (*nodes, *OURS)
        and not key.endswith("_target_")
        and (not owners or not options.isdisjoint(owners))
    ]


def defaults_list(folders: list[Path], group: str, option: str) -> list[Any]:
    """Return the defaults list of an option's file: the options that this option extends."""
    files = (folder / group / f"{option}.yaml" for folder in folders)
    path = next((path for path in files if path.is_file()), None)
    content = None if path is None else yaml_files.load(path.read_text(encoding="utf-8"))
    return content.get("defaults", []) if isinstance(content, dict) else []


def complete_path(begin: str) -> Iterator[str]:
    """Yield the files and directories that complete a path. Directories end with a slash.

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
