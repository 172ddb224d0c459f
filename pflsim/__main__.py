"""`python -m pflsim` is the command line."""

import sys
from pathlib import Path


def main() -> int:
    """Run the command line, and say what takes long, from its imports on."""
    from pflsim.progress import doing, watched

    with watched(next((text.removeprefix("progress=") for text in sys.argv if text.startswith("progress=")), None)):
        doing("starting")
        from pflsim.cli import run

        doing("reading the settings")
        return run()


if __name__ == "__main__":
    # -m puts the working directory first on the import path, where a file yaml.py in it would replace a library. Own
    # classes in it are still found, see `pflsim.config.components.resolve`.
    if not sys.flags.safe_path and not Path(__file__).is_relative_to(sys.path[0]):
        del sys.path[0]
    sys.exit(main())
