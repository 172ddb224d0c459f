"""Writes an HTML report on runs: `python launch.py report RUN…`."""
