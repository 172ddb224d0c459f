"""One page about one or several runs: `python -m pflsim.report RUN...`."""
