"""`python -m fedexp` is the `fedexp` command."""

import sys

from fedexp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
