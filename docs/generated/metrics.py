"""The formulas of the metrics, the options of their group, and what `fedexp --help` prints."""

import importlib
import inspect

import yaml

from fedexp.config.options import list_options
from fedexp.config.trust import find_class

from .text import CONF, comments, description, from_docstring, prose, yaml_comments


def functions(module_name: str) -> str:
    """The public functions of a module: signature and docstring."""
    module = importlib.import_module(module_name)
    parts = [from_docstring(module.__doc__ or "")]
    for name, function in vars(module).items():
        if (
            inspect.isfunction(function)
            and function.__module__ == module_name
            and not name.startswith("_")
        ):
            parts += [f"### `{name}`", f"```python\n{name}{inspect.signature(function)}\n```"]
            parts.append(from_docstring(function.__doc__ or ""))
    return "\n\n".join(parts)


def metric_options() -> str:
    """The options of the group `forgetting_metric`."""
    parts = []
    for name in list_options("forgetting_metric", [CONF]):
        path = CONF / "forgetting_metric" / f"{name}.yaml"
        target = yaml.safe_load(path.read_text(encoding="utf-8")).get("_target_")
        keys = yaml_comments(path).items() if target else ()
        keys = "; ".join(f"`forgetting_metric.{name}.{k}`: {v}" for k, v in keys)
        parts += [
            f"### `forgetting_metric={name}`",
            prose(description(path)),
            prose(" ".join(comments(path))),
        ]
        if target:
            schema = find_class(target, "forgetting_metric._target_")
            parts += [from_docstring(schema.__doc__ or ""), prose(keys)]
    return "\n\n".join(part for part in parts if part)


def command_line() -> str:
    """What `fedexp --help` prints, without the groups."""
    config = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    return f"```text\n{config['hydra']['help']['template'].partition('Groups')[0]}```"
