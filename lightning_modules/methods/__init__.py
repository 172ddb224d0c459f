"""The client side of each method: one file per method, with the name of the method."""
