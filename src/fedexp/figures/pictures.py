"""The figure settings. The config node `figures` or flags of subcommands set them."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from fedexp.core.errors import ConfigError, require, require_choice

FORMATS = ("png", "pdf", "svg")


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Settings for the figures of a run or sweep. `figures=false` means `draw=False`."""

    draw: bool = True  # whether to draw figures at the end of a run
    format: tuple[str, ...] = ("png",)  # each figure is written in each format
    titles: bool = True
    style: str | None = None  # a matplotlib style file (.mplstyle), applied after fedexp's style
    classes: tuple[str, ...] = ()  # names of all classes; empty: the names in the data

    def __post_init__(self) -> None:
        allowed = f"at least one of {', '.join(FORMATS)}"
        require(len(self.format) > 0, "figures.format", self.format, allowed)
        for each in self.format:
            require_choice("figures.format", each, FORMATS)
        if self.style is not None:
            wanted = "an existing matplotlib style file, or null"
            require(Path(self.style).is_file(), "figures.style", self.style, wanted)

    @classmethod
    def of(cls, node: object) -> Self:
        """Return the settings in a run's configuration.

        Settings that are missing or unusable are replaced by their defaults. This happens if the
        run was made by an older version or if a style file was deleted.
        """
        if isinstance(node, bool):
            return cls(draw=node)
        given = node if isinstance(node, Mapping) else {}
        known = {field.name: given.get(field.name, field.default) for field in fields(cls)}
        try:
            lists = {name: tuple(known[name]) for name in ("format", "classes")}
            return cls(**known | lists)
        except (ConfigError, TypeError):
            return cls(draw=given.get("draw") is not False)

    def changed(self, options: argparse.Namespace) -> "Pictures":
        """Return a copy of these settings, changed by the command line's flags."""
        return Pictures(
            draw=self.draw,
            format=tuple(options.format.split(",")) if options.format else self.format,
            titles=self.titles and not options.no_titles,
            style=options.style or self.style,
            classes=tuple(options.classes.split(",")) if options.classes else self.classes,
        )

    def check_classes(self, number: int) -> None:
        """Raise ConfigError unless there is a name for each class. number: of classes."""
        fits = len(self.classes) in (0, number)
        require(fits, "figures.classes", list(self.classes), f"a list of {number} names, or []")


PNG = Pictures()  # the default settings


def as_node(value: object) -> Any:
    """Convert `figures=false` or `figures=true` to a node of the configuration."""
    return {"draw": value} if isinstance(value, bool) else value


def picture_files(folder: Path) -> list[Path]:
    """Return the figures in a folder, sorted by path."""
    return sorted(path for form in FORMATS for path in folder.glob(f"*.{form}"))


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that set the style of figures and override the run's configuration."""
    parser.add_argument(
        "--format", help=f"comma-separated formats of the figures: {','.join(FORMATS)}"
    )
    parser.add_argument("--classes", help="names of all classes, separated by commas")
    parser.add_argument("--no-titles", action="store_true", help="draw figures without titles")
    parser.add_argument(
        "--style", help="matplotlib style file (.mplstyle), applied after fedexp's style"
    )
