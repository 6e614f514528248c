"""`python -m fedexp.wandb_push`, as scripts of users have it."""

import sys

from fedexp.cli.push import main

if __name__ == "__main__":
    sys.exit(main())
