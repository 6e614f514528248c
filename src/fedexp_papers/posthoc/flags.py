"""Define the flags of `fedexp-papers analyse RUN KIND` and run the analysis."""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError
from fedexp.figures.pictures import add_picture_flags
from fedexp_papers.posthoc.defaults import COMMON, OF_KIND

KINDS = {
    "loss_plane": "loss and accuracy on a plane spanned by two directions (FedNTD Fig. 14)",
    "noise": "loss and accuracy under Gaussian noise on the parameters (FedNTD Fig. 14)",
    "hessian": "the largest eigenvalues of the Hessian of the loss",
    "hypersphere": "2-dimensional features on the unit circle (FedNTD Fig. 18)",
    "tsne": "t-SNE of the features of global and local models (FedNTD Fig. 19 to 21)",
    "neurons": "the class that each neuron prefers, in global and local models (FedNTD Fig. 17)",
}
LOSS, FEATURES = ("loss_plane", "noise", "hessian"), ("hypersphere", "tsne", "neurons")


def at_least(least: float, kind: type = int) -> Callable[[str], Any]:
    """Return a function that parses a number and rejects values below `least`.

    kind: the type of the number.
    """

    def number(text: str) -> Any:
        value = kind(text)
        if not least <= value < math.inf:
            raise ArgumentTypeError(f"{text}: must be a finite number, at least {least}")
        return value

    return number


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a function that parses a comma-separated list and converts each item with `kind`."""

    def values(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return values


def tolerance(text: str) -> float:
    if not 0 < float(text) < 1:
        raise ArgumentTypeError(f"{text}: must be greater than 0 and less than 1")
    return float(text)


# (kinds of analysis, flag, its choices or the function that parses its value, help text)
FLAGS: tuple[tuple[tuple[str, ...], str, Any, str], ...] = (
    (LOSS, "--round", int, "round of the model (default: the last saved model)"),
    (LOSS, "--client", int, "use the local model of this client"),
    (
        FEATURES,
        "--round",
        listed(int),
        "rounds of the models (default: the last round with local models)",
    ),
    (("hypersphere",), "--clients", at_least(0), "maximum number of local models (default: 3)"),
    (("tsne",), "--clients", at_least(0), "maximum number of local models (default: 10)"),
    (
        ("loss_plane",),
        "--directions",
        ("random", "eigenvectors", "models"),
        "directions that span the plane; random directions are filter-normalised",
    ),
    (
        ("loss_plane",),
        "--models",
        str,
        "for --directions models: three different models, each given as global, before (the global"
        " model before the round) or a client's number (default: global and the first two clients)",
    ),
    (("loss_plane",), "--points", at_least(2), "grid points on each side (default: 21)"),
    (
        ("loss_plane",),
        "--span",
        at_least(1e-12, float),
        "how far the grid extends to each side, in units of its directions (default: 1 for random,"
        " 0.5 for eigenvectors)",
    ),
    (
        ("noise",),
        "--strengths",
        listed(at_least(0, float)),
        "noise strengths (default: 11 values from 0 to 0.05, or to 0.5 with --scale relative)",
    ),
    (("noise",), "--draws", at_least(1), "number of noise draws for each strength (default: 5)"),
    (
        ("noise",),
        "--scale",
        ("absolute", "relative"),
        "unit of the strengths: absolute for a standard deviation (the default), or relative to"
        " the root mean square of each tensor",
    ),
    (("hessian",), "--eigenvalues", int, "number of eigenvalues (default: 5)"),
    (("hessian",), "--tolerance", tolerance, "allowed relative error (default: 0.001)"),
    (("tsne",), "--perplexity", float, "perplexity of t-SNE (default: 30)"),
    (tuple(KINDS), "--data", str, "examples: test (default), train, or a client's number"),
    (tuple(KINDS), "--examples", at_least(1), "maximum number of examples, drawn at random"),
    (tuple(KINDS), "--seed", at_least(0), "random seed (default: 0)"),
    (tuple(KINDS), "--device", str, "device: auto, cpu, cuda or cuda:<number>"),
    (tuple(KINDS), "--data-dir", str, "directory of the data sets (default: the run's)"),
    (tuple(KINDS), "--config-dir", Path, "a directory with your own config groups"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add a subparser for each kind of analysis."""
    parser.add_argument("run", type=Path, help="a run directory")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    of = {name: kinds.add_parser(name, help=text, description=text) for name, text in KINDS.items()}
    others = (
        "another run whose models are shown in the same plane; may be repeated (FedNTD Fig. 21)"
    )
    of["tsne"].add_argument(
        "--with", dest="others", metavar="RUN", action="append", type=Path, help=others
    )
    for names, flag, values, text in FLAGS:
        allowed = {"choices": values} if isinstance(values, tuple) else {"type": values}
        for name in names:
            of[name].add_argument(flag, help=text, **allowed)
    for name, each in of.items():
        add_picture_flags(each)
        each.set_defaults(**COMMON | OF_KIND[name])


def check(options: Namespace) -> None:
    """Raise ConfigError if a directory contains no run or if flags cannot be combined."""
    from fedexp.rundir.reader import require_run

    for run in (options.run, *getattr(options, "others", ())):
        require_run(run)
    if options.kind != "loss_plane":
        return
    if options.directions != "models" and options.models is not None:
        raise ConfigError("--models: can only be used with --directions models")
    if options.directions == "models" and (options.span, options.client) != (None, None):
        raise ConfigError("--directions models: cannot be used with --span or --client")


def analyse(options: Namespace) -> list[str]:
    """Run the analysis, write its files, and return the lines to print."""
    from fedexp.config.composition import trusted_classes
    from fedexp.core.console import log_to_console
    from fedexp.figures import read_settings
    from fedexp.rundir.reader import RunDirectory
    from fedexp_papers.posthoc import kinds

    check(options)
    look = read_settings(options.run).changed(options)
    log_to_console()
    with trusted_classes(options.config_dir):
        run = RunDirectory(options.run)
        results = kinds.KINDS[options.kind](run, options)
        return [line for result in results for line in result.write(run, look)]
