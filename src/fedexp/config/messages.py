"""Explain errors that Hydra and OmegaConf raise while they compose a configuration, in one line."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.errors import OverrideParseException

from fedexp.config.options import (
    MULTIPLE,
    conf_directories,
    known_keys,
    list_options,
)
from fedexp.config.removed import explain_removed
from fedexp.core.errors import nearest
from fedexp.core.storage import load_yaml

# "load": of an option in a list, such as tracker=[wandb,tensorbord]
OPTION = re.compile(r"Could not (?:find|load) '((?:hydra/)?[^'/]+)/([^']*)'")
KEY = re.compile(r"Could not override '([^']+)'|Key '[^']+' is not in struct\s+full_key: (\S+)")
SWEEP = re.compile(r"Ambiguous value for argument '(.+?)'\n|Sweep parameters '(.+)' requires")
HYDRAS = ("See https", "Set the env", "object_type")  # prefixes of lines that do not help users
INTERPOLATION = re.compile(r"^\w+ raised while resolving interpolation: ")


def explain(error: Exception, folders: Sequence[Path]) -> str:
    """Return the message for an error raised by Hydra, OmegaConf or yaml.

    folders: the directories with the user's config groups.
    """
    text = str(error)
    if found := OPTION.search(text):
        return explain_option(found[1], found[2], text, folders)
    if found := KEY.search(text):
        return explain_key((found[1] or found[2]).partition("@")[0], folders)
    if found := SWEEP.search(text):
        override = found[1] or found[2].split(", ")[0]
        return (
            f"{override}: several values define a sweep, which needs --multirun; a list is written"
            " in brackets"
        )
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: is not of the form key=value, or a value with brackets, quotes or"
            " characters other than letters without accents is not quoted, as in 'key=\"a;b\"'"
        )
    if text.startswith("Config group override must be a string"):
        return "a group takes the name of one of its options, such as algorithm=fedntd"
    return unreadable_file(folders) or words_of(error)


def unreadable_file(folders: Sequence[Path]) -> str | None:
    """Return the message for the user's first yaml file that cannot be read."""
    for path in sorted(path for folder in folders for path in folder.rglob("*.yaml")):
        try:
            load_yaml(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            return f"{path}: is not a valid yaml file ({' '.join(str(problem).split())})"
    return None


def words_of(error: Exception) -> str:
    """Return the first lines of an error and its cause that help users."""
    cause = error.__cause__ or error.__context__ or ""
    lines = dict.fromkeys(line.strip() for line in f"{error}\n{cause}".splitlines())
    ours = [line for line in lines if line and not line.startswith(HYDRAS)]
    return "; ".join(INTERPOLATION.sub("", line) for line in ours[:3])


def explain_option(group: str, option: str, text: str, folders: Sequence[Path]) -> str:
    """Return the message for an option that does not exist in its group.

    text: Hydra's message. It lists the options of its own groups.
    """
    if group.startswith("hydra/"):
        options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
    else:
        options = list_options(group, [*conf_directories(), *folders])
    return (
        explain_removed(f"{group}={option}")
        or f"{group}={option}: no such option{nearest(option, options)}; options:"
        f" {', '.join(options)}"
    )


def explain_key(key: str, folders: Sequence[Path]) -> str:
    """Return the message for a key that is not in the composed configuration."""
    if message := explain_removed(key):
        return message
    known = known_keys(folders)
    group, _, rest = key.partition(".")
    renamed = [each for each in known if re.fullmatch(rf"{group}\.\w+\.{re.escape(rest)}", each)]
    if group in MULTIPLE and key not in known and renamed:
        return f"{key}: is now written with the name of the option: {' or '.join(renamed)}"
    if key.startswith("surrogate.options"):
        return f"{key}: this mapping accepts new keys, so write it with a plus: +{key}=<value>"
    if owners := known.get(key):
        return f"{key}: only exists with {' or '.join(owners)}"
    if key in known:
        parent = key.rpartition(".")[0]
        hint = "; figures.draw=false turns figures off" if parent == "figures" else ""
        return f"{key}: cannot be combined with {parent}=<value>{hint}"
    meant = find_meant_key(key, known)
    hint = f" (nearest: '{meant}')" if meant else nearest(key, known)
    return f"{key}: no such option or key{hint}; `fedexp --cfg job` lists the keys"


def find_meant_key(key: str, known: Mapping[str, list[str]]) -> str | None:
    """Return a known key whose last word is the given key, or None if no key matches.

    For example, `clients` matches num_clients, and `lr` matches local.lr. Keys that every run has
    are preferred.
    """
    own = [name for name in known if "." not in name and name.endswith(f"_{key}")]
    inside = [name for name in known if name.rpartition(".")[2] == key]
    return next(iter(sorted([*own, *inside], key=lambda name: bool(known[name]))), None)
