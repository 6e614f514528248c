"""Command-line flags shared by several subcommands."""

from argparse import ArgumentParser

from fedexp.figures.pictures import FORMATS


def add_picture_flags(parser: ArgumentParser) -> None:
    """Add the flags that set the style of figures and override the run's configuration."""
    parser.add_argument(
        "--format", help=f"comma-separated formats of the figures: {','.join(FORMATS)}"
    )
    parser.add_argument("--classes", help="names of all classes, separated by commas")
    parser.add_argument("--no-titles", action="store_true", help="draw figures without titles")
    parser.add_argument(
        "--style", help="matplotlib style file (.mplstyle), applied after fedexp's style"
    )


def add_layout_flags(parser: ArgumentParser) -> None:
    """Add the flags that set the layout of a sweep's table."""
    parser.add_argument(
        "--metrics", help="comma-separated keys of summary.json, such as best_accuracy"
    )
    parser.add_argument("--sort", help="sort rows by name, or by a metric with the best first")
    parser.add_argument("--transpose", action="store_true", help="exchange rows and columns")
    baseline = "method that all others are compared with (default: FedAvg, else the first)"
    parser.add_argument("--baseline", metavar="NAME", help=baseline)
