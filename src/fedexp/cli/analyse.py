"""`fedexp analyse RUN KIND`: the loss around a kept model, its curvature, and the features of
global and local models.

It needs no more than a run of any algorithm; `keep_local_models=[<rounds>]` lets it show local
models too. Tables and pictures are written to <run>/analysis/.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.analysis.after.defaults import COMMON, OF_KIND
from fedexp.core.errors import ConfigError, StorageError, require, require_choice, say
from fedexp.core.pictures import add_flags

if TYPE_CHECKING:
    from fedexp.analysis.after.kinds import Request

KINDS = {
    "loss_plane": "loss and accuracy on a plane of two directions (FedNTD Fig. 14)",
    "noise": "loss and accuracy under Gaussian noise on the parameters (FedNTD Fig. 14)",
    "hessian": "the largest eigenvalues of the Hessian of the loss",
    "hypersphere": "2-dimensional features on the unit circle (FedNTD Fig. 18)",
    "tsne": "features of global and local models, by t-SNE (FedNTD Fig. 19 to 21)",
    "neurons": "the class that each neuron prefers, in global and local models (FedNTD Fig. 17)",
}


def parser_of(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run directory")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    of = {name: kinds.add_parser(name, help=text, description=text) for name, text in KINDS.items()}
    for each in of.values():
        add_common(each)
    for name in ("loss_plane", "noise", "hessian"):
        of[name].add_argument(
            "--round", type=int, help="after which the model was kept (default: the last)"
        )
        of[name].add_argument(
            "--client", type=int, help="its local model of that round, instead of the global one"
        )
    for name in ("hypersphere", "tsne", "neurons"):
        of[name].add_argument(
            "--round",
            type=rounds_in,
            help="whose models, several with commas (default: the last round of "
            "which local models are kept)",
        )
    plane = of["loss_plane"]
    plane.add_argument("--directions", help="random (filter-normalised), eigenvectors, models")
    plane.add_argument(
        "--models",
        help="of --directions models: three of global, before and numbers of clients "
        "(default: global and the first two clients)",
    )
    plane.add_argument("--points", type=int, help="on each side of the grid (default: 21)")
    plane.add_argument(
        "--span",
        type=float,
        help="how far it reaches on either side, in units of its directions "
        "(default: 1 for random, 0.5 for eigenvectors)",
    )
    noise = of["noise"]
    noise.add_argument(
        "--strengths",
        type=numbers_in,
        help="of the noise, with commas (default: 11 from 0 to 0.05, or "
        "to 0.5 with --scale relative)",
    )
    noise.add_argument("--draws", type=int, help="how many (default: 5)")
    noise.add_argument(
        "--scale",
        help="of a strength: absolute (the default), a standard deviation, or relative to "
        "the root mean square of each tensor",
    )
    of["hessian"].add_argument("--eigenvalues", type=int, help="how many (default: 5)")
    of["hessian"].add_argument("--tolerance", type=float, help="relative, of each (default: 0.001)")
    of["hypersphere"].add_argument(
        "--clients", type=int, help="at most so many local models (default: 3)"
    )
    of["tsne"].add_argument(
        "--clients", type=int, help="at most so many local models (default: 10)"
    )
    of["tsne"].add_argument("--perplexity", type=float, help="of t-SNE (default: 30)")
    of["tsne"].add_argument(
        "--with",
        dest="others",
        metavar="RUN",
        action="append",
        type=Path,
        help="another run, whose models go into the same plane; may be repeated (FedNTD Fig. 21)",
    )
    for name, each in of.items():
        each.set_defaults(**COMMON | OF_KIND[name])
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every kind has."""
    parser.add_argument(
        "--data",
        help="test (the default), train, or the number of a client, for its training examples",
    )
    parser.add_argument("--examples", type=int, help="at most so many, drawn at random")
    parser.add_argument("--seed", type=int, help="of examples, directions and t-SNE (default: 0)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:<number>")
    parser.add_argument("--data-dir", help="where the run's data lie now (default: where they lay)")
    parser.add_argument("--config-dir", type=Path, help="a directory of your own groups")
    add_flags(parser)


def rounds_in(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(part) for part in text.split(",")]


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a list with commas."""
    return [float(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None, prog: str = "fedexp analyse") -> int:
    """Print what was found and the files that were written; exit code 2 with one message for bad
    input."""
    options = parser_of(prog).parse_args(arguments)
    try:
        check(options)
        lines = analyse(options)
    except (ConfigError, StorageError) as error:
        return say(str(error))
    print("\n".join(lines))
    return 0


def check(options: argparse.Namespace) -> None:
    """Raise ConfigError for a flag whose value cannot be."""
    from fedexp.rundir.reader import MARKS

    for run in (options.run, *getattr(options, "others", ())):
        if not any((run / name).exists() for name in MARKS):
            raise ConfigError(f"{run}: no run is there (none of {', '.join(MARKS)})")
    require(options.examples >= 1, "--examples", options.examples, "at least 1")
    require(0 <= options.seed < 2**63, "--seed", options.seed, "an integer of at least 0")
    if "clients" in options:
        require(options.clients >= 0, "--clients", options.clients, "at least 0")
    if options.kind == "loss_plane":
        require_choice("--directions", options.directions, ("random", "eigenvectors", "models"))
        require(options.points >= 2, "--points", options.points, "at least 2")
        require(options.span is None or options.span > 0, "--span", options.span, "greater than 0")
        of_models = options.directions == "models"
        require(
            options.models is None or of_models,
            "--models",
            options.models,
            "given with --directions models",
        )
        require(
            options.span is None or not of_models,
            "--span",
            options.span,
            "left out with --directions models",
        )
        alone = options.client is None or not of_models
        require(
            alone,
            "--client",
            options.client,
            "left out with --directions models, which --models names",
        )
    if options.kind == "noise":
        require_choice("--scale", options.scale, ("absolute", "relative"))
        require(options.draws >= 1, "--draws", options.draws, "at least 1")
        fine = all(0 <= strength < math.inf for strength in options.strengths or ())
        require(fine, "--strengths", options.strengths, "numbers of at least 0")
    if options.kind == "hessian":
        require(
            0 < options.tolerance < 1,
            "--tolerance",
            options.tolerance,
            "greater than 0 and less than 1",
        )


def analyse(options: argparse.Namespace) -> list[str]:
    """Compute and write what the command line asks for; return the lines to print."""
    from contextlib import nullcontext

    from fedexp.analysis.after import kinds
    from fedexp.cli.composition import composed
    from fedexp.cli.job import log_to_console
    from fedexp.figures import look_of
    from fedexp.rundir.reader import RunDirectory

    look = look_of(options.run).changed(options)
    log_to_console()
    of_kind: dict[str, Callable[[RunDirectory, Request], list[str]]] = {
        "loss_plane": kinds.loss_plane,
        "noise": kinds.noise,
        "hessian": kinds.hessian,
        "hypersphere": kinds.hypersphere,
        "tsne": kinds.tsne,
        "neurons": kinds.neurons,
    }
    with composed([], options.config_dir) if options.config_dir else nullcontext():
        return of_kind[options.kind](RunDirectory(options.run), kinds.Request(options, look))
