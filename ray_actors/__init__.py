"""Runs the clients and the server, inline or as Ray actors. Only this package imports Ray."""

import os

# Ray reads these while it is imported. pflsim reports the death of an actor itself.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task|Task .* failed")
# States that are lost with a node are read from a checkpoint; Ray would repeat all rounds before them.
os.environ.setdefault("RAY_lineage_pinning_enabled", "0")
