"""`make reproduction`: write REPRODUCTION.md and its pictures from the committed runs."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedexp.core.errors import ConfigError, say
from reproduction.page import CURVES, PAGE, make_files

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the files, and return the exit code. arguments: by default, sys.argv."""
    parser = argparse.ArgumentParser(prog="python -m reproduction", description=__doc__)
    check = "write nothing; exit with 1 if a file is out of date"
    parser.add_argument("--check", action="store_true", help=check)
    root = "path of the git checkout (default: this one)"
    parser.add_argument("--root", type=Path, default=ROOT, help=root)
    options = parser.parse_args(arguments)
    try:
        files = make_files(options.root, pictures=not options.check)
    except ConfigError as error:
        return say(str(error))
    return (check_files if options.check else write_files)(options.root, files)


def check_files(root: Path, files: Mapping[Path, bytes]) -> int:
    """Print which files are out of date, and return the exit code.

    Pictures only need to exist, since their bytes depend on the version of matplotlib.
    """
    old = [path for path in files if not (root / path).is_file()] + find_stale_curves(root, files)
    if PAGE not in old and (root / PAGE).read_bytes() != files[PAGE]:
        old.append(PAGE)
    for path in old:
        print(f"{root / path} is out of date; run `make reproduction` to update it")
    return 1 if old else 0


def write_files(root: Path, files: Mapping[Path, bytes]) -> int:
    """Write all files, delete curves that are out of date, and return the exit code."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        print(f"  {root / path}")
    for path in find_stale_curves(root, files):
        (root / path).unlink()
    return 0


def find_stale_curves(root: Path, files: Mapping[Path, bytes]) -> list[Path]:
    """Return the learning curves in a checkout that belong to runs which have been removed."""
    there = [path.relative_to(root) for path in sorted((root / CURVES).glob("*.svg"))]
    return [path for path in there if path not in files]


if __name__ == "__main__":
    sys.exit(main())
