"""The command line in a clone; `python -m pflsim` is the same where the package is installed."""

import sys

from pflsim.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
