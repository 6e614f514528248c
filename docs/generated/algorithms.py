"""A page for each algorithm."""

import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from omegaconf import OmegaConf

from fedexp.algorithms.base import FedAvg
from fedexp.config.options import list_options
from fedexp.config.values import make_target
from fedexp.core.limits import without_none

from .names import algorithm_file, methods, sweeps, title
from .text import (
    CONF,
    CONFS,
    ROOT,
    cell,
    comments,
    description,
    from_docstring,
    prose,
    table,
    yaml_comments,
)


def algorithms() -> list[str]:
    return list_options("algorithm", CONFS)


def builds_on(name: str) -> str | None:
    """Return the option on which a variant, such as a centralised counterpart, builds."""
    node = yaml.safe_load(algorithm_file(name).read_text(encoding="utf-8"))
    return next((base for base in node.get("defaults", ()) if base != "_self_"), None)


@cache
def algorithm(name: str) -> FedAvg:
    """Return an algorithm with the defaults of its yaml file."""
    return make_target(read_option(algorithm_file(name)), "algorithm", FedAvg)


def read_option(path: Path) -> dict[str, Any]:
    """Return the content of an option's file, merged with the options in its defaults list.

    Values that depend on the local optimizer are those for SGD.
    """
    root = OmegaConf.create({"local": {"optimizer": "sgd"}, "option": OmegaConf.load(path)})
    node: Any = OmegaConf.to_container(root.option, resolve=True)
    before: dict[str, Any] = {}
    for name in node.pop("defaults", ()):
        before |= {} if name == "_self_" else read_option(path.with_name(f"{name}.yaml"))
    return before | node


def field_comments(schema: type) -> dict[str, str]:
    """Map each field of a dataclass and its bases to the comment behind it."""
    found: dict[str, str] = {}
    for base in reversed([b for b in schema.__mro__ if dataclasses.is_dataclass(b)]):
        source = inspect.getsource(base)
        found |= dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", source, re.MULTILINE))
    return found


def allowed_values(annotation: Any) -> str:
    """Return what the annotation of a field allows, in the words of the error message."""
    kind, optional = without_none(annotation)
    if get_origin(kind) is Literal:
        words = [", ".join(str(choice) for choice in get_args(kind) if choice)]
    else:
        words = [limit.words for limit in getattr(kind, "__metadata__", ())]
    return "; ".join([*words, "or null"] if words and optional else words)


def options_table(name: str) -> str:
    """Return a table of an algorithm's keys: default, allowed values and meaning."""
    made, said = algorithm(name), yaml_comments(algorithm_file(name))
    fields = field_comments(type(made))
    lines = []
    for field in dataclasses.fields(made):
        key = field.name
        meaning = max(fields.get(key, ""), said.get(key, ""), key=len)
        lines.append(
            (
                f"`algorithm.{key}`",
                cell(getattr(made, key)),
                prose(allowed_values(field.type)),
                prose(meaning),
            )
        )
    return table(("key", "default", "allowed values", "meaning"), lines)


def restrictions(made: FedAvg) -> str:
    """Return what an algorithm does not support, although FedAvg does."""
    limits = [
        ("local.optimizer=", made.optimizers, FedAvg.optimizers),
        ("scenario=", made.scenarios, FedAvg.scenarios),
        ("", made.inputs, FedAvg.inputs),
    ]
    said = [
        f"`{key}{' or '.join(values)}`"
        for key, values, every in limits
        if set(values) != set(every)
    ]
    only = f"It works only with {'; '.join(said)}." if said else ""
    if made.own_step:
        only += f" It does not support `server.optimizer`: {made.own_step}."
    return only.strip()


def used_in(name: str) -> list[str]:
    """Return the sweeps in conf/sweep that run an algorithm."""
    return [sweep.name for sweep in sweeps() if name in methods(sweep)]


def algorithm_page(name: str) -> str:
    base, schema = builds_on(name), type(algorithm(name))
    says = description(algorithm_file(name)).rstrip(".")
    parts = [
        f"# {title(name)}",
        f"{prose(says)}.",
        f"```sh\nfedexp algorithm={name}{companions(name)}\n```",
    ]
    if base:
        parts.append(f"Apart from this, it is [{title(base)}]({base}.md).")
    else:
        module = importlib.import_module(schema.__module__)
        parts += ["## What it does", from_docstring(module.__doc__ or "")]
        # the latter is a dataclass's own
        if schema.__doc__ and not schema.__doc__.startswith(f"{schema.__name__}("):
            parts.append(from_docstring(schema.__doc__))
    parts += [
        "## Options",
        options_table(name),
        restrictions(algorithm(name)),
        prose(" ".join(comments(algorithm_file(name)))),
    ]
    if tuned := sorted((CONF / "tuned").glob(f"*_{name}.yaml")):
        parts += [
            "## Values of the papers for a data set",
            "fedexp uses these values automatically for this data set and algorithm.",
        ]
        parts += [
            f"`conf/tuned/{path.name}`:\n\n```yaml\n{path.read_text(encoding='utf-8')}```"
            for path in tuned
        ]
    if names := used_in(name):
        parts += ["## In the papers' tables", ", ".join(f"`sweep={each}`" for each in names) + "."]
    source = Path(inspect.getfile(schema)).resolve().relative_to(ROOT)
    option = algorithm_file(name).relative_to(ROOT)
    parts.append(f"Source: `{source.as_posix()}`, `{option.as_posix()}`.")
    return "\n\n".join(part for part in parts if part) + "\n"


def companions(name: str) -> str:
    """Return the options that a method needs in addition to its name."""
    made, given = algorithm(name), ""
    if made.needs_surrogate or "none" not in made.scenarios or made.paradigm == "centralized":
        given += " scenario=class_incremental partition=equal_shards"
    if made.needs_public:
        given += " public.fraction=0.025"
    return given + (" surrogate.fraction=0.2" if made.needs_surrogate else "")
