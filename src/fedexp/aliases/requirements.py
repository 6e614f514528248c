"""`python -m fedexp.requirements`, as scripts of users have it."""

import sys

from fedexp.analysis.algorithm_costs import main

if __name__ == "__main__":
    sys.exit(main())
