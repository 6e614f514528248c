"""Find fonts for names in any writing system.

Letters that the style's fonts do not contain are drawn in other fonts of the system. Letters that
no font contains are replaced.
"""

import functools
from collections.abc import Sequence

from matplotlib import font_manager, rcParams
from matplotlib.font_manager import FontProperties


def drawable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (names that can be drawn, font families).

    A name is replaced by its index if it is empty or if one of its letters is not in any font.
    """
    clean = [" ".join(name.split()) for name in names]
    families, missing = families_for("".join(clean))
    known = [bool(name) and missing.isdisjoint(name) for name in clean]
    return [name if known[i] else str(i) for i, name in enumerate(clean)], families


def drawable_text(text: str) -> tuple[str, list[str]]:
    """Return (text that can be drawn, font families).

    Letters that are not in any font are replaced by `?`. Line breaks are kept.
    """
    families, missing = families_for(text.replace("\n", ""))
    return text.translate({ord(letter): "?" for letter in missing}), families


def families_for(text: str) -> tuple[list[str], set[str]]:
    """Return (font families for the letters of a text, letters that are not in any font).

    The families are those of the style, followed by system fonts for letters that the style's fonts
    do not contain.
    """
    families = list(rcParams["font.family"])
    usual = font_manager.findfont(FontProperties(family=families))
    missing = set(map(ord, text)) - letters_of(usual)
    fonts = font_manager.fontManager.ttflist if missing else []
    upright = [font for font in fonts if font.style == "normal" and font.weight in (400, "normal")]
    for font in sorted(upright, key=lambda font: -len(missing & letters_of(font.fname))):
        if found := missing & letters_of(font.fname):
            families.append(font.name)
            missing -= found
    return families, set(map(chr, missing))


@functools.lru_cache(maxsize=4096)
def letters_of(path: str) -> frozenset[int]:
    """Return the code points in a font file, or an empty set if the file cannot be read."""
    try:
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()
