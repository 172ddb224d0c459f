"""Clients of one architecture trained together: their values stacked, their step traced once and run many times."""
