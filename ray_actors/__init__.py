"""Where clients and server run: hosts, placement, executors, and the run as a whole. Only here is ray imported."""
