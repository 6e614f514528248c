"""Command-line flags shared by several subcommands."""

from argparse import ArgumentParser

from fedexp.figures.pictures import FORMATS


def add_picture_flags(parser: ArgumentParser) -> None:
    """Add the flags for the pictures' style, which override the run's configuration."""
    parser.add_argument(
        "--format", help=f"of the pictures, several with commas: {','.join(FORMATS)}"
    )
    parser.add_argument("--no-titles", action="store_true", help="pictures without a title")
    parser.add_argument(
        "--style", help="a matplotlib style file (.mplstyle), read after fedexp's own"
    )


def add_layout_flags(parser: ArgumentParser) -> None:
    """Add the flags for the layout of a sweep's table."""
    parser.add_argument("--metrics", help="values of summary.json, such as best_accuracy")
    parser.add_argument("--sort", help="name, or a metric, whose best row comes first")
    parser.add_argument("--transpose", action="store_true", help="rows as columns")
