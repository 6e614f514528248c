"""`fedexp figures <run directory>...`: draw the pictures of finished or interrupted runs again."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedexp.core.errors import FAILED, ConfigError, say
from fedexp.core.pictures import add_flags
from fedexp.figures import look_of, make_figures


def main(arguments: Sequence[str] | None = None, prog: str = "fedexp figures") -> int:
    """Print the path of every picture; exit code 2 with one message when a directory holds no
    run."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("run_dir", nargs="+", type=Path, help="a run directory (holds rounds.csv)")
    add_flags(parser)
    options, code = parser.parse_args(arguments), 0
    for run_dir in options.run_dir:
        try:
            paths = make_figures(run_dir, look=look_of(run_dir).changed(options))
            if not paths:
                raise ConfigError(
                    f"{run_dir}: no run to draw here (needs rounds.csv, class_accuracy.csv or"
                    " partition.npz)"
                )
            print(*paths, sep="\n")
        except ConfigError as error:
            code = say(str(error))
        except OSError as error:
            code = say(
                f"{error.filename or run_dir}: cannot be read or written ({error.strerror})", FAILED
            )
    return code


if __name__ == "__main__":
    sys.exit(main(prog="python -m fedexp.figures"))
