"""`python -m fedexp.view`, as scripts of users have it."""

import sys

from fedexp.analysis.view.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
