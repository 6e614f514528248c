"""Find fonts for names in any script.

Letters that the style's fonts lack are drawn in other fonts of the system, or replaced if no font
has them.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

from matplotlib import font_manager, rcParams
from matplotlib.font_manager import FontProperties

MOST = 4  # maximum number of further fonts for one text


def drawable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (names that can be drawn, font families).

    A name is replaced by its index if it is empty or if no font has one of its letters.
    """
    clean = [" ".join(name.split()) for name in names]
    families, missing = families_for(frozenset("".join(clean)))
    return [
        str(i) if set(name) & missing or not name else name for i, name in enumerate(clean)
    ], families


def drawable_text(text: str) -> tuple[str, list[str]]:
    """Return (text, font families). Letters that no font has are replaced by `?`; line breaks are
    kept."""
    families, missing = families_for(frozenset(text) - {"\n"})
    return "".join("?" if letter in missing else letter for letter in text), families


def families_for(letters: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Return (font families for these letters, letters that no font has).

    The families are those of the style, and system fonts for letters that the style's fonts lack.
    """
    usual = rcParams["font.family"]
    missing = letters - {
        chr(code) for code in letters_of(font_manager.findfont(FontProperties(family=usual)))
    }
    further, missing = further_families(frozenset(missing), len(font_manager.fontManager.ttflist))
    return [*usual, *further], missing


def absent_fonts() -> list[str]:
    """Return up to three of the style's fonts if none of its fonts is installed.

    Return an empty list if at least one is installed.
    """
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
    """Return (families that have the missing letters, letters that no font has).

    installed: the number of installed fonts. It is part of the cache key, so that fonts added later
    are found.
    """
    codes = {ord(letter) for letter in missing}
    fonts = {name: codes & letters_of(path) for name, path in upright_fonts()} if codes else {}
    found: list[str] = []
    for name in sorted(fonts, key=lambda name: len(fonts[name]), reverse=True):
        if codes & fonts[name] and len(found) < MOST:
            found.append(name)
            codes -= fonts[name]
    return found, frozenset(map(chr, codes))


def upright_fonts() -> Iterator[tuple[str, str]]:
    """Yield (name, path) of each family's font with regular weight and no slant."""
    for entry in font_manager.fontManager.ttflist:
        if entry.style == "normal" and entry.weight in (400, "normal", "regular", "book"):
            yield entry.name, entry.fname


@functools.lru_cache(maxsize=4096)
def letters_of(path: str) -> frozenset[int]:
    """Return the code points in a font file; an empty set if the file cannot be read."""
    try:
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()
