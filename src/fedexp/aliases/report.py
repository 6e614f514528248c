"""`python -m fedexp.report`, as scripts of users have it."""

import sys

from fedexp.analysis.report import main

if __name__ == "__main__":
    sys.exit(main())
