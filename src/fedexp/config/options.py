"""The groups, options and keys of conf/ and of the user's own directories."""

import re
from collections.abc import Iterator
from pathlib import Path

from fedexp.core.errors import ConfigError

PRESETS = ("experiment", "launcher", "sweep", "tuned")  # folders of conf/ whose options bring no keys of their own
ONE_OPTION = "a group takes the name of one of its options, such as algorithm=fedntd"
GLOBAL_OPTION = re.compile(r"^# @package _global_", re.MULTILINE)


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
    keys |= {"sweep": [], "preview": [], "budget": []}
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


def conf_directory() -> Path:
    """conf/ inside the installed package, else the checkout's."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parents[1] / "conf"):
        if (candidate / "config.yaml").exists():
            return candidate
    raise ConfigError(f"conf/config.yaml: not found beside {package} or in its checkout; install fedexp again")
