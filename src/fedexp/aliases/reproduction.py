"""`python -m fedexp.reproduction`, as scripts of users have it."""

import sys

from fedexp.analysis.reproduction import main

if __name__ == "__main__":
    sys.exit(main())
