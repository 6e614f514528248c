"""Resolve the values of a configuration and make checked objects from them.

The dataclass named in a node's `_target_` is the node's schema. It is imported and called, so a run
directory from another person could run any code. Classes of fedexp and its neighbours are always
allowed. The package of any other class must be named by a `_target_` in a yaml file of a directory
that the command line gives with --config-dir.
"""

import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedexp.config.named import (
    OPTIONS,
    search_path,
    with_named_datasets,
    with_schedule,
    without_presets,
)
from fedexp.config.options import add_resolver, conf_directories
from fedexp.config.overrides import leaves
from fedexp.config.settings import GLOBAL, OWN, PERSONAL
from fedexp.core import storage
from fedexp.core.errors import ConfigError, collecting, nearest, require
from fedexp.core.limits import without_limits
from fedexp.rundir.identity import flatten

T = TypeVar("T")

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# `${fedexp.for_sgd:optimizer,value,others}` is a default that depends on the local optimizer.
add_resolver(
    "fedexp.for_sgd",
    lambda optimizer, value, others: value if optimizer in ("sgd", "nesterov") else others,
)
KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def make_group(node: object, group: str, annotation: Any) -> Any:
    """Make the option of a group, or a list if a run may have several of its options.

    annotation: the base class of the options, or `list[base class]`. Raises ConfigError for invalid
    values.
    """
    if get_origin(annotation) is not list:
        return make_target(node, group, annotation)
    (base,) = get_args(annotation)
    if not isinstance(node, dict) or "_target_" in node:
        raise ConfigError(
            f"{group}: must map names of options to nodes; the first line of an option's file must"
            f" be `# @package {group}.<name of the option>`"
        )
    errors: list[str] = []
    made = [
        attempt(errors, make_target, each, f"{group}.{key}", base) for key, each in node.items()
    ]
    if errors:
        raise ConfigError("\n".join(errors))
    return made


def deduplicate(errors: list[str], config: DictConfig) -> list[str]:
    """Return the error lines without repetitions.

    If the value of a key refers to another key that has an error, as `seeds.*` refer to `seed`,
    only the error of the other key is kept.
    """
    lines = dict.fromkeys("\n".join(errors).splitlines())
    wrong = {line.partition("=")[0] for line in lines}
    written = flatten(OmegaConf.to_container(config, resolve=False))

    def follows_another(line: str) -> bool:
        found = REFERENCE.fullmatch(str(written.get(line.partition("=")[0])))
        return found is not None and found[1] in wrong

    return [line for line in lines if not follows_another(line)]


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain containers with all interpolations resolved.

    Names of data sets are replaced with nodes. Raises ConfigError if a value cannot be resolved.
    """
    try:
        config = with_named_datasets(without_presets(config))
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        assert isinstance(values, dict)
        found = with_schedule({str(k): v for k, v in values.items()})
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}"
        ) from error
    if isinstance(word := found.get("evaluate"), str):
        # the global model is always tested
        found["evaluate"] = [GLOBAL, word] if word in (PERSONAL, OWN) else [word]
    return found


def attempt(errors: list[str], action: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return action(*arguments)
    except ConfigError as error:
        errors.append(str(error))
        return None


def make_target(node: object, key: str, base: type[T]) -> T:
    """Make an object of the dataclass named in `node._target_`, including nested objects.

    Raises ConfigError unless the class derives from `base` and all values are valid.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(
            f"{key}: must be one of the group's options (a node with _target_), got {node!r}"
        )
    schema = find_class(node["_target_"], f"{key}._target_")
    if not issubclass(schema, base):
        required = f"{base.__module__}.{base.__qualname__}"
        raise ConfigError(
            f"{key}._target_={node['_target_']}: must be {required} or a class that derives from it"
        )
    if missing := getattr(schema, "__abstractmethods__", None):
        raise ConfigError(
            f"{key}._target_={node['_target_']}: does not define {', '.join(sorted(missing))}"
        )
    return make(schema, {k: v for k, v in node.items() if k != "_target_"}, f"{key}.")


def make(schema: type[T], values: Mapping[str, Any], prefix: str) -> T:
    """Make an object of a dataclass from plain values and check each value.

    Values are converted to the types of the fields. Raises ConfigError for unknown, missing or
    invalid values.
    """
    fields = {f.name: f for f in dataclasses.fields(schema) if f.init}  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        keys = ", ".join(f"{prefix}{name}" for name in fields)
        raise ConfigError(f"{prefix.rstrip('.')}={values}: must be a node with the keys {keys}")
    errors, converted = [], {}
    for name in values.keys() - fields.keys():
        errors.append(
            f"{prefix}{name}: no such key{nearest(name, fields)}; known:"
            f" {', '.join(fields) or 'none'}"
        )
    for name, field in fields.items():
        if name in values:
            outcome = attempt(errors, convert, field.type, values[name], f"{prefix}{name}")
            converted[name] = outcome
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            errors.append(f"{prefix}{name}: is missing")
    if errors:
        raise ConfigError("\n".join(errors))
    try:
        with collecting():
            made = schema(**converted)
    except ConfigError as error:
        # a class of a group that may have several options does not know the name of its option
        lines = str(error).splitlines()
        own = getattr(schema, "prefix", prefix)
        if own and prefix.startswith(own):
            lines = [prefix + line[len(own) :] if line.startswith(own) else line for line in lines]
        raise ConfigError("\n".join(lines)) from error
    # A user's class may allow infinite values, but config.yaml could not be read back with them.
    for name, value in converted.items():
        finite = not any(
            isinstance(number, float) and not math.isfinite(number)
            for number in scalars_in([values[name], value])  # also if a string was made of it
        )
        require(finite, f"{prefix}{name}", value, "finite")
    return made


