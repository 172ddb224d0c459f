"""Tunes methods with equal budgets and compares them: `pflsim tune`."""
