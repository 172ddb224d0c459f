"""Where clients and server run: hosts, placement, executors, and the run as a whole. Only here is ray imported."""

import os

# Read by Ray while it is imported. A dead actor is told of by the journal in one line, instead of by Ray in twenty.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")
