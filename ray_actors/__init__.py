"""Runs the clients and the server, inline or as Ray actors. Only this package imports Ray."""

import os

# Ray reads this while it is imported. pflsim reports the death of an actor in one line, so Ray's own report is skipped.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")