def convert(annotation: Any, value: Any, key: str) -> Any:
    """Convert a value to the annotated type by OmegaConf's rules.

    For example, "0.1" is accepted as a number and 1.5 is not accepted as an integer.
    """
    annotation = without_limits(annotation)
    if base := dataclass_in(annotation):
        return convert_part(annotation, base, value, key)
    if annotation is Any:
        return value
    if value is None and type(None) in get_args(annotation):
        return None  # as OmegaConf would, which takes 0.2 ms
    if annotation is str and isinstance(value, bool | int | float):
        return str(value)
    if annotation is bool and value not in (True, False) and isinstance(value, int | float):
        # OmegaConf would convert any number to a bool
        raise ConfigError(f"{key}={value}: must be {describe_type(annotation)}")
    try:
        result = value if type(value) is annotation else converted_by_omegaconf(annotation, value)
    except OmegaConfBaseException as error:
        alone = not isinstance(value, list) and attempt([], convert, annotation, [value], key)
        hint = f", such as [{value}]" if alone else ""
        raise ConfigError(f"{key}={value}: must be {describe_type(annotation)}{hint}") from error
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in scalars_in(result)):
        raise ConfigError(f"{key}={value}: must be {describe_type(annotation)} of at most 64 bits")
    return tuple(result) if str(annotation).startswith("tuple") and result is not None else result


def dataclass_in(annotation: Any) -> type | None:
    """Return the dataclass that an annotation contains, or None if it contains no dataclass.

    For example, return `A` for the annotations `A`, `list[A]` and `A | None`.
    """
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    return next(filter(None, map(dataclass_in, get_args(annotation))), None)


def convert_part(annotation: Any, base: type, value: object, key: str) -> Any:
    """Make an object from a node with _target_, or a list of objects from a list of nodes.

    base: the dataclass in the annotation. The classes of the objects must derive from it.
    """
    if get_origin(annotation) is list and isinstance(value, list):
        return [convert_part(base, base, item, f"{key}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and "_target_" in value:
        return make_target(value, key, base)
    if value is None and type(None) in get_args(annotation):
        return None
    raise ConfigError(f"{key}={value}: must be {describe_type(annotation)}")


def converted_by_omegaconf(annotation: Any, value: object) -> Any:
    node = OmegaConf.structured(holder_of(annotation))
    OmegaConf.update(node, "value", value, merge=False)
    return OmegaConf.to_container(node)["value"]  # type: ignore[index,call-overload]


@functools.cache
def holder_of(annotation: Any) -> type:
    return dataclasses.make_dataclass("Holder", [("value", annotation)])


def scalars_in(value: object) -> list[Any]:
    """Return the scalars of nested lists and mappings."""
    items = list(value.values()) if isinstance(value, dict) else value
    return (
        [each for item in items for each in scalars_in(item)]
        if isinstance(items, list | tuple)
        else [items]
    )


def describe_type(annotation: Any) -> str:
    """Describe an annotation in words, for messages."""
    if words := KINDS.get(annotation) or getattr(annotation, "in_words", None):
        return str(words)
    if dataclasses.is_dataclass(annotation):
        return "a node with _target_"
    parts = [part for part in get_args(annotation) if part is not Ellipsis]
    optional = type(None) in parts
    names = [describe_type(part) for part in parts if part is not type(None)]
    origin = get_origin(annotation)
    if origin is dict:
        return OPTIONS if str in parts else "a mapping from {} to {}".format(*names)
    if origin in (list, tuple):
        return f"a list of values, each {names[0]}"
    text = " or ".join(names) or str(annotation)
    return f"{text}, or null" if optional else text


def find_class(name: str, key: str) -> type:
    """Return the dataclass at a dotted path.

    Raises ConfigError if the class is not trusted, cannot be imported, or is not a dataclass.
    """
    if not is_trusted(name):
        raise ConfigError(
            f"{key}={name}: is not a fedexp class; name your own class in a yaml file, and pass"
            " the file's directory with --config-dir (in Python config_dir=), as in"
            " docs/guide/your_own_parts.md"
        )
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ConfigError:  # what a class declares is wrong
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}={name}: cannot be imported ({error}); PYTHONPATH=. finds packages in the"
            " current directory"
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"{key}={name}: must be a dataclass")
    return found


def is_trusted(name: str) -> bool:
    """Return whether a class may be instantiated, which runs code of its package."""
    if is_of_fedexp(name):
        return True
    package = name.partition(".")[0]
    files = (path for own in user_folders() for path in sorted(own.rglob("*.yaml")))
    return any(package == named.partition(".")[0] for path in files for named in targets_in(path))


def is_of_fedexp(name: str) -> bool:
    """Return whether a module or class belongs to fedexp or its neighbours `fedexp_*`."""
    package = name.partition(".")[0]
    return package == "fedexp" or package.startswith("fedexp_")


def user_folders() -> list[Path]:
    """Return the directories that the user gave with --config-dir."""
    own = {each.resolve() for each in conf_directories()}
    return [each for each in search_path() if each.resolve() not in own]


def targets_in(path: Path) -> Iterator[str]:
    """Yield every `_target_` in a yaml file. Hydra reports a file that cannot be read."""
    with suppress(ConfigError):
        for key, text in leaves(storage.read_values(path)):
            if key.rpartition(".")[2] == "_target_":
                yield str(text)
