"""The figure settings. The config node `figures` or flags of subcommands set them."""

import argparse
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from fedexp.core.console import comma_list
from fedexp.core.errors import ConfigError, nearest, require, require_choice

log = logging.getLogger("fedexp")

FORMATS = ("png", "pdf", "svg")


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Settings for the figures of a run or sweep. `figures=false` means `draw=False`."""

    draw: bool = True  # whether to draw figures at the end of a run
    format: tuple[str, ...] = ("png",)  # each figure is written in each format
    titles: bool = True
    style: str | None = None  # a matplotlib style file (.mplstyle), applied after fedexp's style
    classes: tuple[str, ...] = ()  # names of all classes; empty: the names in the data
    # width and height in inches; empty: the style's width, and a height that suits the content
    size: tuple[float, ...] = ()
    colour_map: str | None = None  # of heat maps, by matplotlib's name; None: the style's

    def __post_init__(self) -> None:
        allowed = f"at least one of {', '.join(FORMATS)}"
        require(len(self.format) > 0, "figures.format", self.format, allowed)
        for each in self.format:
            require_choice("figures.format", each, FORMATS)
        if self.style is not None:
            wanted = "an existing matplotlib style file, or null"
            require(Path(self.style).is_file(), "figures.style", self.style, wanted)
        wanted = "a width and a height of 1 to 100 inches, such as [3.4,2.0], or []"
        fits = len(self.size) in (0, 2) and all(1 <= length <= 100 for length in self.size)
        require(fits, "figures.size", list(self.size), wanted)
        if self.colour_map is not None:
            from matplotlib import colormaps  # slow to import

            wanted = f"a colour map of matplotlib{nearest(self.colour_map, colormaps)}"
            known = self.colour_map in colormaps
            require(known, "figures.colour_map", self.colour_map, wanted)

    @classmethod
    def of(cls, node: object) -> Self:
        """Return the settings in a run's configuration.

        Missing settings have their defaults; the run may be of an older version. An unusable one,
        such as a style file that was deleted, is named in a warning and has its default, too.
        """
        found, known = cls(), as_node(node)
        known = known if isinstance(known, Mapping) else {}
        for field in (each for each in fields(cls) if each.name in known):
            value, is_list = known[field.name], isinstance(field.default, tuple)
            try:
                change: dict[str, Any] = {field.name: tuple(value) if is_list else value}
                found = replace(found, **change)
            except (ConfigError, TypeError) as error:
                wrong = f"figures.{field.name}={value}: has the wrong type"
                why = error if isinstance(error, ConfigError) else wrong
                log.warning("%s; this setting of the run is not used", why)
        return found

    def changed(self, options: argparse.Namespace) -> "Pictures":
        """Return a copy of these settings, changed by the command line's flags."""
        given = {field.name: getattr(options, field.name, None) for field in fields(self)}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def check_classes(self, number: int) -> None:
        """Raise ConfigError unless there is a name for each class. number: of classes."""
        fits = len(self.classes) in (0, number)
        require(fits, "figures.classes", list(self.classes), f"a list of {number} names, or []")


PNG = Pictures()  # the default settings


def parse_size(text: str) -> tuple[float, ...]:
    """Return a flag such as 3.4,2.0 as numbers."""
    try:
        return tuple(map(float, text.strip("[]").split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} must be two numbers, such as 3.4,2.0") from error


def as_node(value: object) -> Any:
    """Convert `figures=false` or `figures=true` to a node of the configuration."""
    return {"draw": value} if isinstance(value, bool) else value


def picture_files(folder: Path) -> list[Path]:
    """Return the figures in a folder, sorted by path."""
    return sorted(path for form in FORMATS for path in folder.glob(f"*.{form}"))


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that set the style of figures and override the run's configuration."""
    add = parser.add_argument
    formats = f"comma-separated formats of the figures: {','.join(FORMATS)}"
    add("--format", type=comma_list, help=formats)
    add("--classes", type=comma_list, help="names of all classes, separated by commas")
    add("--size", type=parse_size, help="width and height in inches, such as 3.4,2.0")
    add("--colour-map", help="matplotlib's name of the colours of heat maps")
    titles = "draw figures without titles"
    add("--no-titles", dest="titles", action="store_const", const=False, help=titles)
    add("--style", help="matplotlib style file (.mplstyle), applied after fedexp's style")


def given_picture_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags of `add_picture_flags` that the command line has."""
    flags = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(Pictures)}
    flags["titles"] = "--no-titles"
    return [flag for name, flag in flags.items() if getattr(options, name, None) is not None]
