"""Reads finished run folders: results, comparisons, reports, and exports."""
