"""Show a sweep as one HTML page that needs neither a server nor a network connection.

    fedexp view multirun/<sweep> [--out FILE] [--open]

`collect` converts run directories to plain data. `page.html`, `page.css` and `page.js` show the
data. The page stores the data as JSON and never interprets them as markup. Its content security
policy only allows the page's own script and blocks external requests.
"""

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def render(data: dict[str, Any]) -> str:
    """Return the HTML page for the result of `collect.collect`."""
    *scripts, style = (
        (HERE / name).read_text(encoding="utf-8") for name in ("export.js", "page.js", "page.css")
    )
    script = "".join(scripts)
    # In JSON, these characters only occur in strings. Escape them, so that no text can end the HTML
    # element that contains the data.
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
    pieces = page.split("%%")  # odd items are names; inserted values are not split
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
