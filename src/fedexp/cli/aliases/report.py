"""`python -m fedexp.report` is `fedexp report`, as scripts of users have it."""

import sys

from fedexp.cli.subcommands import call

if __name__ == "__main__":
    sys.exit(call("report", "python -m fedexp.report"))
