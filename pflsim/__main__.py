"""`python -m pflsim` is the command line."""

import sys

from pflsim.cli import run

if __name__ == "__main__":
    sys.exit(run())
