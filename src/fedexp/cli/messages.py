"""Translate errors raised by Hydra and OmegaConf into messages for users.

A message says what is wrong, where, and what is allowed.
"""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import yaml

from fedexp.cli.removed import explain_removed
from fedexp.config.options import ONE_OPTION, known_keys, list_groups, list_options
from fedexp.core.errors import nearest

# the characters that Hydra's grammar allows outside of quotes
UNQUOTED = re.compile(r"""[\w\s/\\+.$%*@?|,:=(){}\[\]'"-]""", re.ASCII)
HYDRAS = ("See https", "Set the env", "object_type")  # prefixes of lines that do not help users
INTERPOLATION = re.compile(r"^\w+ raised while resolving interpolation: ")


def explain(error: Exception, conf: Path, extra: list[Path]) -> str:
    """Return the message for an error raised while composing the configuration."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError | RecursionError | yaml.YAMLError):
        for path in sorted(path for folder in extra for path in folder.rglob("*.yaml")):
            try:
                yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
                return f"{path}: is not a valid yaml file ({' '.join(str(problem).split())})"
    for pattern, message in MESSAGES.items():
        if found := re.search(pattern, text):
            return message(found, conf, extra)
    if override := getattr(error, "override", None):
        return (
            f"{override}: is not of the form"
            f" key=value{explain_syntax(override, text.splitlines()[0])}"
        )
    cause = error.__cause__ or error.__context__ or ""
    lines = dict.fromkeys(line.strip() for line in f"{text}\n{cause}".splitlines())
    ours = [line for line in lines if line and not line.startswith(HYDRAS)]
    return "; ".join(INTERPOLATION.sub("", line) for line in ours[:3])


def explain_option(found: re.Match[str], conf: Path, extra: list[Path]) -> str:
    """Return the message for an option that does not exist in its group.

    The options of hydra/ groups are read from Hydra's message.
    """
    group, option = found[1], found[2]
    if group in ("hydra/launcher", "hydra/sweeper"):
        options = ["basic", *list_options(group.removeprefix("hydra/"), [conf])]
    elif group.startswith("hydra/"):
        options = re.findall(r"^\t(\S+)$", found.string, re.MULTILINE)
    else:
        options = list_options(group, [conf, *extra])
    hint = nearest(option, options)
    return (
        explain_removed(f"{group}={option}")
        or f"{group}={option}: no such option{hint}; options: {', '.join(options)}"
    )


def explain_group_value(found: re.Match[str], conf: Path, extra: list[Path]) -> str:
    """Return the message for a group whose value is not the name of an option."""
    return f"{ONE_OPTION}; groups: {', '.join(list_groups([conf, *extra]))}"


def explain_several(found: re.Match[str], conf: Path, extra: list[Path]) -> str:
    """Return the message for comma-separated values that are given without `--multirun`.

    The user may have meant a list.
    """
    override = found[1] or found[2].split(", ")[0]
    key, _, value = override.partition("=")
    a_list = ""
    if found[1] and key not in list_groups([conf, *extra]):
        a_list = f"; to pass a list, write {key}=[{value}]"
    return (
        f"{override}: several values define a sweep, which needs --multirun: fedexp --multirun"
        f" {override}{a_list}"
    )


def explain_syntax(override: str, problem: str) -> str:
    """Return why Hydra's parser cannot read an argument.

    Hydra's message is returned unless it uses terms from Hydra's grammar.
    """
    if "=" not in override:
        return ""
    if re.search("LexerNoViableAlt|no viable alternative|mismatched input|Error parsing", problem):
        value = override.partition("=")[2]
        if strange := next((letter for letter in value if not UNQUOTED.match(letter)), None):
            return (
                f" (the character {strange} needs quotes around the value, as in"
                f" 'key=\"a{strange}b\"')"
            )
        return " (a bracket or quote is not closed)"
    return f" ({problem})"


def explain_key(found: re.Match[str], conf: Path, extra: list[Path]) -> str:
    """Return the message for a key that is not in the composed configuration."""
    key = found[1].split("@")[0]
    if message := explain_removed(key):
        return message
    if key == "launcher":
        return "launcher: must be written as hydra/launcher"
    known = known_keys(conf, extra)
    if owners := known.get(key):
        return f"{key}: only exists with {' or '.join(owners)}"
    if key in known:
        parent = key.rpartition(".")[0]
        hint = "; figures.draw=false turns figures off" if parent == "figures" else ""
        return f"{key}: cannot be combined with {parent}=<value>{hint}"
    meant = find_meant_key(key, known)
    hint = f" (nearest: '{meant}')" if meant else nearest(key, known)
    return f"{key}: no such option or key{hint}; `fedexp --help` lists them"


def explain_flag(written: str, flags: Collection[str], conf: Path) -> str:
    """Return the message for an unknown flag.

    The flag may be misspelt, or may be a key written with dashes.
    """
    flag, _, value = written.partition("=")
    key, known = flag.lstrip("-").replace("-", "_"), known_keys(conf, [])
    if found := key if key in known else find_meant_key(key, known):
        return f"{written}: must be written without dashes: {found}={value or '<value>'}"
    return f"{flag}: no such flag{nearest(flag, flags)}; `fedexp --hydra-help` lists them"


def find_meant_key(key: str, known: Mapping[str, list[str]]) -> str | None:
    """Return a known key whose last word is the given key, or None if no key matches.

    For example, `clients` matches num_clients, and `lr` matches local.lr. Keys that every run has
    are preferred.
    """
    own = [name for name in known if "." not in name and name.endswith(f"_{key}")]
    inside = [name for name in known if name.rpartition(".")[2] == key]
    return next(iter(sorted([*own, *inside], key=lambda name: bool(known[name]))), None)


# pattern of Hydra's or OmegaConf's message -> function that returns fedexp's message
MESSAGES: dict[str, Callable[[re.Match[str], Path, list[Path]], str]] = {
    r"Could not find '((?:hydra/)?[^'/]+)/([^']+)'": explain_option,
    r"Could not override '([^']+)'": explain_key,
    r"Key '[^']+' is not in struct\s+full_key: (\S+)": explain_key,
    r"^Config group override must be a string": explain_group_value,
    r"Ambiguous value for argument '(.+?)'\n|Sweep parameters '(.+)' requires": explain_several,
}
