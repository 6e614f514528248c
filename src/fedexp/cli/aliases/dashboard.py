"""`python -m fedexp.dashboard` is `fedexp dashboard`, as scripts of users have it."""

import sys

from fedexp.cli.subcommands import call

if __name__ == "__main__":
    sys.exit(call("dashboard", "python -m fedexp.dashboard"))
