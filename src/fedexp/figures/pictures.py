"""Settings of pictures: the config node `figures`, and the same as flags of subcommands."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from fedexp.core.errors import ConfigError, require, require_choice

FORMATS = ("png", "pdf", "svg")
LATEX = re.compile(r"^\s*text\.usetex\s*:\s*(1|t|y|on|true|yes)\b", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The pictures of a run or sweep; `figures=false` is `draw=False`."""

    draw: bool = True  # at the end of a run
    format: tuple[str, ...] = ("png",)  # each picture in each of them
    titles: bool = True
    style: str | None = None  # a matplotlib style file (.mplstyle), read after fedexp's own

    def __post_init__(self) -> None:
        require(
            len(self.format) > 0,
            "figures.format",
            self.format,
            f"at least one of {', '.join(FORMATS)}",
        )
        for each in self.format:
            require_choice("figures.format", each, FORMATS)
        if self.style is not None:
            require_style(self.style)

    @classmethod
    def of(cls, node: object) -> Self:
        """Return what the configuration of a run says; the defaults where it says nothing that can
        be used (an older run, a style file that has gone)."""
        if isinstance(node, bool):
            return cls(draw=node)
        known = {field.name for field in fields(cls)}
        values = (
            {key: value for key, value in node.items() if key in known}
            if isinstance(node, Mapping)
            else {}
        )
        try:
            return cls(**values | {"format": tuple(values.get("format", cls.format))})
        except (ConfigError, TypeError):
            return cls(draw=values.get("draw") is not False)

    def changed(self, options: argparse.Namespace) -> Self:
        """Return these pictures with what the flags of the command line say otherwise."""
        changes: dict[str, Any] = {"titles": False} if options.no_titles else {}
        changes |= {"format": tuple(options.format.split(","))} if options.format else {}
        return replace(self, **changes | ({"style": options.style} if options.style else {}))


def require_style(style: str) -> None:
    """Raise ConfigError for a style file that is not there, is not text, or asks for LaTeX, which
    runs what the file has as its preamble and reads names of runs as commands."""
    try:
        text = Path(style).read_text(encoding="utf-8") if Path(style).is_file() else None
    except (OSError, ValueError):
        text = None
    wanted = "a matplotlib style file that is there, or null"
    require(text is not None, "figures.style", style, wanted)
    wanted = "a style file without text.usetex: True, which runs LaTeX"
    require(text is None or not LATEX.search(text), "figures.style", style, wanted)


PNG = Pictures()  # what is drawn unless a configuration says otherwise


def as_node(value: object) -> Any:
    """Return the node that `figures=false` or `figures=true` stands for."""
    return {"draw": value} if isinstance(value, bool) else value


def picture_files(folder: Path, stems: Sequence[str] | None = None) -> list[Path]:
    """Return the pictures in a folder, sorted by name; stems: those of these names alone."""
    found = (path for form in FORMATS for path in folder.glob(f"*.{form}"))
    return sorted(path for path in found if stems is None or path.stem in stems)
