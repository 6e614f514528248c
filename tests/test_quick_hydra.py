"""What quick_hydra composes for the tests is what Hydra composes, node by node."""

import functools
from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

import quick_hydra
from test_build import NEEDED, TOGETHER
from toy_federation import CONF

FEW = [
    ["algorithm=fedntd", "partition=lda", "alpha=0.1"],
    ["experiment=fedntd/cifar100_iid", "hydra.run.dir=x", "hydra.verbose=true"],
    ["algorithm=fedavk"],
    ["rounds=[", "seed=1"],
]


def every_group() -> list[list[str]]:
    """Some command lines that together name many options of every group."""
    return [
        [f"{group}={option}" for group, option in chosen.items()]
        + [more for option in chosen.values() for more in NEEDED.get(option, [])]
        for chosen in TOGETHER[::3]
    ]


def described(node: Any, key: str = "") -> dict[str, Any]:
    """Types, flags, order and values of a node and all that is in it."""
    about = node._metadata
    own = [
        type(node).__name__,
        about.flags,
        str(about.ref_type),
        str(about.object_type),
        about.optional,
        about.key,
    ]
    if not isinstance(node, DictConfig | ListConfig) or isinstance(node._content, str | None):
        return {key: [*own, node._value()]}
    keys = list(node._content) if isinstance(node, DictConfig) else list(range(len(node._content)))
    found = {key: [*own, keys]}
    for name in keys:
        child = node._content[name]
        assert child._parent is node
        found |= described(child, f"{key}.{name}")
    return found


def composed(lines: list[list[str]]) -> list[Any]:
    results: list[Any] = []
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().hydra.config_loader
        load = functools.partial(loader.load_configuration, "config")
        for mode in (RunMode.RUN, RunMode.MULTIRUN):
            for line in lines:
                try:
                    results.append(described(load(line, mode)))
                except (HydraException, OmegaConfBaseException) as error:
                    results.append(f"{type(error).__name__}: {error}")
    return results


@pytest.mark.parametrize(
    "lines", [FEW, pytest.param(every_group(), marks=pytest.mark.slow)], ids=["few", "every"]
)
def test_compositions_are_those_of_hydra(lines, monkeypatch):
    first, again = composed(lines), composed(lines)
    # in both modes, but for bad command lines
    assert sum(isinstance(each, dict) for each in first) >= len(lines)
    monkeypatch.setattr(ConfigRepository, "load_config", quick_hydra.load_config)
    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", quick_hydra.compose)
    monkeypatch.setattr(DictConfig, "__deepcopy__", quick_hydra.deepcopy)
    expected = composed(lines)
    assert first == expected
    assert again == expected
