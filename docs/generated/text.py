"""Texts, docstrings and yaml files as markdown."""

import inspect
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fedexp.config.options import conf_directories

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
CONFS = conf_directories()
INLINE = re.compile(r"(`[^`]*`)")
SPECIAL = re.compile(r"([\\*_\[\]<>])")


def conf_file(name: str) -> Path:
    """Return the file of an option, such as `model/cnn`."""
    return next(path for conf in CONFS if (path := conf / f"{name}.yaml").exists())


def prose(text: str) -> str:
    """Plain text as markdown: nothing but `code` keeps a meaning."""
    parts = INLINE.split(text)
    return "".join(part if part.startswith("`") else SPECIAL.sub(r"\\\1", part) for part in parts)


def from_docstring(text: str) -> str:
    """A docstring as markdown: indented lines are equations, a line that ends early ends a
    paragraph."""
    lines = inspect.cleandoc(text).splitlines()
    width = max(map(len, lines))
    blocks: list[str] = []
    equations: list[str] = []
    sentence = ""

    def close() -> None:
        nonlocal sentence
        if sentence:
            blocks.append(prose(sentence))
        if equations:
            blocks.append("```text\n" + textwrap.dedent("\n".join(equations)) + "\n```")
        sentence = ""
        equations.clear()

    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  "):
            if sentence:
                close()
            equations.append(line)
            continue
        if equations or not line:
            close()
        sentence = f"{sentence} {line}".strip()
        # the next word would have had room
        if following and len(line) + len(following.split()[0]) < width:
            close()
    close()
    return "\n\n".join(blocks)


def comments(path: Path) -> list[str]:
    """The comment lines at the head of a yaml file after the first, joined to sentences."""
    head = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            head.append(line.lstrip("# "))
    return head[1:]


def cell(value: Any) -> str:
    """A yaml value in a table."""
    text = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
    return f"`{text}`"


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    written = [[text.replace("|", "\\|") for text in line] for line in lines]
    top = list(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [top, ["---"] * len(top), *written])


def yaml_comments(path: Path) -> dict[str, str]:
    """Key -> the comment behind its value, of an option and those that it builds on."""
    text = path.read_text(encoding="utf-8")
    bases = (yaml.safe_load(text) or {}).get("defaults", ())
    found: dict[str, str] = {}
    for base in bases:
        found |= {} if base == "_self_" else yaml_comments(path.with_name(f"{base}.yaml"))
    return found | dict(re.findall(r"^(\w+): [^#\n]*#\s*(.+)$", text, re.MULTILINE))


def description(path: Path) -> str:
    """Return the first comment line of an option's file, ignoring Hydra's `@package` line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""
