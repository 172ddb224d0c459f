"""`python -m pflsim` is the command line."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # -m puts the working directory first on the import path, where a file yaml.py in it would replace a library. Own
    # classes in it are still found, see `pflsim.config.components.resolve`.
    if not sys.flags.safe_path and not Path(__file__).is_relative_to(sys.path[0]):
        del sys.path[0]
    from pflsim.cli import run

    sys.exit(run())
