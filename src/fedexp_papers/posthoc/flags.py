"""Define the flags of `fedexp-papers analyse RUN KIND` and run the analysis."""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError
from fedexp.figures.pictures import add_picture_flags

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


ANY = tuple(KINDS)
# (kinds of analysis, flag, its choices or the function that parses its value, default, help text)
FLAGS: tuple[tuple[tuple[str, ...], str, Any, Any, str], ...] = (
    (LOSS, "--round", int, None, "round of the model (default: the last saved model)"),
    (LOSS, "--client", int, None, "use the local model of this client"),
    (
        FEATURES,
        "--round",
        listed(int),
        [],
        "rounds of the models (default: the last round with local models)",
    ),
    (("hypersphere",), "--clients", at_least(0), 3, "maximum number of local models"),
    (("tsne",), "--clients", at_least(0), 10, "maximum number of local models"),
    (
        ("loss_plane",),
        "--directions",
        ("random", "eigenvectors", "models"),
        "random",
        "directions that span the plane; random directions are filter-normalised",
    ),
    (
        ("loss_plane",),
        "--models",
        str,
        None,
        "for --directions models: three different models, each given as global, before (the global"
        " model before the round) or a client's number (default: global and the first two clients)",
    ),
    (("loss_plane",), "--points", at_least(2), 21, "grid points on each side"),
    (
        ("loss_plane",),
        "--span",
        at_least(1e-12, float),
        None,
        "how far the grid extends to each side, in units of its directions (default: 1 for random,"
        " 0.5 for eigenvectors)",
    ),
    (
        ("noise",),
        "--strengths",
        listed(at_least(0, float)),
        None,
        "noise strengths (default: 11 values from 0 to 0.05, or to 0.5 with --scale relative)",
    ),
    (("noise",), "--draws", at_least(1), 5, "number of noise draws for each strength"),
    (
        ("noise",),
        "--scale",
        ("absolute", "relative"),
        "absolute",
        "unit of the strengths: absolute for a standard deviation, or relative to the root mean"
        " square of each tensor",
    ),
    (("hessian",), "--eigenvalues", int, 5, "number of eigenvalues"),
    (("hessian",), "--tolerance", tolerance, 1e-3, "allowed relative error"),
    (("tsne",), "--perplexity", float, 30.0, "perplexity of t-SNE"),
    (ANY, "--data", str, "test", "examples: test, train, or a client's number"),
    (ANY, "--examples", at_least(1), 1000, "maximum number of examples, drawn at random"),
    (ANY, "--seed", at_least(0), 0, "random seed"),
    (ANY, "--device", str, "auto", "device: auto, cpu, cuda or cuda:<number>"),
    (ANY, "--data-dir", str, None, "directory of the data sets (default: the run's)"),
    (ANY, "--config-dir", Path, None, "a directory with your own config groups"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add a subparser for each kind of analysis."""
    parser.add_argument("run", type=Path, help="a run directory")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    for name, text in KINDS.items():
        each = kinds.add_parser(name, help=text, description=text)
        add_flags(each, name)
        add_picture_flags(each)


def add_flags(parser: ArgumentParser, kind: str) -> None:
    for names, flag, values, default, text in FLAGS:
        if kind in names:
            allowed = {"choices": values} if isinstance(values, tuple) else {"type": values}
            shown = text if default in (None, []) else f"{text} (default: %(default)s)"
            parser.add_argument(flag, default=default, help=shown, **allowed)
    if kind == "tsne":
        parser.set_defaults(examples=200)
        others = "another run whose models are shown in the same plane; may be repeated"
        look: dict[str, Any] = {"metavar": "RUN", "action": "append", "type": Path, "default": []}
        parser.add_argument("--with", dest="others", help=f"{others} (FedNTD Fig. 21)", **look)


def default_flags(kind: str) -> dict[str, Any]:
    """Return the default value of each flag of a kind."""
    parser = ArgumentParser()
    add_flags(parser, kind)
    return vars(parser.parse_args([]))


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
