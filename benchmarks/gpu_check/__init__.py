"""Checks a GPU in minutes, on a machine without network: see docs/gpu.md."""
