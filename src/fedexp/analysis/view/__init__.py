"""A sweep as one HTML page that needs neither server nor network.

    fedexp view multirun/<sweep> [--out FILE] [--open]

`collect` reads run directories into plain data, `page.html`, `page.css` and `page.js` show them.
The page holds its data as JSON that it never interprets as markup, and its content security policy
lets the browser run nothing but its own script and ask for nothing outside.
"""

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def render(data: dict[str, Any]) -> str:
    """Return the page for what `collect.collect` gives."""
    *scripts, style = (
        (HERE / name).read_text(encoding="utf-8") for name in ("export.js", "page.js", "page.css")
    )
    script = "".join(scripts)
    # In JSON these characters stand in strings only; escaped, no text can end the element that it
    # is in.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    parts = {
        "title": html.escape(data["title"]),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": style,
        "script": script,
        "data": text,
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    pieces = page.split("%%")  # names at odd places: no value is looked through for other names
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
