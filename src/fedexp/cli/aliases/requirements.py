"""`python -m fedexp.requirements` is `fedexp requirements`, as scripts of users have it."""

import sys

from fedexp.cli.subcommands import call

if __name__ == "__main__":
    sys.exit(call("requirements", "python -m fedexp.requirements"))
