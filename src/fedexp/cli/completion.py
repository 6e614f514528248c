"""Completion for bash, zsh and fish, behind Hydra's flag: `fedexp --shell-completion
install=bash|zsh|fish`.

Nothing of it is left to Hydra's own completion, whose answers take three to five times as long (0.6
to 1.1 s against 0.2 s on two cores): it composes the configuration, where this reads the few yaml
files that decide what can come next. Nor does Hydra know subcommands, flags, the paths of
`resume=`, lists of values, and `true` beside `false`; and since a shell asks one program for all of
a line, parts of both cannot be mixed.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedexp.cli.arguments import config_directories
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
  begun=${word%"${word##*["${COMP_WORDBREAKS//[^=:]/}"]}"}  # bash replaces only what follows the last of = and :
  [[ $COMP_WORDBREAKS == *[=:]* ]] && COMPREPLY=("${COMPREPLY[@]#"$begun"}")
}
complete -o nospace -F _fedexp fedexp"""
    ),
    "zsh": (
        r"""
_fedexp() {
  local -a found
  found=("${(@f)$(COMP_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" $words[1] --shell-completion query=zsh 2>/dev/null)}")
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
REMOVALS = {
    "bash": "complete -r fedexp; unset -f _fedexp",
    "zsh": "compdef -d fedexp; unfunction _fedexp",
    "fish": "complete -c fedexp -e; functions -e __fedexp_complete",
}
FLAGS: dict[str, tuple[str, ...] | None] = {  # flag -> values; (): it takes none, None: a path
    **dict.fromkeys(
        ("--help", "--hydra-help", "--info", "--multirun", "--resolve", "--version"), ()
    ),
    "--cfg": ("job", "hydra", "all"),
    "--config-dir": None,
    "--shell-completion": tuple(f"install={shell}" for shell in SCRIPTS),
}
OF_HYDRA = {
    "hydra/launcher": ("basic", "joblib", "submitit_slurm", "ray"),
    "hydra/sweeper": ("basic", "optuna"),
}
OWN = ("hydra.run.dir", "hydra.sweep.dir", *OF_HYDRA)  # of Hydra, what fedexp's users need
PATHS = (
    *(
        "resume",
        "data_dir",
        "partition.path",
        "cohorts.path",
        "dataset.root",
        "algorithm.embeddings",
    ),
    *("hydra.run.dir", "hydra.sweep.dir"),
)
ONLY_SWEEP = ("sweep", "preview", "budget")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def answer_shell(arguments: list[str], folders: list[Path]) -> str:
    """Return what `--shell-completion ACTION=SHELL` prints; folders: with config groups, those of
    the user's first and conf/ last."""
    actions = [
        argument.partition("=")
        for argument in arguments
        if not argument.startswith("-") and "=" in argument
    ]
    action, _, shell = next(
        (parts for parts in actions if parts[0] in ("install", "uninstall", "query")), ("", "", "")
    )
    if not action:
        raise ConfigError(
            "--shell-completion: goes with install=, uninstall= or query= one of"
            f" {', '.join(SCRIPTS)}"
        )
    require_choice(action, shell, SCRIPTS)
    if action != "query":
        return (SCRIPTS if action == "install" else REMOVALS)[shell].strip()
    words = os.environ.get("COMP_LINE", "").split()[1:]
    if os.environ.get("COMP_LINE", "").endswith(" "):
        words.append("")
    found = sorted(set(candidates(words or [""], folders)))
    # bash is told not to end words by itself
    whole = "" if shell != "bash" or is_multirun(words) else " "
    return "\n".join(text if text.endswith(("=", ".", "/")) else text + whole for text in found)


def candidates(words: list[str], folders: list[Path]) -> Iterator[str]:
    """Yield the words that the last word can become, up to the next `.`, `=` or `/`; words: of the
    command line after its name."""
    *before, word = words
    if before and before[0] in SUBCOMMANDS:
        yield from (
            ("--help",) if word.startswith("-") and "--help".startswith(word) else paths(word)
        )
        return
    if not before:
        yield from (name for name in SUBCOMMANDS if name.startswith(word))
    after = FLAGS.get(before[-1], ()) if before else ()
    if after is None:
        yield from paths(word)
    elif after:
        yield from (text for text in after if text.startswith(word))
    elif word.startswith("-"):
        yield from (flag for flag in FLAGS if flag.startswith(word))
    else:
        sign = word[: len(word) - len(word.lstrip("+~"))]
        found = overrides(before, word.removeprefix(sign), [*config_directories(before), *folders])
        yield from (sign + text for text in found)


def is_multirun(words: Iterable[str]) -> bool:
    return not {"-m", "--multirun"}.isdisjoint(words)


def overrides(before: list[str], word: str, folders: list[Path]) -> Iterator[str]:
    """Yield `group=option` and `key=value`."""
    multirun = is_multirun(before)
    groups = [*list_groups(folders), "experiment", *(ONLY_SWEEP if multirun else ())]
    key, equals, value = word.partition("=")
    if not equals:
        keys = [*settable(before, folders), *groups, *OWN]
        yield from (begun for name in keys if (begun := step(name, word)))
        return
    done = value[: value.rfind(",") + 1] if multirun else ""  # values of a list that are complete
    begin, last = f"{key}={done}", value.removeprefix(done)
    if key in groups and key != "preview":
        yield from (
            begin + option for option in list_options(key, folders) if option.startswith(last)
        )
    elif key in PATHS or last.startswith(("/", "./", "../", "~")):
        yield from (begin + path for path in paths(last))
    elif key in OF_HYDRA:
        yield from (begin + option for option in OF_HYDRA[key] if option.startswith(last))
    else:
        present: Any = settable(before, folders).get(key, False if key == "preview" else None)
        values = (
            ("true", "false")
            if isinstance(present, bool)
            else ()
            if present is None
            else (as_typed(present),)
        )
        yield from (begin + text for text in values if text.startswith(last))


def step(name: str, word: str) -> str | None:
    """Return a key from `word` on to its next `.`, or with `=`; None where it begins otherwise."""
    if not name.startswith(word):
        return None
    dot = name.find(".", len(word))
    return f"{name}=" if dot < 0 else name[: dot + 1]


def settable(before: list[str], folders: list[Path]) -> dict[str, Any]:
    """Return the keys that exist beside the options that are chosen in `before`, with their values
    as yaml has them."""
    given = {
        key.lstrip("+~"): value
        for key, equals, value in (text.partition("=") for text in before)
        if equals
    }
    chosen = defaults(folders[-1]) | {
        group: option for group, option in given.items() if "." not in group
    }
    preset, _ = load(folders, "experiment", given.get("experiment", ""))
    for entry in preset.get("defaults", ()):
        for name, option in entry.items() if isinstance(entry, dict) else ():
            group = name.removeprefix("override /")
            chosen[group] = given.get(group, str(option))
    main = read(folders[-1] / "config.yaml")
    keys = dict(
        leaves({key: value for key, value in main.items() if key not in ("defaults", "hydra")})
    )
    for group in list_groups(folders):
        option, whole = load(folders, group, str(chosen.get(group, "")).split(",")[0])
        keys |= leaves(option, "" if whole else f"{group}.")
    return keys | dict(leaves(preset))


def load(folders: list[Path], group: str, name: str) -> tuple[dict[str, Any], bool]:
    """Load (an option with those that it builds on, whether its keys are at the top); empty where
    there is none."""
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
    """Read a mapping; empty where the file is none: completion is no place for complaints."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that a user may set."""
    for key, value in node.items():
        if key in ("_target_", "defaults"):
            continue
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_typed(value: object) -> str:
    """Return a value as typed, empty where the shell would interpret it: only plain values are
    worth offering."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"[{text}]" if isinstance(value, list) else "" if "$" in text else text


def paths(begin: str) -> Iterator[str]:
    """Yield files and, with a slash, directories; hidden ones where a dot is typed."""
    folder, _, name = begin.rpartition("/")
    place = Path(f"{folder}/" if "/" in begin else ".").expanduser()
    try:
        entries = list(os.scandir(place))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith(".")):
            yield f"{begin[: len(begin) - len(name)]}{entry.name}{'/' if entry.is_dir() else ''}"
