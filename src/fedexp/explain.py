"""Hydra's and OmegaConf's errors in the words of a fedexp user: what, where, allowed, nearest valid name."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from fedexp.errors import nearest

PRESETS = ("experiment", "launcher", "sweep", "tuned")  # folders of conf/ whose options bring no keys of their own
ONE_OPTION = "a group takes the name of one of its options, such as algorithm=fedntd"
INTERPOLATION = re.compile(r"^\w+ raised while resolving interpolation: ")
GLOBAL_OPTION = re.compile(r"^# @package _global_", re.MULTILINE)


def explain(error: Exception, conf: Path, extra: list[Path]) -> str:
    """One message for an error that was raised while composing the configuration."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError | RecursionError | yaml.YAMLError):
        for path in sorted(path for folder in extra for path in folder.rglob("*.yaml")):
            try:
                yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
                return f"{path}: is not a yaml file ({' '.join(str(problem).split())})"
    if found := re.search(r"Could not find 'hydra/launcher/([^']+)'", text):
        name, options = found[1], ["basic", *list_options("launcher", [conf])]
        return f"hydra/launcher={name}: no such launcher{nearest(name, options)}; launchers: {', '.join(options)}"
    if found := re.search(r"Could not find '([^'/]+)/([^']+)'", text):
        group, option = found.groups()
        options = list_options(group, [conf, *extra])
        return f"{group}={option}: no such option{nearest(option, options)}; options: {', '.join(options)}"
    if found := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(found.group(1).split("@")[0], conf, extra)
    if found := re.search(r"Key '([^']+)' is not in struct\s+full_key: (\S+)", text):
        return unknown_key(found.group(2), conf, extra)
    if text.startswith("Config group override must be a string"):
        return f"{ONE_OPTION}; groups: {', '.join(list_groups([conf, *extra]))}"
    if override := getattr(error, "override", None):
        return f"{override}: not of the form key=value{in_words(override, text.splitlines()[0])}"
    cause = error.__cause__ or error.__context__
    lines = [line.strip() for line in [*text.splitlines(), *str(cause or "").splitlines()] if line.strip()]
    unique = [line for line in dict.fromkeys(lines) if not line.startswith(("See https", "Set the env", "object_type"))]
    return "; ".join(INTERPOLATION.sub("", line) for line in unique[:3])


def in_words(override: str, problem: str) -> str:
    """What is wrong with an argument that Hydra's parser cannot read; of its own words those that a user can read."""
    if "=" not in override:
        return ""
    if re.search("LexerNoViableAlt|no viable alternative|mismatched input|Error parsing", problem):
        return " (a bracket or quote is open, or a character needs quotes, as in 'key=\"a;b\"')"
    return f" ({problem})"


def unknown_key(key: str, conf: Path, extra: list[Path]) -> str:
    """For a key that the composed configuration lacks."""
    if key == "launcher":
        return "launcher: is hydra/launcher"
    known = known_keys(conf, extra)
    if owners := known.get(key):
        return f"{key}: only exists with {' or '.join(owners)}"
    return f"{key}: no such option or key{nearest(key, known)}; `fedexp --help` lists them"


def list_groups(directories: list[Path]) -> list[str]:
    """Config groups, in the order of the defaults list where they are in it."""
    names = {p.name for directory in directories if directory.is_dir() for p in directory.iterdir() if p.is_dir()}
    order = ("dataset", "scenario", "partition", "model", "algorithm", "forgetting_metric", "hardware", "tracker")
    return [name for name in order if name in names] + sorted(names - {*order, *PRESETS, "__pycache__", "hydra"})


def list_options(group: str, directories: list[Path]) -> list[str]:
    """Also those in folders of the group, such as `fedntd/cifar10_s2` of `experiment`."""
    folders = [directory / group for directory in directories]
    return sorted({path.relative_to(f).with_suffix("").as_posix() for f in folders for path in f.rglob("*.yaml")})


def known_keys(conf: Path, extra: list[Path]) -> dict[str, list[str]]:
    """Everything that a user may write left of `=`, with the options (`group=option`) that bring it along."""
    from omegaconf import DictConfig, OmegaConf

    def walk(node: DictConfig, prefix: str) -> Iterator[str]:
        for name in map(str, node):
            yield f"{prefix}{name}"
            child = node._get_node(name)
            if isinstance(child, DictConfig) and not child._is_interpolation() and not child._is_none():
                yield from walk(child, f"{prefix}{name}.")

    main = OmegaConf.load(conf / "config.yaml")
    assert isinstance(main, DictConfig)
    keys: dict[str, list[str]] = {key: [] for key in walk(main, "") if not key.startswith(("hydra", "defaults"))}
    keys |= {"sweep": [], "preview": []}
    for group in list_groups([conf, *extra]):
        keys[group] = []
        for path in sorted(path for directory in (conf, *extra) for path in (directory / group).glob("*.yaml")):
            option = OmegaConf.load(path)
            assert isinstance(option, DictConfig)
            whole = GLOBAL_OPTION.search(path.read_text(encoding="utf-8"))
            for key in walk(option, "" if whole else f"{group}."):
                if key.split(".")[-1] != "defaults" and not (key in keys and not keys[key]):
                    keys.setdefault(key, []).append(f"{group}={path.stem}")
    return keys
