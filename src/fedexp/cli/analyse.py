"""The flags of `fedexp analyse RUN KIND` and their checks."""

import math
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path

from fedexp.analysis.posthoc.defaults import COMMON, OF_KIND
from fedexp.cli.flags import add_picture_flags
from fedexp.core.errors import require, require_choice

KINDS = {
    "loss_plane": "loss and accuracy on a plane of two directions (FedNTD Fig. 14)",
    "noise": "loss and accuracy under Gaussian noise on the parameters (FedNTD Fig. 14)",
    "hessian": "the largest eigenvalues of the Hessian of the loss",
    "hypersphere": "2-dimensional features on the unit circle (FedNTD Fig. 18)",
    "tsne": "features of global and local models, by t-SNE (FedNTD Fig. 19 to 21)",
    "neurons": "the class that each neuron prefers, in global and local models (FedNTD Fig. 17)",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add a subparser for each kind."""
    parser.add_argument("run", type=Path, help="a run directory")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    of = {name: kinds.add_parser(name, help=text, description=text) for name, text in KINDS.items()}
    for name in ("loss_plane", "noise", "hessian"):
        last = "after which the model was kept (default: the last)"
        of[name].add_argument("--round", type=int, help=last)
        local = "its local model of that round, instead of the global one"
        of[name].add_argument("--client", type=int, help=local)
    for name in ("hypersphere", "tsne", "neurons"):
        rounds = "whose models, several with commas (default: the last round whose local models"
        of[name].add_argument("--round", type=rounds_in, help=f"{rounds} are kept)")
    for name, number in (("hypersphere", 3), ("tsne", 10)):
        clients = f"at most so many local models (default: {number})"
        of[name].add_argument("--clients", type=int, help=clients)
    add = of["loss_plane"].add_argument
    add("--directions", help="random (filter-normalised), eigenvectors, models")
    models = "of --directions models: three of global, before and numbers of clients "
    add("--models", help=f"{models}(default: global and the first two clients)")
    add("--points", type=int, help="on each side of the grid (default: 21)")
    span = "how far it reaches on either side, in units of its directions "
    add("--span", type=float, help=f"{span}(default: 1 for random, 0.5 for eigenvectors)")
    add = of["noise"].add_argument
    strengths = "of the noise, with commas (default: 11 from 0 to 0.05, or to 0.5 with --scale"
    add("--strengths", type=numbers_in, help=f"{strengths} relative)")
    add("--draws", type=int, help="how many (default: 5)")
    scale = "of a strength: absolute (the default), a standard deviation, or relative to the root"
    add("--scale", help=f"{scale} mean square of each tensor")
    add = of["hessian"].add_argument
    add("--eigenvalues", type=int, help="how many (default: 5)")
    add("--tolerance", type=float, help="relative, of each (default: 0.001)")
    add = of["tsne"].add_argument
    add("--perplexity", type=float, help="of t-SNE (default: 30)")
    others = "another run, whose models go into the same plane; may be repeated (FedNTD Fig. 21)"
    add("--with", dest="others", metavar="RUN", action="append", type=Path, help=others)
    for name, each in of.items():
        add_common(each)
        each.set_defaults(**COMMON | OF_KIND[name])


def add_common(parser: ArgumentParser) -> None:
    """Add the flags that every kind has."""
    add = parser.add_argument
    data = "test (the default), train, or the number of a client, for its training examples"
    add("--data", help=data)
    add("--examples", type=int, help="at most so many, drawn at random")
    add("--seed", type=int, help="of examples, directions and t-SNE (default: 0)")
    add("--device", help="auto, cpu, cuda or cuda:<number>")
    add("--data-dir", help="where the run's data lie now (default: where they lay)")
    add("--config-dir", type=Path, help="a directory of your own groups")
    add_picture_flags(parser)


def rounds_in(text: str) -> list[int]:
    """Parse a comma-separated list of integers."""
    return [int(part) for part in text.split(",")]


def numbers_in(text: str) -> list[float]:
    """Parse a comma-separated list of numbers."""
    return [float(part) for part in text.split(",")]


def check(options: Namespace) -> None:
    """Raise ConfigError for a flag with an invalid value."""
    from fedexp.rundir.reader import require_run

    for run in (options.run, *getattr(options, "others", ())):
        require_run(run)
    require(options.examples >= 1, "--examples", options.examples, "at least 1")
    require(0 <= options.seed < 2**63, "--seed", options.seed, "an integer of at least 0")
    if "clients" in options:
        require(options.clients >= 0, "--clients", options.clients, "at least 0")
    if options.kind == "loss_plane":
        check_plane(options)
    if options.kind == "noise":
        require_choice("--scale", options.scale, ("absolute", "relative"))
        require(options.draws >= 1, "--draws", options.draws, "at least 1")
        fine = all(0 <= strength < math.inf for strength in options.strengths or ())
        require(fine, "--strengths", options.strengths, "numbers of at least 0")
    if options.kind == "hessian":
        fine = 0 < options.tolerance < 1
        require(fine, "--tolerance", options.tolerance, "greater than 0 and less than 1")


def check_plane(options: Namespace) -> None:
    require_choice("--directions", options.directions, ("random", "eigenvectors", "models"))
    require(options.points >= 2, "--points", options.points, "at least 2")
    require(options.span is None or options.span > 0, "--span", options.span, "greater than 0")
    if options.directions != "models":
        given = "given with --directions models"
        require(options.models is None, "--models", options.models, given)
        return
    left_out = "left out with --directions models"
    require(options.span is None, "--span", options.span, left_out)
    require(options.client is None, "--client", options.client, f"{left_out}, which --models names")


def analyse(options: Namespace) -> list[str]:
    """Compute the analysis and write its files; return the lines to print."""
    from fedexp.analysis.posthoc import kinds
    from fedexp.cli.composition import composed
    from fedexp.cli.job import log_to_console
    from fedexp.figures import look_of
    from fedexp.rundir.reader import RunDirectory

    look = look_of(options.run).changed(options)
    log_to_console()
    with composed([], options.config_dir) if options.config_dir else nullcontext():
        run = RunDirectory(options.run)
        results = kinds.KINDS[options.kind](run, options)
        return [line for result in results for line in result.write(run, look)]
