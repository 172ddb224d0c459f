"""Training of stacked clients: their state is stacked, and each training step is traced once and run many times."""
