"""Leaderboards, and results beside those of papers."""
