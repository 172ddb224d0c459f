"""One page about one or several runs: `python launch.py report RUN...`."""
