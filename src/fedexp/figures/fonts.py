"""Fonts for names in any script: those of the system that have the letters, else something that can
be drawn."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

from matplotlib import font_manager, rcParams
from matplotlib.font_manager import FontProperties

MOST = 4  # further fonts for one text


def drawable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (names, font families): of each name what can be drawn, which is its number where no
    font has one of its letters."""
    clean = [" ".join(name.split()) for name in names]
    families, missing = families_for(frozenset("".join(clean)))
    return [
        str(i) if set(name) & missing or not name else name for i, name in enumerate(clean)
    ], families


def drawable_text(text: str) -> tuple[str, list[str]]:
    """Return (text, font families); ? in the place of letters that no font has. Lines are kept."""
    families, missing = families_for(frozenset(text) - {"\n"})
    return "".join("?" if letter in missing else letter for letter in text), families


def families_for(letters: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Return (the font families of the style and further ones of the system for letters that these
    lack, letters that none has)."""
    usual = rcParams["font.family"]
    missing = letters - {
        chr(code) for code in letters_of(font_manager.findfont(FontProperties(family=usual)))
    }
    further, missing = further_families(frozenset(missing), len(font_manager.fontManager.ttflist))
    return [*usual, *further], missing


def absent_fonts() -> list[str]:
    """Return the fonts that the style asks for where none of them is there; empty where one is."""
    settings = cast(dict[str, Any], rcParams)
    wanted = [
        name
        for family in settings["font.family"]
        for name in settings.get(f"font.{family}", [family])
    ]
    return (
        [] if {*wanted} & {entry.name for entry in font_manager.fontManager.ttflist} else wanted[:3]
    )


@functools.lru_cache(maxsize=64)
def further_families(missing: frozenset[str], installed: int) -> tuple[list[str], frozenset[str]]:
    """Return (families that have the missing letters, letters that none has). installed: the number
    of fonts, by which a font that is added later is seen."""
    codes = {ord(letter) for letter in missing}
    fonts = {name: codes & letters_of(path) for name, path in upright_fonts()} if codes else {}
    found: list[str] = []
    for name in sorted(fonts, key=lambda name: len(fonts[name]), reverse=True):
        if codes & fonts[name] and len(found) < MOST:
            found.append(name)
            codes -= fonts[name]
    return found, frozenset(map(chr, codes))


def upright_fonts() -> Iterator[tuple[str, str]]:
    """Yield (name, path) of every family's font of ordinary weight and slant."""
    for entry in font_manager.fontManager.ttflist:
        if entry.style == "normal" and entry.weight in (400, "normal", "regular", "book"):
            yield entry.name, entry.fname


@functools.lru_cache(maxsize=4096)
def letters_of(path: str) -> frozenset[int]:
    """Return the code points that a font file has; none of one that cannot be read."""
    try:
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()
