"""`python -m fedexp.dashboard`, as scripts of users have it."""

import sys

from fedexp.trackers.dashboard import main

if __name__ == "__main__":
    sys.exit(main())
