"""`fedexp evaluate RUN [dataset=...]`: a kept model of a run on a test set, class by class.

Without `dataset=` it is the run's own test set; with it, the test part of any data set with the
same classes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.cli.composition import composed, without_hydra
from fedexp.core import storage
from fedexp.core.errors import ConfigError, StorageError, say
from fedexp.trackers.base import display_path

if TYPE_CHECKING:
    from fedexp.analysis.evaluation import Evaluation
    from fedexp.data.types import DataSource


def main(arguments: Sequence[str] | None = None, prog: str = "fedexp evaluate") -> int:
    """Print the table; exit code 2 with one message for bad input."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="dataset=<option>, dataset.<key>=<value>, data_dir=<directory> (as for a run)",
    )
    parser.add_argument(
        "--round", type=int, help="after which the model was kept (default: the last)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<number>")
    parser.add_argument("--out", type=Path, help="write the table to this csv file too")
    parser.add_argument("--config-dir", type=Path, help="a directory of your own groups")
    options = parser.parse_args(arguments)
    try:
        found = evaluation_of(options)
        print(table_of(found))
        if options.out is not None:
            storage.write_atomically(options.out, found.classes.to_csv(index=False).encode())
            print(f"  {display_path(options.out)}")
    except (ConfigError, StorageError) as error:
        return say(str(error))
    return 0


def evaluation_of(options: argparse.Namespace) -> "Evaluation":
    """Test the model that the command line asks for."""
    from contextlib import nullcontext

    from fedexp.cli.job import log_to_console
    from fedexp.rundir.reader import MARKS, RunDirectory

    if not any((options.run / name).exists() for name in MARKS):
        raise ConfigError(f"{options.run}: no run is there (none of {', '.join(MARKS)})")
    source, data_dir = dataset_of(options.overrides, options.config_dir)
    log_to_console()
    from fedexp.analysis.evaluation import evaluate_run

    with composed([], options.config_dir) if options.config_dir else nullcontext():
        return evaluate_run(
            RunDirectory(options.run), source, options.round, options.device, data_dir
        )


def dataset_of(
    overrides: Sequence[str], config_dir: Path | None = None
) -> "tuple[DataSource | None, str | None]":
    """Return (the data set that overrides choose, None for the run's own; where data lie, None:
    where they lay).

    Raises ConfigError for an override of anything else.
    """
    from fedexp.config.overrides import key_of
    from fedexp.config.values import make_target, resolve
    from fedexp.data.types import DataSource

    keys = [key_of(text) for text in overrides]
    if wrong := [
        k for k in keys if k not in ("dataset", "data_dir") and not k.startswith("dataset.")
    ]:
        raise ConfigError(
            f"{wrong[0]}: only dataset, its keys (dataset.root) and data_dir can be set here"
        )
    if not keys:
        return None, None
    if "dataset" not in keys and (within := [k for k in keys if k != "data_dir"]):
        raise ConfigError(
            f"{within[0]}: goes with dataset=<option>; without it, it is the run's own test set"
        )
    with composed(overrides, config_dir) as config:
        values = resolve(without_hydra(config))
        if "dataset" not in keys:
            return None, str(values["data_dir"])
        return make_target(values["dataset"], "dataset", DataSource), None  # type: ignore[type-abstract]


def table_of(found: "Evaluation") -> str:
    """Return the result as a table in text."""
    classes = found.classes
    names = [str(name) for name in classes["name"]]
    width = max(len("class"), *(len(name) for name in names))
    lines = [
        f"{found.dataset}, {found.examples:,} test examples, model after round {found.round}: "
        f"accuracy {found.accuracy:.4f}, loss {found.loss:.4f}",
        "",
        f"{'class':<{width}}  examples  correct  accuracy",
    ]
    for name, examples, correct, accuracy in zip(
        names, classes["examples"], classes["correct"], classes["accuracy"], strict=True
    ):
        shown = f"{accuracy:.4f}" if examples else "-"
        lines.append(f"{name:<{width}}  {examples:>8,}  {correct:>7,}  {shown:>8}")
    return "\n".join(lines)
