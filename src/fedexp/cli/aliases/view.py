"""`python -m fedexp.view` is `fedexp view`, as scripts of users have it."""

import sys

from fedexp.cli.subcommands import call

if __name__ == "__main__":
    sys.exit(call("view", "python -m fedexp.view"))
