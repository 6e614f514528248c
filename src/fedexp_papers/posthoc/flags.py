"""Define the flags of `fedexp-papers analyse RUN KIND` and run the analysis."""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.figures.pictures import add_picture_flags

if TYPE_CHECKING:
    from fedexp_papers.posthoc.base import Result, Runs

KINDS = {
    "loss_plane": "loss and accuracy on a plane spanned by two directions (FedNTD Fig. 14)",
    "noise": "loss and accuracy under Gaussian noise on the parameters (FedNTD Fig. 14)",
    "hessian": "the largest eigenvalues of the Hessian of the loss",
    "hypersphere": "2-dimensional features on the unit circle (FedNTD Fig. 18)",
    "tsne": "t-SNE of the features of global and local models (FedNTD Fig. 19 to 21)",
    "neurons": "the class that each neuron prefers, in global and local models (FedNTD Fig. 17)",
}
LOSS, FEATURES = ("loss_plane", "noise", "hessian"), ("hypersphere", "tsne", "neurons")


def number(least: float, most: float = math.inf, kind: type[float] = int) -> Callable[[str], float]:
    """Return a function that parses a number of a type, at least `least` and less than `most`."""
    noun = "a whole number" if kind is int else "a number"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < most:
            end = "" if most == math.inf else f" and less than {most:g}"
            raise ArgumentTypeError(f"{text}: must be {noun}, at least {least:g}{end}")
        return value

    return parse


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a function that parses a comma-separated list and converts each item with `kind`."""
    return lambda text: [kind(part) for part in text.split(",")]


def client(text: str) -> int | str:
    if text != "first" and not text.isdecimal():
        raise ArgumentTypeError(f"{text}: must be first or the number of a client")
    return text if text == "first" else int(text)


ANY = tuple(KINDS)
# (kinds of analysis, flag, its choices or the function that parses its value, default, help text)
FLAGS: tuple[tuple[tuple[str, ...], str, Any, Any, str], ...] = (
    (
        LOSS,
        "--round",
        listed(number(0)),
        [],
        "rounds of the models (default: the last saved model)",
    ),
    (
        LOSS,
        "--client",
        client,
        None,
        "use the local model of this client, or `first` for the first saved one",
    ),
    (
        FEATURES,
        "--round",
        listed(number(0)),
        [],
        "rounds of the models (default: the last round with local models)",
    ),
    (("hypersphere",), "--clients", number(0), 3, "maximum number of local models"),
    (("tsne",), "--clients", number(0), 10, "maximum number of local models"),
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
    (("loss_plane",), "--points", number(2), 21, "grid points on each side"),
    (
        ("loss_plane",),
        "--span",
        number(1e-12, kind=float),
        None,
        "how far the grid extends to each side, in units of its directions (default: 1 for random,"
        " 0.5 for eigenvectors)",
    ),
    (
        ("noise",),
        "--strengths",
        listed(number(0, kind=float)),
        None,
        "noise strengths (default: 11 values from 0 to 0.05, or to 0.5 with --scale relative)",
    ),
    (("noise",), "--draws", number(1), 5, "number of noise draws for each strength"),
    (
        ("noise",),
        "--scale",
        ("absolute", "relative"),
        "absolute",
        "unit of the strengths: absolute for a standard deviation, or relative to the root mean"
        " square of each tensor",
    ),
    (("hessian",), "--eigenvalues", int, 5, "number of eigenvalues"),
    (("hessian",), "--tolerance", number(1e-12, 1, float), 1e-3, "allowed relative error"),
    (("tsne",), "--perplexity", float, 30.0, "perplexity of t-SNE"),
    (ANY, "--data", str, "test", "examples: test, train, or a client's number"),
    (ANY, "--examples", number(1), 1000, "maximum number of examples, drawn at random"),
    (ANY, "--seed", number(0), 0, "random seed"),
    (ANY, "--device", str, "auto", "device: auto, cpu, cuda or cuda:<number>"),
    (ANY, "--data-dir", str, None, "directory of the data sets (default: the run's)"),
    (ANY, "--config-dir", Path, None, "a directory with your own config groups"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add a subparser with flags for each kind of analysis."""
    parser.add_argument("run", type=Path, help="a run directory")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    for kind, description in KINDS.items():
        each = kinds.add_parser(kind, help=description, description=description)
        for names, flag, values, default, text in FLAGS:
            if kind in names:
                allowed = {"choices": values} if isinstance(values, tuple) else {"type": values}
                shown = text if default in (None, []) else f"{text} (default: %(default)s)"
                each.add_argument(flag, default=default, help=shown, **allowed)
        add_picture_flags(each)
        if kind == "tsne":
            each.set_defaults(examples=200)
            others = "another run whose models are shown in the same plane; may be repeated"
            look: dict[str, Any] = {"metavar": "RUN", "action": "append", "type": Path}
            text = f"{others} (FedNTD Fig. 21)"
            each.add_argument("--with", dest="others", default=[], help=text, **look)


def make_results(runs: "Runs", options: Namespace, title: str = "") -> "Iterator[Result]":
    """Yield the result for each round. title: of the figures; by default, it describes the run."""
    from fedexp_papers.posthoc import features, loss

    analyse = getattr(loss if options.kind in LOSS else features, options.kind)
    for number in options.round or [None]:
        yield analyse(runs, number, options, title)


def analyse(options: Namespace) -> list[str]:
    """Run the analysis, write its files, and return the lines to print."""
    from fedexp.config.composition import trusted_classes
    from fedexp.core.console import log_to_console
    from fedexp.figures import read_settings
    from fedexp.rundir.reader import require_run

    run = require_run(options.run)
    look = read_settings(options.run).changed(options)
    log_to_console()
    with trusted_classes(options.config_dir):
        results = make_results({"": run}, options)
        return [line for result in results for line in result.write(run, look)]
