"""Checks that take too long for a test: references, mutants, random settings, damaged files, killed processes."""
