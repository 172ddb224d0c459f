"""Checks that take too long for a test: references, random settings, damaged files, killed processes."""
