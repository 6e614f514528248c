"""`python -m fedexp.wandb_push` is `fedexp push`, as scripts of users have it."""

import sys

from fedexp.cli.subcommands import call

if __name__ == "__main__":
    sys.exit(call("push", "python -m fedexp.wandb_push"))
