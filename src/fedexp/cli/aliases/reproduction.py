"""`python -m fedexp.reproduction` is `fedexp reproduction`, as scripts of users have it."""

import sys

from fedexp.cli.subcommands import call

if __name__ == "__main__":
    sys.exit(call("reproduction", "python -m fedexp.reproduction"))
