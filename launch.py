"""The command line in a clone; `python -m pflsim` is the same where the package is installed."""

import sys

from pflsim.cli import run

if __name__ == "__main__":
    sys.exit(run())
