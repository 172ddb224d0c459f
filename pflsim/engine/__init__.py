"""The rounds of a run: what is planned, the order of events, recovery from lost nodes, and signals."""
