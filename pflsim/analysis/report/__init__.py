"""Writes an HTML report on runs: `pflsim report RUN…`."""
