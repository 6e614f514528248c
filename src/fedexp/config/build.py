"""Config node -> checked object; the only place that instantiates what a configuration names.

The dataclass behind a node's `_target_` is its schema: unknown keys, wrong types and values out of range are
collected over the whole configuration and raised as one ConfigError.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedexp.config.cohorts import SAMPLED, Cohorts
from fedexp.config.named import OPTIONS, with_named_datasets
from fedexp.config.trust import require_trusted
from fedexp.core.errors import ConfigError, collecting, nearest
from fedexp.core.settings import LocalTraining, Public, Seeds, Settings
from fedexp.data.surrogate import Surrogate

T = TypeVar("T")

# What an option of each group is asked for at least: a class of another group must not take its place.
PROMISES = {
    "dataset": ("load", "kind", "name", "augmentation"),
    "scenario": ("stream", "name", "rounds_per_task"),
    "partition": ("split", "numbers_all"),
    "model": ("build", "reads", "vectorises", "mixes_examples"),
    "algorithm": ("aggregate", "needs", "paradigm", "scenarios"),
    "forgetting_metric": ("round_values", "needs_local"),
    "hardware": ("resolve",),
    "tracker": ("create",),
}
GROUPS = tuple(PROMISES)
KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


@dataclasses.dataclass(frozen=True)
class Built:
    """The checked parts of a configuration; nothing has been loaded or started yet."""

    settings: Settings
    seeds: Seeds
    local: LocalTraining
    public: Public
    surrogate: Surrogate
    groups: Mapping[str, Any]  # group -> object
    cohorts: Cohorts = SAMPLED


def build(config: DictConfig) -> Built:
    """Check the whole configuration; raise one ConfigError that lists everything that is wrong with it."""
    values = resolve(config)
    errors: list[str] = []
    parts = {
        "seeds": (Seeds, "seeds."),
        "local": (LocalTraining, "local."),
        "public": (Public, "public."),
        "surrogate": (Surrogate, "surrogate."),
        "cohorts": (Cohorts, "cohorts."),
    }
    made: dict[str, Any] = {}
    for name, (schema, prefix) in parts.items():
        made[name] = _attempt(errors, lambda s=schema, n=name, p=prefix: make(s, values.get(n, {}), p))
    own = {k: v for k, v in values.items() if k not in (*parts, *GROUPS, *partition_keys(values), "expected")}
    made["settings"] = _attempt(errors, lambda: make(Settings, own, ""))
    groups = {}
    for group in GROUPS:
        groups[group] = _attempt(errors, lambda g=group: make_option(g, values.get(g), g))
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    return Built(groups=groups, **made)


def partition_keys(values: Mapping[str, Any]) -> set[str]:
    """Return the top-level keys that a partition brings along (alpha, min_size): those that are also fields of its
    node."""
    node = values.get("partition")
    return set(node) - {f.name for f in dataclasses.fields(Settings)} if isinstance(node, dict) else set()


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain containers with all interpolations resolved, and data sets in place of their
    names."""
    try:
        config = with_named_datasets(config)
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}") from error
    assert isinstance(values, dict)
    return {str(k): v for k, v in values.items()}


def _attempt(errors: list[str], action: Any) -> Any:
    try:
        return action()
    except ConfigError as error:
        errors.append(str(error))
        return None


def make_option(group: str, node: Any, key: str) -> Any:
    """Build the object that an option of a group stands for."""
    made = make_target(node, key)
    if missing := [name for name in PROMISES[group] if not hasattr(made, name)]:
        raise ConfigError(f"{key}._target_={node['_target_']}: is no {group}, it has no {missing[0]}")
    return made


def make_target(node: Any, key: str) -> Any:
    """Build the dataclass that `node._target_` names, its nested nodes first."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{key}: must be one of the group's options (a node with _target_), got {node!r}")
    schema = find_class(node["_target_"], f"{key}._target_")
    return make(schema, {k: v for k, v in node.items() if k != "_target_"}, f"{key}.")


def find_class(name: str, key: str) -> type:
    """Return the dataclass at a dotted path."""
    require_trusted(str(name), key)
    module_name, _, class_name = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={name}: cannot be imported ({error})") from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"{key}={name}: must be a dataclass")
    return found


def make(schema: type[T], values: Mapping[str, Any], prefix: str) -> T:
    """Make an instance of a dataclass from plain values, each checked against its annotation."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.')}={values}: must be a node with keys of its own")
    fields = {f.name: f for f in dataclasses.fields(schema) if f.init}  # type: ignore[arg-type]
    errors, converted = [], {}
    for name in values.keys() - fields.keys():
        errors.append(f"{prefix}{name}: no such key{nearest(name, fields)}; known: {', '.join(fields) or 'none'}")
    for name, field in fields.items():
        if name in values:
            outcome = _attempt(errors, lambda n=name, f=field: convert(f.type, values[n], f"{prefix}{n}"))
            converted[name] = outcome
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            errors.append(f"{prefix}{name}: is missing")
    if errors:
        raise ConfigError("\n".join(errors))
    with collecting():
        return schema(**converted)
    raise AssertionError("unreachable: collecting raises what it swallows")


def convert(annotation: Any, value: Any, key: str) -> Any:
    """Convert a value to the type that its annotation asks for, by OmegaConf's rules ("0.1" is a number, 1.5 no
    integer)."""
    if isinstance(value, dict) and "_target_" in value:
        return make_target(value, key)
    if isinstance(value, list) and any(isinstance(item, dict) and "_target_" in item for item in value):
        return [make_target(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if dataclasses.is_dataclass(annotation):
        raise ConfigError(f"{key}={value}: must be a node with _target_")
    if annotation is Any:
        return value
    if annotation is str and isinstance(value, bool | int | float):
        return str(value)
    try:
        result = value if type(value) is annotation else converted_by_omegaconf(annotation, value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={value}: must be {describe(annotation)}") from error
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in numbers_in(result)):
        raise ConfigError(f"{key}={value}: must be {describe(annotation)} of at most 64 bits")
    return tuple(result) if str(annotation).startswith("tuple") and result is not None else result


def converted_by_omegaconf(annotation: Any, value: Any) -> Any:
    node = OmegaConf.structured(holder_of(annotation))
    node.value = value
    return OmegaConf.to_container(node)["value"]  # type: ignore[index,call-overload]


@functools.cache
def holder_of(annotation: Any) -> type:
    return dataclasses.make_dataclass("Holder", [("value", annotation)])


def numbers_in(value: Any) -> list[Any]:
    """Yield the scalars of nested lists."""
    return [each for item in value for each in numbers_in(item)] if isinstance(value, list) else [value]


def describe(annotation: Any) -> str:
    """Describe a type in words."""
    if annotation in KINDS:
        return KINDS[annotation]
    parts = [part for part in getattr(annotation, "__args__", ()) if part is not Ellipsis]
    optional = type(None) in parts
    names = [describe(part) for part in parts if part is not type(None)]
    origin = getattr(annotation, "__origin__", None)
    if origin is dict:
        return OPTIONS
    if origin in (list, tuple):
        return f"a list of values that are each {names[0]}"
    text = " or ".join(names) or str(annotation)
    return f"{text}, or null" if optional else text
