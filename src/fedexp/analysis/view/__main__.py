"""`fedexp view DIRECTORY...`: a sweep, or runs, as one HTML page that needs neither server nor
network."""

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from fedexp.analysis.view import render
from fedexp.analysis.view.collect import collect
from fedexp.core.errors import ConfigError
from fedexp.core.storage import write_atomically
from fedexp.trackers.base import display_path


def main(arguments: Sequence[str] | None = None, prog: str = "fedexp view") -> int:
    """Write the page and print its path; exit code 2 with one message for bad input."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument(
        "directories",
        nargs="+",
        type=Path,
        help="a sweep (multirun/<sweep>) or a run; several share a page",
    )
    parser.add_argument("--out", type=Path, help="the page (default: view.html in the directory)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    options = parser.parse_args(arguments)
    out = options.out or Path(
        os.path.commonpath([path.absolute() for path in options.directories]), "view.html"
    )
    try:
        write_atomically(out, render(collect(options.directories)).encode())
    except ConfigError as error:
        print(f"fedexp: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fedexp: {out}: cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    print(display_path(out))
    if options.open:
        webbrowser.open(out.absolute().as_uri())
    return 0


if __name__ == "__main__":
    sys.exit(main(prog="python -m fedexp.analysis.view"))
