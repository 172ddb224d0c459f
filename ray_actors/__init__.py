"""Where clients and server run: hosts, placement, executors, and the run as a whole. The only folder that imports ray."""
